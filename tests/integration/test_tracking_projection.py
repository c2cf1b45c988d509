"""MLflow equals the store: one run a trial, each step once, true status, and nothing of what a lost attempt did."""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mlflow_lab import MlflowDatabase
from sweep_lab import Lab

from overnight.core.enums import Outcome, TrialState
from overnight.platform.outbox.__main__ import quiet_mlflow
from overnight.store import metrics, outbox, trials

if TYPE_CHECKING:
    from overnight.platform.outbox.projector import Projector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
S = TrialState


def tracking() -> Any:
    """The module that imports mlflow, which takes seconds: not in processes that run other tests."""
    quiet_mlflow(os.environ)
    return importlib.import_module("overnight.store.tracking")


def projection() -> Any:
    """The module of the projector, which imports mlflow too."""
    quiet_mlflow(os.environ)
    return importlib.import_module("overnight.platform.outbox.projector")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables; making them takes seconds."""
    home = tmp_path_factory.mktemp("mlflow")
    tracking().Tracker(f"sqlite:///{home / 'mlflow.db'}", home).experiment("Default")
    return home / "mlflow.db"


@pytest.fixture
def lab(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(template.read_bytes())
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.fixture
def mlflow(lab: Lab) -> MlflowDatabase:
    return MlflowDatabase(lab.home / "mlflow.db")


def projector(lab: Lab) -> "Projector":
    return projection().Projector(
        lab.store, tracking().Tracker(lab.settings.effective_mlflow_uri, lab.home / "artifacts"), lab.clock
    )


def run_id(lab: Lab, trial_id: str) -> str | None:
    with lab.store.read() as conn:
        return trials.get(conn, trial_id).mlflow_run_id


def lag(lab: Lab) -> int:
    with lab.store.read() as conn:
        return outbox.lag(conn)


def in_store(lab: Lab, trial_id: str) -> list[tuple[str, int, float]]:
    with lab.store.read() as conn:
        return [(p.key, p.step, p.value) for p in metrics.points(conn, trial_id).items]


def log(lab: Lab, attempt: str, steps: range, *, value: float = 0.0, generation: int = 1) -> None:
    now = lab.clock.now().timestamp()
    rows = [["loss", step, value + step / 10, now + step] for step in steps]
    lab.spool(attempt, "metrics", generation, rows=rows)


def started(lab: Lab, trial_id: str, fork_step: int | None = None) -> str:
    attempt = lab.begin(trial_id)
    more = {} if fork_step is None else {"fork_step": fork_step}
    lab.spool(attempt, "started", pids={}, warm=True, **more)
    return attempt


def test_a_trial_becomes_one_run_with_its_facts(lab: Lab, mlflow: MlflowDatabase) -> None:
    params = {"lr": 0.001, "opt": {"name": "adamw", "betas": [0.9, 0.99]}, "note": "a=b", "off": None}
    trial = lab.propose(params, code="0" * 40, seed=5)
    telling = projector(lab)
    telling.round()
    assert mlflow.runs()[trial] == (run_id(lab, trial), "SCHEDULED")
    assert mlflow.params(trial) == {
        "lr": "0.001",
        "opt.name": "adamw",
        "opt.betas": "[0.9, 0.99]",
        "note": "a=b",
        "off": "null",
    }
    tags = mlflow.tags(trial)
    assert (tags["overnight.trial"], tags["mlflow.runName"]) == ("digits-1", "digits-1")
    assert (tags["overnight.code"], tags["overnight.seed"], tags["overnight.attempts"]) == ("0" * 40, "5", "0")
    assert json.loads(tags["overnight.params"]) == params
    attempt = started(lab, trial)
    telling.round()
    assert mlflow.runs()[trial][1] == "RUNNING"
    assert mlflow.tags(trial)["overnight.attempts"] == "1"
    log(lab, attempt, range(1, 4))
    lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    telling.round()
    assert mlflow.runs()[trial][1] == "FINISHED"
    assert [(k, s, v) for k, s, v, _ in mlflow.points(trial)] == in_store(lab, trial)
    assert mlflow.points(trial)[0][3] == round((lab.clock.now().timestamp() + 1) * 1000)
    assert lag(lab) == 0


@pytest.mark.parametrize(
    ("outcome", "state", "status"),
    [
        (Outcome.COMPLETED, S.COMPLETED, "FINISHED"),
        (Outcome.USER_ERROR, S.FAILED, "FAILED"),
        (Outcome.PRUNED, S.PRUNED, "KILLED"),
        (Outcome.CANCELLED, S.CANCELLED, "KILLED"),
        (Outcome.PREEMPTED, S.QUEUED, "SCHEDULED"),
        (Outcome.VANISHED, S.QUEUED, "SCHEDULED"),
    ],
)
def test_the_status_is_true(lab: Lab, mlflow: MlflowDatabase, outcome: Outcome, state: S, status: str) -> None:
    trial = lab.propose({"x": 1})
    telling = projector(lab)
    attempt = started(lab, trial)
    telling.round()
    lab.end(attempt, outcome, state)
    telling.round()
    assert mlflow.runs()[trial][1] == status
    if state in (S.COMPLETED, S.FAILED):  # and a rerun is not finished any more
        lab.move(trial, S.QUEUED)
        telling.round()
        assert mlflow.runs()[trial][1] == "SCHEDULED"


def test_steps_wait_for_their_commit_and_a_fork_drops_what_was_lost(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"x": 1})
    telling = projector(lab)
    first = started(lab, trial)
    log(lab, first, range(1, 9))
    assert telling.round().held == 1
    lab.spool(first, "checkpoint", step=8, uri="c", bytes=1)
    log(lab, first, range(9, 13))
    assert telling.round().held == 1
    assert [s for _, s, _, _ in mlflow.points(trial)] == list(range(1, 9))
    lab.end(first, Outcome.VANISHED, S.QUEUED)
    lab.clock.advance(10 * projection().PATIENCE_SECONDS)
    assert telling.round().held == 1  # what is not saved is about to be repeated: no patience ends here
    second = started(lab, trial, fork_step=8)
    log(lab, second, range(9, 15), value=100)
    assert telling.round().dropped == 4
    lab.end(second, Outcome.COMPLETED, S.COMPLETED)
    telling.round()
    assert [(k, s, v) for k, s, v, _ in mlflow.points(trial)] == in_store(lab, trial)
    assert len(mlflow.points(trial)) == 14
    assert lag(lab) == 0


def test_people_see_curves_of_a_trial_that_never_saves(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"x": 1})
    telling = projector(lab)
    attempt = started(lab, trial)
    log(lab, attempt, range(1, 4))
    telling.round()
    assert mlflow.points(trial) == []
    lab.clock.advance(projection().PATIENCE_SECONDS)
    telling.round()
    assert len(mlflow.points(trial)) == 3


def test_a_step_told_too_early_is_not_told_twice(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"x": 1})
    first = started(lab, trial)
    log(lab, first, range(1, 6))
    lab.clock.advance(projection().PATIENCE_SECONDS)
    projector(lab).round()
    lab.end(first, Outcome.VANISHED, S.QUEUED)
    second = started(lab, trial, fork_step=0)
    log(lab, second, range(1, 9))
    lab.end(second, Outcome.COMPLETED, S.COMPLETED)
    projector(lab).round()
    assert [s for _, s, _, _ in mlflow.points(trial)] == list(range(1, 9))
    assert [(k, s, v) for k, s, v, _ in mlflow.points(trial)] == in_store(lab, trial)
    assert "overnight.superseded" not in mlflow.tags(trial)


def test_a_value_that_a_lost_attempt_told_otherwise_is_marked(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"x": 1})
    first = started(lab, trial)
    log(lab, first, range(1, 3))
    lab.clock.advance(projection().PATIENCE_SECONDS)
    projector(lab).round()
    lab.end(first, Outcome.VANISHED, S.QUEUED)
    second = started(lab, trial, fork_step=0)
    log(lab, second, range(1, 3), value=7)
    lab.end(second, Outcome.COMPLETED, S.COMPLETED)
    projector(lab).round()
    assert [s for _, s, _, _ in mlflow.points(trial)] == [1, 2]
    assert "loss" in mlflow.tags(trial)["overnight.superseded"]


def test_telling_everything_again_changes_nothing(lab: Lab, mlflow: MlflowDatabase) -> None:
    """As after a kill between MLflow's answer and the removal of the row."""
    trial = lab.propose({"x": 1})
    attempt = started(lab, trial)
    log(lab, attempt, range(1, 50))
    lab.spool(attempt, "mlflow", params={"batch": "64"}, tags={"team": "vision"})
    lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    with lab.store.read() as conn:
        rows = outbox.pending(conn)
    projector(lab).round()
    before = (mlflow.runs(), mlflow.points(trial), mlflow.params(trial), mlflow.tags(trial))
    assert len(before[1]) == 49
    again = [(row.trial_id, row.kind, row.data) for row in rows]
    lab.store.write(lambda conn: outbox.add(conn, lab.clock.now(), again))
    lab.store.write(lambda conn: trials.set_mlflow_run(conn, trial, None))  # type: ignore[arg-type]
    projector(lab).round()
    assert (mlflow.runs(), mlflow.points(trial), mlflow.params(trial), mlflow.tags(trial)) == before


def test_a_param_that_changes_is_kept_as_a_tag_of_its_attempt(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"lr": 0.1})
    attempt = started(lab, trial)
    lab.spool(attempt, "mlflow", params={"lr": "0.2", "batch": "64"})
    projector(lab).round()
    assert mlflow.params(trial) == {"lr": "0.1", "batch": "64"}
    assert mlflow.tags(trial)["overnight.attempt-1.param.lr"] == "0.2"


def test_odd_names_and_values_reach_mlflow_harmlessly(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"[/bold]": "\x1b]0;x\x07" * 2000, "../up": 1, "": 2, "größe": 3})
    attempt = started(lab, trial)
    rows = [
        ["../a/\x00b", 1, 1.0, 1.0],
        ["loss", 1, "nan", 1.0],
        ["loss", 2, "inf", 2.0],
        ["loss", 3, "no number", 3.0],
    ]
    lab.spool(attempt, "metrics", rows=rows)
    lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    projector(lab).round()
    assert lag(lab) == 0
    assert [(k, s) for k, s, _, _ in mlflow.points(trial)][-2:] == [("loss", 1), ("loss", 2)]
    assert len(mlflow.params(trial)) == 4


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "a//b", "a/../../b", "x" * 300, "a\nb", "a/", "./a", "…"]
)
def test_any_name_becomes_one_that_mlflow_takes(name: str) -> None:
    key = tracking().metric_key(name)
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(key)
    assert 1 <= len(key) <= 250


def test_a_run_that_a_person_deleted_stays_deleted(lab: Lab, mlflow: MlflowDatabase) -> None:
    trial = lab.propose({"x": 1})
    attempt = started(lab, trial)
    telling = projector(lab)
    telling.round()
    telling._tracker._client.delete_run(str(run_id(lab, trial)))
    log(lab, attempt, range(1, 3))
    lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    telling.round()
    assert lag(lab) == 0
    assert mlflow.runs() == {}


def test_an_mlflow_that_lost_its_database_gets_new_runs(lab: Lab, mlflow: MlflowDatabase, template: Path) -> None:
    trial = lab.propose({"x": 1})
    attempt = started(lab, trial)
    projector(lab).round()
    (lab.home / "mlflow.db").write_bytes(template.read_bytes())
    log(lab, attempt, range(1, 3))
    lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    projector(lab).round()
    assert mlflow.runs()[trial] == (run_id(lab, trial), "FINISHED")
    assert len(mlflow.points(trial)) == 2


def test_a_deleted_experiment_is_taken_back(lab: Lab) -> None:
    tracker = tracking().Tracker(lab.settings.effective_mlflow_uri, lab.home / "artifacts")
    first = tracker.experiment("digits")
    tracker._client.delete_experiment(first)
    assert tracker.experiment("digits") == first


def test_errors_are_of_two_kinds(lab: Lab) -> None:
    tracker = tracking().Tracker(lab.settings.effective_mlflow_uri, lab.home / "artifacts")
    with pytest.raises(tracking().RunGoneError):
        tracker.set_status("0" * 32, "RUNNING")
    run = tracker.run(tracker.experiment("e"), "tri-1", "e-1", 0, {})
    with pytest.raises(tracking().TrackingRefusedError):
        tracker._client.delete_run(run)
        tracker.log_metrics(run, [("loss", 1.0, 0, 1)])
    with pytest.raises(tracking().TrackingAwayError):
        tracking().Tracker("http://127.0.0.1:1").experiment("e")


def test_while_mlflow_is_away_everything_waits_and_then_arrives_in_order(lab: Lab, mlflow: MlflowDatabase) -> None:
    down = projection().Projector(lab.store, tracking().Tracker("http://127.0.0.1:1"), lab.clock)
    trial = lab.propose({"x": 1})
    attempt = started(lab, trial)
    for hour in range(3):
        log(lab, attempt, range(hour * 10 + 1, hour * 10 + 11))
        lab.clock.advance(3600)
        with pytest.raises(tracking().TrackingAwayError):
            down.round()
    lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    assert lag(lab) == 7
    projector(lab).round()
    points = mlflow.points(trial)
    assert [s for _, s, _, _ in points] == list(range(1, 31))
    assert [ms for *_, ms in points] == sorted(ms for *_, ms in points)
    assert lag(lab) == 0


def test_one_trial_on_which_mlflow_fails_does_not_hold_up_the_others(lab: Lab, mlflow: MlflowDatabase) -> None:
    bad, good = lab.propose({"x": 1}), lab.propose({"x": 2})
    for trial in (bad, good):
        attempt = started(lab, trial)
        log(lab, attempt, range(1, 3))
        lab.end(attempt, Outcome.COMPLETED, S.COMPLETED)
    lab.store.write(
        lambda conn: outbox.add(
            conn,
            lab.clock.now(),
            [(bad, "metrics", {"attempt": 1, "generation": 1, "rows": [["loss", 2**80, 1.0, 1.0]]})],
        )
    )
    telling = projector(lab)
    for _ in range(2):
        assert telling.round().held > 0
    with lab.store.read() as conn:
        assert {row.trial_id for row in outbox.pending(conn)} == {bad}
    assert mlflow.runs()[good][1] == "FINISHED"
    assert len(mlflow.points(good)) == 2
