"""A gang goes on at other numbers of ranks: with the very weights and moments of the save, and the same samples."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_ranks import Lab, shared_lab

from overnight.trainer.data.record import audit

GLOBAL_BATCH, EPOCHS, UPDATES = 12, 4, 16
KILL, YIELD = int(signal.SIGKILL), int(signal.SIGTERM)
SCRIPT = """
import hashlib, json, os
import torch
from waiting import wait_for
from torch import nn
from overnight import trainer

class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 50
    def __getitem__(self, index):
        x = torch.sin(torch.arange(6.0) * (index + 1)) + 0.1 * torch.randn(6)
        return index, x, x.sum()

with trainer.run(every=2, keep=3, seed=3) as run:
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    loader = trainer.DataLoader(Noisy(), global_batch_size=12, micro_batch_size=2, shuffle=True)
    run.track(model=model, optimizer=optimizer)
    notes = (run.trial_dir / "notes.jsonl").open("a")

    def note(what, value):
        notes.write(json.dumps([what, run.step, run.rank, run.world_size, value]) + "\\n")
        notes.flush()

    def fingerprint():
        moments = optimizer.state_dict()["state"]
        kept = [moments[number][key] for number in sorted(moments) for key in sorted(moments[number])]
        content = [tensor.numpy().tobytes() for tensor in (*net.state_dict().values(), *kept)]
        return hashlib.sha256(b"".join(content)).hexdigest()

    if run.resumed:
        note("resumed", fingerprint())
    wish = json.loads(os.environ.get("DISTURB", "null"))
    for indices, inputs, targets in run.batches(loader, epochs=4):
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        (loss / run.accumulate).backward()
        note("batch", [indices.tolist(), loss.item()])
        if run.update_now:
            optimizer.step()
            optimizer.zero_grad()
            note("after", fingerprint())
            if wish and (run.step, run.rank) == (wish["step"], run.world_size - 1):
                wait_for(lambda: any((run.trial_dir / "checkpoints").glob(wish["behind"])), "a checkpoint")
                os.kill(os.getpid(), wish["signal"])
    if run.rank == 0:
        torch.save(net.state_dict(), run.trial_dir / "weights.pt")
"""


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


class Trial:
    """One trial in a folder of its own, started at any number of ranks."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        folder.mkdir()
        self._lab, self.folder = lab, folder
        self._script = folder / "sizes.py"
        self._script.write_text(SCRIPT)

    @property
    def path(self) -> Path:
        (trial,) = (self.folder / ".overnight" / "sizes").iterdir()
        return trial

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, ranks: int, step: int = 0, number: int = 0, behind: str = "*") -> list[int]:
        """Exit codes; at ``step``, and once there is a checkpoint ``behind``, the last rank gets the signal."""
        wish = {"step": step, "signal": number, "behind": behind}
        env = {"DISTURB": json.dumps(wish)} if step else {}
        return self._lab.run(self._script, self.folder, ranks=ranks, env=env)

    def notes(self, what: str) -> list[tuple[int, int, int, Any]]:
        """Step, rank, number of ranks and value, in the order in which they were written."""
        lines = (self.path / "notes.jsonl").read_text().splitlines()
        return [tuple(rest) for first, *rest in map(json.loads, lines) if first == what]

    def batches(self) -> dict[int, dict[tuple[int, ...], set[float]]]:
        """By step, the losses that were ever computed of each micro-batch."""
        found: dict[int, dict[tuple[int, ...], set[float]]] = {}
        for step, _, _, (indices, loss) in self.notes("batch"):
            found.setdefault(step, {}).setdefault(tuple(indices), set()).add(loss)
        return found


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    trial = Trial(lab, tmp_path_factory.mktemp("sizes") / "undisturbed")
    assert trial.start(1) == [0], trial.log[-3000:]
    return trial


def test_one_two_one_three_ranks_go_on_with_every_weight_moment_and_sample(
    lab: Lab, undisturbed: Trial, tmp_path: Path
) -> None:
    """C12, as gangs."""
    trial = Trial(lab, tmp_path / "disturbed")
    assert trial.start(1, 3, YIELD) == [75], trial.log[-3000:]
    assert trial.start(2, 7, KILL, "step-[46].attempt-2.1")[1] == -KILL
    assert trial.start(1, 11, YIELD) == [75], trial.log[-3000:]
    for ranks in (4, 5):
        assert trial.start(ranks) == [1] * ranks
        assert f"does not divide by {ranks} rank(s) x micro batch 2" in trial.log
    assert trial.log.count("Numbers of ranks that fit: 1, 2, 3, 6.") >= 2
    assert trial.start(3) == [0, 0, 0], trial.log[-3000:]

    resumed = trial.notes("resumed")
    starts = [
        [step for step, rank, ranks, _ in resumed if (rank, ranks) == which] for which in ((1, 2), (0, 1), (2, 3))
    ]
    assert starts in ([[3], [at], [11]] for at in (4, 6)), starts
    after: dict[int, set[str]] = {}
    for step, _, _, value in trial.notes("after"):
        after.setdefault(step, set()).add(value)
    for step, rank, ranks, value in resumed:
        assert {value} == after[step], f"rank {rank} of {ranks} at step {step}"

    counted = audit(trial.path)
    assert (counted.repeated, counted.skipped) == (0, 0)
    assert counted.recorded == counted.expected == UPDATES * GLOBAL_BATCH
    batches, reference = trial.batches(), undisturbed.batches()
    assert {step: set(one) for step, one in batches.items()} == {step: set(one) for step, one in reference.items()}
    for step, losses in reference.items():
        for indices, (expected,) in losses.items():
            assert all(abs(loss - expected) <= 1e-3 * max(1.0, expected) for loss in batches[step][indices]), step
    weights, expected = (torch.load(one.path / "weights.pt") for one in (trial, undisturbed))
    assert all(torch.allclose(weights[key], expected[key], rtol=1e-3, atol=1e-4) for key in expected)
