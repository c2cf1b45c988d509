"""A script with everything that makes exact resume hard, and a way to be killed at any point of any step.

``DISTURB`` is JSON ``{"step", "rank", "when": "start" | "middle" | "end", "signal"}``, or a list of such. With the path
of a file as ``"after"`` the rank waits until that is there; signal 0 is none.
"""

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from overnight import trainer


class Noisy(torch.utils.data.Dataset):
    """Draws from all three generators for every sample."""

    def __init__(self, image: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = (
            torch.randn(50, 1, 6, 6, generator=generator) if image else torch.randn(50, 12, generator=generator)
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(()) + random.random() + np.random.rand()
        return self.inputs[index] + 0.1 * noise, index % 3


def build(kind: str) -> nn.Module:
    if kind == "cnn":
        conv, norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        return nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3))
    return nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))


def disturb(run: trainer.Run, when: str) -> None:
    wishes = json.loads(os.environ.get("DISTURB", "[]"))
    for wish in wishes if isinstance(wishes, list) else [wishes]:
        if (wish["step"], wish["rank"], wish["when"]) == (run.step, run.rank, when):
            while not Path(wish.get("after", "/")).exists():
                time.sleep(0.002)
            os.kill(os.getpid(), wish["signal"])


def main() -> None:
    defaults = {"kind": "mlp", "epochs": 3, "every": 4, "global_batch": 8, "micro_batch": 0, "nested": False}
    with trainer.run(defaults=defaults, every=int(os.environ.get("EVERY", "4")), seed=3) as run:
        net = build(run.params["kind"])
        model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
        cls = torch.optim.SGD if run.params["kind"] == "cnn" else torch.optim.AdamW
        optimizer = cls(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        run.track(model=model)
        loader = trainer.DataLoader(
            Noisy(run.params["kind"] == "cnn"),
            global_batch_size=run.params["global_batch"],
            micro_batch_size=run.params["micro_batch"] or None,
            shuffle=True,
        )
        run.track(optimizer=optimizer, scheduler=scheduler)
        log = (run.trial_dir / f"losses-{run.rank}.jsonl").open("a")

        def train(batches) -> None:
            for inputs, labels in batches:
                disturb(run, "start")
                loss = nn.functional.cross_entropy(model(inputs), labels) / run.accumulate
                loss.backward()
                disturb(run, "middle")
                if run.update_now:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    run.state["sum"] = run.state.get("sum", 0.0) + loss.item()
                log.write(json.dumps([run.step, loss.item().hex(), torch.rand(()).item()]) + "\n")
                log.flush()
                disturb(run, "end")

        if run.params["nested"]:
            for _ in run.epochs(run.params["epochs"]):
                train(run.batches(loader))
                run.state["random"] = torch.rand(()).item()
        else:
            train(run.batches(loader, epochs=run.params["epochs"]))
        run.report(sum=run.state["sum"])


main()
