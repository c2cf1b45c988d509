"""What the ranks of a gang without a supervisor do with the save that is under way when one of them is killed."""

import re
from pathlib import Path

import pytest
from trainer_ranks import Lab, shared_lab

from overnight.trainer.leaving import LATE_SECONDS

SCRIPT = Path(__file__).with_name("trainer_late.py")


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def waited(log: str) -> list[float]:
    return [float(seconds) for seconds in re.findall(r"rank \d waited ([\d.]+)", log)]


def run(lab: Lab, folder: Path, case: str, ranks: int, victim: int, codes: list[int] | None = None) -> str:
    env = {"CASE": case, "VICTIM": str(victim), "OVERNIGHT_CHECKPOINTS": str(folder / "checkpoints")}
    statuses = lab.run(SCRIPT, folder, ranks=ranks, env=env)
    log = (folder / "log").read_text()
    assert statuses == (codes or [-9 if rank == victim else 1 for rank in range(ranks)]), log
    return log


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (3, 2), (2, 0)])
def test_nobody_waits_for_a_commit_that_cannot_come(lab: Lab, tmp_path: Path, ranks: int, victim: int) -> None:
    log = run(lab, tmp_path, "torn", ranks, victim)
    assert len(waited(log)) == ranks - 1 and max(waited(log)) < LATE_SECONDS / 2, log
    reason = f"checkpoint step-2.attempt-1.1 was given up: rank {victim} has ended before its part was written"
    assert log.count(f"a save was not committed: {reason}") == ranks - 1, log
    assert not (tmp_path / "checkpoints" / "step-2.attempt-1.1").exists()


def test_a_commit_that_can_still_come_is_waited_for(lab: Lab, tmp_path: Path) -> None:
    log = run(lab, tmp_path, "told", 2, 1)
    assert len(waited(log)) == 1 and 0.5 < waited(log)[0] < LATE_SECONDS, log
    assert (tmp_path / "checkpoints" / "step-2.attempt-1.1" / "manifest.json").exists(), log
    assert "not committed" not in log


@pytest.mark.parametrize(("case", "ranks", "victim"), [("final", 2, 1), ("final", 3, 0), ("before", 2, 1)])
def test_at_the_end_nobody_waits_for_a_last_save_that_cannot_come(
    lab: Lab, tmp_path: Path, case: str, ranks: int, victim: int
) -> None:
    log = run(lab, tmp_path, case, ranks, victim)
    assert len(waited(log)) == ranks - 1 and max(waited(log)) < LATE_SECONDS / 2, log
    reason = f"checkpoint step-5.attempt-1.1 was given up: rank {victim} has ended before its part was written"
    assert log.count(f"SaveFailedError: {reason}") == log.count(reason) == ranks - 1, log
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*1.1")] == ["step-1.attempt-1.1"]


@pytest.mark.parametrize(("case", "victim", "codes"), [("final-told", 1, [0, -9]), ("final-slow", -1, [0, 0])])
def test_a_last_save_that_can_still_come_is_waited_for(
    lab: Lab, tmp_path: Path, case: str, victim: int, codes: list[int]
) -> None:
    log = run(lab, tmp_path, case, 2, victim, codes)
    assert (tmp_path / "checkpoints" / "step-5.attempt-1.1" / "manifest.json").exists(), log
    assert "given up" not in log and "Error" not in log, log
