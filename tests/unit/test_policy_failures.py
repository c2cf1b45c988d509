"""How often devices fail: from attempts in a real database to the variable that a rank reads."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.enums import LeaseState, Outcome
from overnight.platform.engines.failures import PRIOR_SECONDS, FailureRates, mean_seconds
from overnight.platform.node.command import rank_env
from overnight.store import models
from overnight.store.engine import Store
from overnight.store.failures import History, histories
from overnight.testing.clock import FakeClock
from overnight.trainer.environment import read_environment
from overnight.trainer.interval import MTBF_SECONDS

NOW = datetime(2026, 1, 31, tzinfo=UTC)
HOUR = 3600.0


def run(conn: sa.Connection, number: int, devices: list[str], hours: float, outcome: Outcome, days_ago: float) -> None:
    """An attempt that has ended, without what else belongs to it."""
    ended = NOW - timedelta(days=days_ago)
    common = {"trial_id": "t", "node_id": "n", "generation": 1, "cause": "", "exit_codes": [], "directive": {}}
    times = {"created_at": ended, "started_at": ended - timedelta(hours=hours), "ended_at": ended}
    row = {"id": f"a{number}", "number": number, "outcome": outcome.value, **common, **times}
    conn.execute(sa.insert(models.attempts), row)
    lease = {"attempt_id": f"a{number}", "state": LeaseState.CLEAN.value, "created_at": ended}
    conn.execute(sa.insert(models.leases), lease)
    held = [{"attempt_id": f"a{number}", "device_id": device, "clean": 1} for device in devices]
    conn.execute(sa.insert(models.lease_devices), held)


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(f"sqlite:///{tmp_path / 'x.db'}", FakeClock(NOW)) as opened:

        def fill(conn: sa.Connection) -> None:
            conn.execute(sa.text("PRAGMA defer_foreign_keys = ON"))
            run(conn, 1, ["d0"], 10, Outcome.COMPLETED, 1)
            run(conn, 2, ["d0", "d1"], 5, Outcome.INFRA_FAULT, 2)
            run(conn, 3, ["d1"], 1, Outcome.VANISHED, 3)
            run(conn, 4, ["d1"], 1, Outcome.USER_ERROR, 3)
            run(conn, 5, ["d0"], 99, Outcome.INFRA_FAULT, 40)

        engine = sa.create_engine(f"sqlite:///{tmp_path / 'x.db'}")  # rows without their trials: no foreign keys here
        with engine.begin() as conn:
            fill(conn)
        engine.dispose()
        yield opened


def test_faults_are_shared_and_old_ones_forgotten(store: Store) -> None:
    with store.read() as conn:
        found = histories(conn, NOW - timedelta(days=30))
    assert found == {"d0": History(15 * HOUR, 0.5), "d1": History(7 * HOUR, 1.5)}


async def test_rates_of_devices(store: Store) -> None:
    rates = FailureRates(store, FakeClock(NOW))
    assert rates.mtbf_seconds(["d0"]) == PRIOR_SECONDS == MTBF_SECONDS
    rates._histories = rates._look(NOW - timedelta(days=30))
    assert rates.mtbf_seconds(["d0"]) == pytest.approx((PRIOR_SECONDS + 15 * HOUR) / 1.5)
    assert rates.mtbf_seconds(["d1"]) < rates.mtbf_seconds(["d0"])
    assert rates.mtbf_seconds(["d0", "d1"]) == pytest.approx((PRIOR_SECONDS + 22 * HOUR) / 3)
    assert rates.mtbf_seconds(["new"]) == PRIOR_SECONDS


@given(st.lists(st.builds(History, st.floats(0, 1e9), st.floats(0, 1e4)), max_size=8))
def test_more_time_without_a_fault_is_never_worse(found: list[History]) -> None:
    calm = [*found, History(1e6, 0.0)]
    assert 0 < mean_seconds(found) <= mean_seconds(calm)
    assert mean_seconds([*found, History(0.0, 1.0)]) < mean_seconds(found)


@pytest.mark.parametrize(("known", "seen"), [(7200.4, 7200), (None, None), (0.0, None)])
def test_a_rank_reads_it(known: float | None, seen: int | None) -> None:
    order = {
        "trial_id": "t", "trial_name": "t-1", "experiment": "t", "attempt_id": "a", "number": 1, "generation": 1,
        "trial_dir": "/t", "attempt_dir": "/t/1", "checkpoints": "/t/c", "params": {}, "seed": 1, "threads": 1,
        "args": "flags", "env": {}, "devices": [], "world_size": 1, "ranks": [0], "mlflow_experiment": "t",
        "mtbf_seconds": known,
    }  # fmt: skip
    places = dict.fromkeys(("supervisor", "mlflow_uri", "mlflow_token", "mlflow_run_id", "master_port", "imports"), "")
    env = rank_env(order, {}, rank=0, local_rank=0, places=places)
    assert read_environment(env).mtbf_seconds == seen
