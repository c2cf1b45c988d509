"""With three ranks a resumed run has the same bits where torch keeps its buckets; elsewhere the run says so."""

import json
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab

SCRIPT = Path(__file__).with_name("trainer_buckets.py")
RANKS = 3
KEPT = ("--unused", "true")
DEALT_ANEW = [(), ("--unused", "true", "--static", "true")]
WARNING = "overnight: torch deals out the gradients of DistributedDataParallel anew"


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def final(folder: Path) -> dict[str, Any]:
    (trial,) = (folder / ".overnight" / SCRIPT.stem).iterdir()
    result: dict[str, Any] = json.loads(max((trial / "attempts").glob("*/final.json")).read_text())
    return result


def undisturbed_and_killed(lab: Lab, folder: Path, argv: tuple[str, ...]) -> tuple[Any, Any]:
    """What a run ends with that nobody touched, and one that was killed twice, each time behind a checkpoint."""
    one, other = folder / "undisturbed", folder / "killed"
    assert lab.run(SCRIPT, one, *argv, ranks=RANKS) == [0] * RANKS, (one / "log").read_text()
    for step in ("5", "8"):
        assert lab.run(SCRIPT, other, *argv, ranks=RANKS, env={"KILL": step}) == [-SIGKILL] * RANKS
    assert lab.run(SCRIPT, other, *argv, ranks=RANKS) == [0] * RANKS, (other / "log").read_text()
    log = (other / "log").read_text()
    assert "resumed at step 3" in log and "resumed at step 6" in log
    return final(one), final(other)


def test_buckets_that_stay_give_the_same_bits_and_no_warning(lab: Lab, tmp_path: Path) -> None:
    undisturbed, killed = undisturbed_and_killed(lab, tmp_path, KEPT)
    assert killed == undisturbed
    assert WARNING not in (tmp_path / "killed" / "log").read_text()


@pytest.mark.parametrize("argv", DEALT_ANEW, ids=["as torch has it", "static graph"])
def test_buckets_that_are_dealt_out_anew_are_named_once_by_each_start(
    lab: Lab, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    undisturbed, killed = undisturbed_and_killed(lab, tmp_path, argv)
    assert killed["step"] == undisturbed["step"] == 12
    assert killed["weights"] != undisturbed["weights"], "no difference any more: the warning has lost its reason"
    assert (tmp_path / "undisturbed" / "log").read_text().count(WARNING) == 1
    assert (tmp_path / "killed" / "log").read_text().count(WARNING) == 3


def test_two_ranks_are_told_nothing(lab: Lab, tmp_path: Path) -> None:
    assert lab.run(SCRIPT, tmp_path, ranks=2) == [0, 0], (tmp_path / "log").read_text()
    assert WARNING not in (tmp_path / "log").read_text()
