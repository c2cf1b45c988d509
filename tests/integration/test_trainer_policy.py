"""When whole runs save: at the ends of epochs, by time, by what saves cost; and that no wall clock decides anything."""

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab

import overnight.trainer
from overnight.trainer.checkpoint.manifest import read_manifest
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.interval import optimal_seconds

SCRIPT = Path(__file__).with_name("trainer_policy.py")


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def start(lab: Lab, folder: Path, mode: str, ranks: int = 1, *, killed: bool = False, **env: str) -> str:
    """What one start of a training said."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    codes = lab.run(SCRIPT, folder, ranks=ranks, env={"MODE": mode, **env})
    said = log.read_text()
    assert (codes[0] == -9) if killed else set(codes) == {0}, said
    return said


def trial_of(folder: Path) -> Path:
    (trial,) = (folder / ".overnight" / "trainer_policy").iterdir()
    return trial


def facts(folder: Path) -> dict[str, Any]:
    """What rank 0 wrote down of itself."""
    found: dict[str, Any] = json.loads((trial_of(folder) / "facts.json").read_text())
    return found


def place_of(folder: Path) -> LocalPlace:
    return LocalPlace(trial_of(folder) / "checkpoints")


def steps(folder: Path) -> list[int]:
    """At which checkpoints are; a gang saves once more at its end what it has just saved."""
    return sorted({name.step for name in place_of(folder).checkpoints()})


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_is_saved_where_it_ends(lab: Lab, tmp_path: Path, ranks: int) -> None:
    start(lab, tmp_path, "epochs", ranks)
    assert steps(tmp_path) == [5, 10, 15, 20, 24, 28]


@pytest.mark.parametrize("ranks", [1, 2])
def test_seconds_are_those_of_a_clock_that_never_jumps(lab: Lab, tmp_path: Path, ranks: int) -> None:
    start(lab, tmp_path, "seconds", ranks, JUMPS="1")
    found = facts(tmp_path)
    assert found["elapsed"] >= 0.7
    assert steps(tmp_path)[-1] == found["updates"]
    place = place_of(tmp_path)
    kinds = [read_manifest(place.path(name)).kind for name in place.checkpoints()]
    assert 1 <= kinds.count("periodic") <= found["elapsed"] / 0.2 + 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_auto_follows_what_saves_cost_and_how_often_ranks_fail(lab: Lab, tmp_path: Path, ranks: int) -> None:
    start(lab, tmp_path, "auto", ranks, OVERNIGHT_MTBF_SECONDS="10000")
    found = facts(tmp_path)
    assert found["first"] >= 0.1
    assert found["stall"] > 0.3 * 0.1 and found["write"] > 0.3 * 12 * 0.03, "smoothed: a third is of the last save"
    assert found["share"] > 0.4
    assert found["cost"] == pytest.approx(found["stall"] + found["share"] * found["write"], rel=0.3)
    assert found["seconds"] == pytest.approx(optimal_seconds(found["cost"], 10_000 / ranks))


def test_jumps_of_the_wall_clock_change_nothing(lab: Lab, tmp_path: Path) -> None:
    ranks = 2
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    start(lab, calm, "jumps", ranks)
    start(lab, wild, "jumps", ranks, killed=True, JUMPS="1", KILL_AT="10")
    first = [read_manifest(place_of(wild).path(name)) for name in place_of(wild).checkpoints()]
    created = {manifest.step: datetime.fromisoformat(manifest.created_at) for manifest in first}
    assert created[4] - created[8] > timedelta(days=1), "the jumps have reached the writer"
    assert "resumed at step 8 " in start(lab, wild, "jumps", ranks, JUMPS="1")
    assert steps(wild) == steps(calm) == [4, 8, 16, 20]
    assert final(wild) == final(calm)


def final(folder: Path) -> dict[str, Any]:
    newest = max((trial_of(folder) / "attempts").glob("*/final.json"))
    result: dict[str, Any] = json.loads(newest.read_text())
    return result


WALL_CLOCK = re.compile(
    r"\btime\.time\b|\btime_ns\b|\bfrom time import\b|\bdatetime\.(now|utcnow|today)\b"
    r"|\b(local|gm|c)time\(|\bst_[amc]time|\bgetmtime\b"
)
TELL_THE_TIME = {
    "checkpoint/place.py": "how old a file is, by the clock of the disk alone: that of a file made for it less its own",
    "metrics.py": "when a value was logged, for people",
    "phases.py": "how long ago the attempt was launched, for the ledger: never longer than this process is old",
    "checkpoint/manifest.py": "when a checkpoint was made, for people",
}


def test_nothing_else_in_the_trainer_looks_at_a_wall_clock() -> None:
    root = Path(overnight.trainer.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if WALL_CLOCK.search(path.read_text())}
    assert found == set(TELL_THE_TIME)
