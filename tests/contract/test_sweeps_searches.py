"""What sweeps and the outbox read, and APScheduler's job store, on every database."""

import asyncio
from datetime import UTC, datetime

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from overnight.core.enums import ProposalStatus, SweepState, TrialState
from overnight.core.ids import new_id
from overnight.core.models.api import SweepIn
from overnight.core.models.spec import Distribution, SweepConfig
from overnight.platform.sweeps.schedules import ring
from overnight.store import attempts, metrics, projection, searches, sweeps
from overnight.store.engine import Store
from overnight.store.schedules import job_store

SPACE = {"x": Distribution(kind="range", low=0, high=1)}


def start(lab, parent_id: str | None = None) -> str:
    body = SweepIn(config=lab.proposal().config, sweep=SweepConfig(space=SPACE))
    add = sweeps.add
    return lab.store.write(
        lambda conn: add(conn, ids=new_id, now=lab.now, actor="ann", sweep=body, parent_id=parent_id).id
    )


def test_what_a_sweep_has_asked_for(lab) -> None:
    other = lab.trial({"x": 0.9})
    sweep = start(lab)
    for number in (1, 0):  # by number, not by time
        lab.accept({"x": number}, sweep_id=sweep, key=searches.proposal_key(sweep, number), actor=f"sweep:{sweep}")
    lab.accept({"x": 0.9}, sweep_id=sweep, key=searches.proposal_key(sweep, 2), actor=f"sweep:{sweep}")
    lab.accept({"x": 0.5}, sweep_id=sweep, key="somebody else's")
    with lab.store.read() as conn:
        asked = searches.asked(conn, sweep)
        assert [a.number for a in asked] == [None, 0, 1, 2]
        assert [a.trial.params["x"] for a in asked] == [0.5, 0, 1, 0.9]
        assert asked[3].status is ProposalStatus.DUPLICATE
        assert asked[3].trial.id == other.id
        assert searches.active(conn) == [sweep]
        assert len(searches.open_trials(conn, sweep, [TrialState.QUEUED])) == 3


def test_the_pulse_moves_with_the_sweep_alone(lab) -> None:
    parent = start(lab)
    sweep = start(lab, parent)
    mine = lab.trial({"x": 1}, sweep_id=sweep)
    other = lab.trial({"x": 2})

    def pulse():
        with lab.store.read() as conn:
            return searches.pulse(conn, sweep)

    before = pulse()
    lab.begin(other, 0)
    assert pulse() == before
    lab.begin(mine, 1)
    after = pulse()
    assert after != before
    sibling = start(lab, parent)
    assert pulse() != after
    with lab.store.read() as conn:
        assert searches.runs_of(conn, parent, [SweepState.ACTIVE]) == [sweep, sibling]


def test_curves_forget_what_a_restart_left_behind(lab) -> None:
    trial = lab.trial({"x": 1})

    def write(conn) -> None:
        metrics.append(conn, trial.id, 1, 1, [("loss", step, float(step), 1.0) for step in range(1, 6)])
        metrics.append(conn, trial.id, 2, 1, [("loss", 4, 40.0, 2.0), ("loss", 6, "nan", 2.0), ("acc", 1, 1.0, 1.0)])

    lab.store.write(write)
    with lab.store.read() as conn:
        [curve] = searches.curves(conn, [trial.id], "loss").values()
    assert [step for step, _ in curve] == [1, 2, 3, 4, 6]
    assert curve[3] == (4, 40.0)
    assert curve[4][1] != curve[4][1]


def test_facts_for_the_outbox(lab) -> None:
    trial = lab.trial({"x": 1})
    attempt = lab.begin(trial)
    with lab.store.read() as conn:
        [facts] = projection.facts(conn, [trial.id, "tri-none"]).values()
        assert (facts.name, facts.state, facts.attempts_made) == (trial.name, TrialState.STARTING, 1)
        assert facts.params == {"x": 1}
        assert searches.of_attempt(conn, attempt.id) == (trial.id, None)
        assert searches.of_attempt(conn, "att-none") is None
        assert attempts.get(conn, attempt.id).number == 1


async def test_alarms_survive_in_the_job_store(store: Store, store_url: str) -> None:
    at = datetime(2099, 1, 1, tzinfo=UTC)
    for again in (False, True):
        alarm = AsyncIOScheduler(jobstores={"default": job_store(store_url)}, timezone=UTC)
        alarm.start(paused=True)
        if not again:
            alarm.add_job(ring, "date", run_date=at, args=["/home", "swp-1"], id="swp-1")
        job = alarm.get_job("swp-1")
        assert job is not None
        assert job.next_run_time == at
        alarm.shutdown()
        await asyncio.sleep(0)


@pytest.mark.parametrize("key", ["", "swp-1", "swp-1:", "swp-1:x", "swp-2:3", "a:swp-1:3"])
def test_keys_of_others_are_no_numbers(key: str) -> None:
    assert searches._number(key, "swp-1") is None
    assert searches._number(searches.proposal_key("swp-1", 12), "swp-1") == 12
