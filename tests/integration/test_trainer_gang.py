"""The ranks of a gang log and report as one; where they do not do the same, all of them say so and end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab
from trainer_supervisor import Supervisor

SCRIPT = Path(__file__).with_name("trainer_gang.py")


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "s")
    yield supervisor
    supervisor.close()


def supervised(supervisor: Supervisor, folder: Path, case: str) -> dict[str, str]:
    return {
        "CASE": case,
        "OVERNIGHT_ATTEMPT": "1",
        "OVERNIGHT_TRIAL_DIR": str(folder / "trial"),
        "OVERNIGHT_ATTEMPT_DIR": str(folder / "trial" / "attempts" / "0001"),
        "OVERNIGHT_PARAMS": "{}",
        "OVERNIGHT_SUPERVISOR": supervisor.path,
    }


def values(supervisor: Supervisor, key: str) -> list[tuple[int, Any]]:
    return [(step, value) for name, step, value, _ in supervisor.rows if name == key]


@pytest.mark.parametrize("send_seconds", ["0", "1000"], ids=["each boundary", "at saves and reports only"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_value_arrives_once_reduced_by_its_rule(
    lab: Lab, supervisor: Supervisor, tmp_path: Path, ranks: int, send_seconds: str
) -> None:
    env = supervised(supervisor, tmp_path, "rules") | {"SEND_SECONDS": send_seconds}
    assert lab.run(SCRIPT, tmp_path, ranks=ranks, env=env) == [0] * ranks, (tmp_path / "log").read_text()
    steps, mean = range(1, 41), (ranks - 1) / 2
    assert values(supervisor, "loss") == [(step, step + mean) for step in steps]
    assert values(supervisor, "step") == [(step, step) for step in steps]
    assert values(supervisor, "train/tokens") == [(step, ranks * (ranks + 1) / 2) for step in steps]
    assert values(supervisor, "high") == [(step, ranks - 1) for step in steps]
    assert values(supervisor, "low") == [(step, "nan" if step == 5 else 1 - ranks) for step in steps]
    assert values(supervisor, "odd") == [(step, {7: "nan", 8: "inf"}.get(step, 1.0)) for step in steps]
    reports = [(body["rank"], body["step"], body["values"]) for body in supervisor.of("/v1/report")]
    expected = [{"accuracy": mean, "note": "rank 0"}, {"best/accuracy": ranks - 1}]
    assert reports == [(0, step, values) for step in (10, 20, 30, 40) for values in expected]
    before = supervisor.received[: supervisor.received.index(("/v1/report", supervisor.of("/v1/report")[0]))]
    told = [row[1] for _, body in before for row in body.get("metrics", []) if row[0] == "loss"]
    assert told == list(range(1, 11)), "a report comes behind what was logged before it"


def test_padding_does_not_weigh(lab: Lab, supervisor: Supervisor, tmp_path: Path) -> None:
    env = supervised(supervisor, tmp_path, "padded")
    assert lab.run(SCRIPT, tmp_path, ranks=2, env=env) == [0, 0], (tmp_path / "log").read_text()
    assert values(supervisor, "loss") == [(1, 3.0), (2, 2.5), (3, 3.0), (4, 2.0)]
    assert values(supervisor, "peak") == [(1, 4.0), (2, 4.0), (3, 4.0), (4, 2.0)]
    assert values(supervisor, "total") == [(1, 6.0), (2, 6.0), (3, 6.0), (4, 2.0)]
    assert values(supervisor, "val") == [(step, 3.0) for step in (1, 2, 3, 4)]
    assert [body["values"] for body in supervisor.of("/v1/report")] == [{"val": 3.0}] * 4


def test_log_does_not_wait_for_the_other_rank(lab: Lab, tmp_path: Path) -> None:
    assert lab.run(SCRIPT, tmp_path, ranks=2, env={"CASE": "unhurried"}) == [0, 0], (tmp_path / "log").read_text()


WRONG = [
    ("one_is_silent", 3, "rank 0 logged loss (mean) at step 3, rank 2 nothing"),
    ("other_names", 2, "rank 0 logged extra of 0 (mean) at step 3, rank 1 logged extra of 1 (mean) at step 3"),
    ("only_rank_zero_reports", 2, "one is between two updates (step 1), another in run.report() (step 1)"),
    ("other_report", 2, "rank 0 reported accuracy (max) at step 1, rank 1 reported accuracy (mean) at step 1"),
    ("only_rank_zero_saves", 2, "one is at a save (step 2), another at the end of the run (step 2)"),
    ("fewer_steps", 2, "one is at the end of the run (step 3), another between two updates (step 4)"),
]


@pytest.mark.parametrize(("case", "ranks", "message"), WRONG, ids=[case for case, _, _ in WRONG])
def test_ranks_that_do_not_do_the_same_end_with_the_reason(
    lab: Lab, tmp_path: Path, case: str, ranks: int, message: str
) -> None:
    assert lab.run(SCRIPT, tmp_path, ranks=ranks, env={"CASE": case}) == [1] * ranks, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "RanksDisagreeError" in log and message in log, log
    assert not list(tmp_path.glob(".overnight/*/*/checkpoints/step-*"))
