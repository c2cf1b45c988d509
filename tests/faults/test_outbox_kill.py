"""The outbox process, killed for real at random moments: MLflow ends up equal to the store, every metric once."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from mlflow_lab import MlflowDatabase
from sweep_lab import Lab
from waiting import wait_for

from overnight.core.enums import Outcome, TrialState
from overnight.store import metrics, outbox
from overnight.testing.clock import FakeClock

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(400),  # deadlines are inside; the outbox is niced, and a busy machine leaves it little
]
S = TrialState
NUM_TRIALS = 16
NUM_KILLS = 2
PATIENCE_SECONDS = 150.0


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.chdir(tmp_path)
    lab = Lab(tmp_path, clock=FakeClock(datetime.now(UTC)))
    yield lab
    lab.close()


def start(lab: Lab) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OVERNIGHT_HOME": str(lab.home)}
    with (lab.home / "outbox.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "overnight.platform.outbox", "--home", str(lab.home)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )


def leave(process: subprocess.Popen[bytes]) -> int:
    """As when the server dies: its end of the pipe is closed."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(20)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def lag(lab: Lab) -> int:
    with lab.store.read() as conn:
        return outbox.lag(conn)


def log(lab: Lab, attempt: str, steps: range) -> None:
    now = lab.clock.now().timestamp()
    lab.spool(attempt, "metrics", rows=[[key, step, step / 7, now + step] for step in steps for key in ("loss", "acc")])


def interrupted_trial(lab: Lab, number: int) -> str:
    """A trial that was lost at step 15, five steps after its last commit, and was resumed."""
    trial = lab.propose({"number": number})
    first = lab.begin(trial)
    lab.spool(first, "started", pids={}, warm=True)
    log(lab, first, range(1, 11))
    lab.spool(first, "checkpoint", step=10, uri="c", bytes=1)
    log(lab, first, range(11, 16))
    lab.end(first, Outcome.VANISHED, S.QUEUED)
    second = lab.begin(trial)
    lab.spool(second, "started", pids={}, warm=True, fork_step=10)
    log(lab, second, range(11, 31))
    lab.end(second, Outcome.COMPLETED, S.COMPLETED)
    return trial


def progress(mlflow: MlflowDatabase) -> int:
    """Rows of every kind, so that a kill can fall between any two writes; none before there is a database."""
    tables = ("runs", "tags", "params", "metrics")
    return sum(count for table in tables for (count,) in mlflow.query(f"select count(*) from {table}"))


def test_killed_at_random_moments_the_next_one_takes_over_and_everything_is_told_once(lab: Lab) -> None:
    source = random.Random(11)
    mlflow = MlflowDatabase(lab.home / "mlflow.db")
    trials = [interrupted_trial(lab, n) for n in range(NUM_TRIALS)]
    active, standby = start(lab), start(lab)
    for _ in range(NUM_KILLS):
        goal = progress(mlflow) + source.randint(50, 400)
        wait_for(lambda goal=goal: progress(mlflow) >= goal, f"{goal} are told", PATIENCE_SECONDS)
        assert lag(lab) > 0, "killed too late to prove anything"
        kill(active)
        active, standby = standby, start(lab)
    wait_for(lambda: lag(lab) == 0, "everything is told", PATIENCE_SECONDS)
    assert leave(standby) == 0  # it never got the lock, and ends with its server all the same
    active.send_signal(signal.SIGTERM)
    assert active.wait(20) == 0
    active.communicate()
    runs = mlflow.runs()  # which fails if a trial has two
    assert set(runs) == set(trials)
    assert {status for _, status in runs.values()} == {"FINISHED"}
    assert len(mlflow.query("select run_uuid from runs")) == NUM_TRIALS
    for trial in trials:
        with lab.store.read() as conn:
            expected = [(p.key, p.step, p.value, round(p.time * 1000)) for p in metrics.points(conn, trial).items]
        assert len(expected) == 60
        assert mlflow.points(trial) == expected


def test_killed_while_it_makes_the_database_the_next_one_makes_it_again(lab: Lab) -> None:
    trial = lab.propose({"number": 1})
    draft = lab.home / "mlflow.db.draft"
    process = start(lab)
    wait_for(lambda: draft.exists() and draft.stat().st_size > 0, "the database is begun", PATIENCE_SECONDS)
    kill(process)
    assert not (lab.home / "mlflow.db").exists()
    process = start(lab)
    wait_for(lambda: lag(lab) == 0, "everything is told", PATIENCE_SECONDS)
    assert leave(process) == 0
    assert set(MlflowDatabase(lab.home / "mlflow.db").runs()) == {trial}
    assert list(lab.home.glob("mlflow.db.draft*")) == []
