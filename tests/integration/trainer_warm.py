"""A script that may begin from another run, writes down what it begins with, and can be killed in any step.

``WARM`` is JSON: the arguments of ``run.warm_start``. ``KILL_AT`` is a step; the last rank dies in the middle of it.
"""

import json
import os
import signal
from pathlib import Path

import torch
from torch import nn

from overnight import trainer
from overnight.trainer.checkpoint.state import hash_tensor


class Points(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.points = torch.randn(48, 12, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index


def fingerprints(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "model": [hash_tensor(one) for one in net.state_dict().values()],
        "moments": [hash_tensor(m) for m in moments],
    }


def main() -> None:
    with trainer.run(every=None, keep=10, seed=int(os.environ["SEED"])) as run:
        net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
        optimizer = torch.optim.AdamW(model.parameters(), lr=float(os.environ["LR"]))
        run.track(model=model, optimizer=optimizer)
        arguments = json.loads(os.environ.get("WARM", "null"))
        filled = run.warm_start(**arguments) if arguments else None
        log = (run.trial_dir / f"said-{run.rank}.jsonl").open("a")

        def say(**facts: object) -> None:
            log.write(json.dumps({**facts, "step": run.step, **fingerprints(net, optimizer)}) + "\n")
            log.flush()

        lr = optimizer.param_groups[0]["lr"]
        say(filled=filled, resumed=run.resumed, lr=lr, state=dict(run.state), draw=torch.rand(()).item())
        loader = trainer.DataLoader(Points(), global_batch_size=8, shuffle=True)
        save = None
        for points, indices in run.batches(loader, epochs=1):
            if save is not None:
                save.result(timeout=60)  # each of them is there, however slow the machine is
            loss = nn.functional.cross_entropy(model(points), indices % 3)
            loss.backward()
            if int(os.environ.get("KILL_AT", "0")) == run.step and run.rank == run.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            run.state["last"] = run.step
            save = run.save() if run.step in (2, 4) else None
            say(samples=indices.tolist(), loss=loss.item().hex())
        if run.rank == 0 and not arguments:
            states = {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
            torch.save({**states, "epoch": 1}, Path("whole.pt"))


main()
