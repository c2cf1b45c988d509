"""What the tests of restarts and hangs work with: a node, a small exact training, and what must be true of it."""

import functools
import json
from pathlib import Path
from typing import Any

from node_lab import Lab, wait_for

from overnight.trainer.data.record import audit

UPDATES, BATCH = 48, 12
TRAIN = """
import os, signal, time
import torch
from torch import nn
from overnight import trainer

class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 144
    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * (index + 1)) + 0.1 * torch.randn(4)
        return x, x.sum()

with trainer.run(defaults={"pause": 0.02, "workers": 0, "every": 6}, every=None) as run:
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = trainer.DataLoader(Noisy(), global_batch_size=12, shuffle=True, num_workers=run.params["workers"])
    run.track(model=model, optimizer=optimizer)
    generation = int(os.environ["OVERNIGHT_GENERATION"])
    saved = None
    for x, y in run.batches(loader, epochs=4):
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        BODY
        if run.every(updates=run.params["every"]):
            saved = run.save()
        time.sleep(run.params["pause"])
"""


def train(lab: Lab, body: str = "pass", name: str = "train.py", **fields: Any) -> str:
    return str(lab.run(lab.script(TRAIN.replace("BODY", body), name), **fields))


def ranks(lab: Lab, attempt: str, generation: int = 1) -> dict[int, int]:
    """Pids of the ranks once this generation has started."""
    if generation > 1:
        wait_for(lambda: generation in generations(lab, attempt), 30, f"generation {generation}")
    return {int(rank): one["pid"] for rank, one in lab.pids(attempt)["ranks"].items()}


def generations(lab: Lab, attempt: str) -> list[int]:
    return [event["data"]["generation"] for event in lab.server.events(attempt, "generation")]


def committed(lab: Lab, attempt: str) -> list[int]:
    return [event["data"]["step"] for event in lab.server.events(attempt, "checkpoint")]


def final(lab: Lab, attempt: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((lab.folder(attempt) / "final.json").read_text())
    return result


def logs(lab: Lab, attempt: str, num_ranks: int = 2) -> str:
    return "\n".join(lab.log(attempt, rank) for rank in range(num_ranks))


@functools.cache
def undisturbed(lab: Lab, num_ranks: int) -> dict[str, Any]:
    """The end of a run that nobody touches."""
    whole = train(lab, name="whole.py", num_ranks=num_ranks, params={"pause": 0.0})
    assert lab.server.exit_of(whole, 60)["exit_codes"] == [0] * num_ranks, logs(lab, whole, num_ranks)
    return final(lab, whole)


def check_as_undisturbed(lab: Lab, attempt: str, num_ranks: int) -> dict[str, Any]:
    """The attempt went through, its weights are those of a run that nobody touched, every sample counts once."""
    report: dict[str, Any] = lab.server.exit_of(attempt, 60)
    assert report["exit_codes"] == [0] * num_ranks, logs(lab, attempt, num_ranks)
    assert (report["killed"], report["error"]) == (None, None)
    assert final(lab, attempt) == undisturbed(lab, num_ranks)
    counted = audit(lab.home.trial_dir(f"tri-{attempt[4:]}"))
    assert (counted.repeated, counted.skipped, counted.recorded) == (0, 0, UPDATES * BATCH)
    return report


def losses(lab: Lab, attempt: str) -> dict[int, list[int]]:
    """Steps of the loss by generation."""
    found: dict[int, list[int]] = {}
    for event in lab.server.events(attempt, "metrics"):
        found.setdefault(event["generation"], []).extend(row[1] for row in event["data"]["rows"] if row[0] == "loss")
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
