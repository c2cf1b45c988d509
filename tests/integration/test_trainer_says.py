"""What a run says by itself: what it would lose at a resume, and what changed since it was saved; once, by one rank."""

import json
from pathlib import Path

import pytest
from trainer_ranks import Lab, shared_lab

SCRIPT = Path(__file__).with_name("trainer_says.py")
EVERYTHING = ("--tracked", "model,optimizer,scheduler,average")


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def start(
    lab: Lab, folder: Path, *argv: str, ranks: int = 1, code: int = 0, hash_seed: str = "7", **conditions: object
) -> list[str]:
    """The lines that one start of the training has written."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    env = {"CONDITIONS": json.dumps(conditions), "PYTHONHASHSEED": hash_seed}
    codes = lab.run(SCRIPT, folder, *argv, ranks=ranks, env=env)
    said = log.read_text()
    assert set(codes) == {code}, said
    return said.splitlines()


def lines_with(text: str, lines: list[str]) -> list[str]:
    return [line for line in lines if text in line]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_tracked_is_named_once_at_the_first_save(lab: Lab, tmp_path: Path, ranks: int) -> None:
    lines = start(lab, tmp_path, ranks=ranks)
    (named,) = lines_with("not tracked", lines)
    assert "resumed run: scheduler (StepLR), average (AveragedModel). Add them" in named
    at = lines.index(named)
    assert lines.index("update 2 on rank 0") < at, "not before the first save"
    assert at < lines.index("update 4 on rank 0"), "not later than that"


def test_nothing_is_named_where_all_is_tracked(lab: Lab, tmp_path: Path) -> None:
    assert not lines_with("not tracked", start(lab, tmp_path, *EVERYTHING))


def test_a_resume_under_other_conditions_says_in_one_line_what_changed(lab: Lab, tmp_path: Path) -> None:
    ranks = 2
    start(lab, tmp_path, *EVERYTHING, ranks=ranks, code=75, leaves_at=3)
    lines = start(lab, tmp_path, *EVERYTHING, ranks=ranks, code=75, leaves_at=5)
    assert lines_with("resumed at step", lines) and not lines_with("changed since", lines), "equal conditions"
    lines = start(lab, tmp_path, *EVERYTHING, ranks=ranks, threads=2, deterministic=True, hash_seed="8")
    (changed,) = lines_with("changed since", lines)
    named = "threads 1 -> 2, hash seed 7 -> 8, deterministic algorithms False -> True"
    assert f"changed since it was saved: {named}; samples and their order stay exact" in changed
