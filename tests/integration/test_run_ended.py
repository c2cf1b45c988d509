"""A run that has ended has told its result: nothing may add to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight import trainer
from overnight.core.errors import BadInputError

LATE: list[Callable[[Any], object]] = [
    lambda run: run.save(),
    lambda run: run.log(loss=1.0),
    lambda run: run.report(loss=1.0),
    lambda run: run.check(),
    lambda run: list(run.steps(1, name="more")),
]


@pytest.fixture(params=["ended", "failed"])
def ended(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    run = trainer.run(every=None)
    try:
        with run:
            run.track(weight=torch.zeros(3))
            for _ in run.steps(2):
                run.log(loss=0.5)
            if request.param == "failed":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return run


def test_nothing_adds_to_a_run_that_has_ended(ended: Any) -> None:
    before = sorted(path.name for path in (ended.trial_dir / "checkpoints").iterdir())
    for late in LATE:
        with pytest.raises(BadInputError, match="the run has ended"):
            late(ended)
    assert sorted(path.name for path in (ended.trial_dir / "checkpoints").iterdir()) == before
    assert ended.step == 2
    assert ended.fingerprint(), "looking is allowed"
