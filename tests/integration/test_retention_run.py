"""The rules of ``trainer.run`` on a real run, over its attempts."""

import os
import subprocess
import sys
from pathlib import Path

from place_lab import steps

from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.survey import survey

SCRIPT = """
import os
import torch
from overnight import trainer

losses = [0.9, 0.3, 0.5, 0.2, 0.6, 0.7, 0.8, 0.9]
with trainer.run(every=1, keep=1, keep_every=5, keep_best=("loss", "min", 2)) as run:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    saved = None
    for step in run.steps(int(os.environ["STEPS"])):
        if saved is not None:
            saved.result()
        model(torch.ones(3)).sum().backward()
        optimizer.step(); optimizer.zero_grad()
        run.report(loss=losses[step - 1])
        saved = run.save()
"""


def train(folder: Path, num_steps: int) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder, env=env | {"STEPS": str(num_steps)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_a_run_says_stays_and_an_older_attempts_too_until_somebody_tidies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    train(tmp_path, 3)
    [root] = tmp_path.glob(".overnight/train/*/checkpoints")
    place = LocalPlace(root)
    assert steps(place) == [(1, 2), (1, 3)]
    train(tmp_path, 8)
    assert steps(place) == [(1, 2), (1, 3), (2, 4), (2, 5), (2, 8)]
    reasons = {row.name.step: row.reason for row in survey(place).rows}
    best = {2: "best 2 by loss (0.3)", 4: "best 1 by loss (0.2)"}
    assert reasons == best | {3: "", 5: "first from step 5 on", 8: "newest 1"}
    done = subprocess.run(
        [sys.executable, "-m", "overnight", "checkpoints", "prune", "--yes", str(root)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert steps(place) == [(1, 2), (2, 4), (2, 5), (2, 8)]
    found = newest_good(place)
    assert found is not None and found[0].step == 8
