"""Schedules: started once whatever happens to server and clock, with one rule for what was missed."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sweep_lab import Lab, sweep_in, until

from overnight.core.clock import SystemClock
from overnight.core.enums import SweepState, TrialState
from overnight.core.errors import InvalidSpecError
from overnight.core.models.spec import Schedule
from overnight.platform.sweeps.schedules import MISFIRE_RULE
from overnight.store import events, searches, sweeps

NIGHTLY = Schedule(cron="0 22 * * 1-5", tz="Europe/Zurich", until="08:00")
HOUR = 3600


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def at(lab: Lab, text: str) -> None:
    """Sets the clock to a UTC time, as if nothing had happened in between."""
    lab.clock.jump((datetime.fromisoformat(text).replace(tzinfo=UTC) - lab.clock.now()).total_seconds())


def runs(lab: Lab, parent_id: str) -> list[str]:
    return [s.id for s in reversed(lab.sweeps()) if s.parent_id == parent_id]


async def test_a_registration_waits_for_its_time_and_starts_once(lab: Lab) -> None:
    at(lab, "2026-11-27T12:00")
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=NIGHTLY, trials=4), actor="ann")
        assert registered.next_run_at == datetime(2026, 11, 27, 21, tzinfo=UTC)
        assert registered.cause == MISFIRE_RULE
        at(lab, "2026-11-27T20:59:59")
        await service._schedules.tick()
        assert runs(lab, registered.id) == []
        at(lab, "2026-11-27T21:00:00")
        for _ in range(3):
            await service._schedules.tick()
        [run] = runs(lab, registered.id)
        await until(lambda: len(lab.of_state(run, TrialState.QUEUED)) == 2)
        now = lab.sweep(registered.id)
        assert now.next_run_at == datetime(2026, 11, 30, 21, tzinfo=UTC)
        assert run in now.cause
        assert lab.trials(registered.id) == []


async def test_runs_of_one_schedule_try_different_things(lab: Lab) -> None:
    at(lab, "2026-11-30T20:59")
    seen = []
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=NIGHTLY, trials=2), actor="ann")
        for day in ("2026-11-30", "2026-12-01"):
            at(lab, f"{day}T21:00")
            await service._schedules.tick()
            run = runs(lab, registered.id)[-1]
            await lab.work(run, lambda p: p["x"])
            seen += [t.params["x"] for t in lab.trials(run)]
    assert len(set(seen)) == 4


@pytest.mark.parametrize(("late", "started"), [(1, True), (3599, True), (3601, False), (40 * HOUR, False)])
async def test_a_run_missed_while_the_server_was_away(lab: Lab, late: int, started: bool) -> None:
    at(lab, "2026-11-30T12:00")
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=NIGHTLY), actor="ann")
    at(lab, "2026-11-30T21:00")
    lab.clock.jump(late)
    for _ in range(2):  # the second restart finds it done
        async with lab.service():
            assert len(runs(lab, registered.id)) == int(started)
    after = lab.sweep(registered.id)
    assert after.next_run_at is not None
    assert after.next_run_at > lab.clock.now()
    assert ("skipped: the server came back" in after.cause) is not started
    assert after.cause.endswith(MISFIRE_RULE)


async def test_several_missed_runs_are_one(lab: Lab) -> None:
    at(lab, "2026-11-30T12:00")
    every = Schedule(cron="*/10 * * * *", tz="UTC", overlap="queue")
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=every), actor="ann")
    at(lab, "2026-11-30T12:45")
    async with lab.service():
        assert len(runs(lab, registered.id)) == 1
    assert lab.sweep(registered.id).next_run_at == datetime(2026, 11, 30, 12, 50, tzinfo=UTC)


async def test_a_clock_that_jumps_back_repeats_nothing(lab: Lab) -> None:
    at(lab, "2026-11-30T12:00")
    every = Schedule(cron="0 * * * *", tz="UTC", overlap="queue")
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=every), actor="ann")
        at(lab, "2026-11-30T13:00")
        await service._schedules.tick()
        at(lab, "2026-11-30T12:30")
        await service._schedules.tick()
        at(lab, "2026-11-30T13:10")
        await service._schedules.tick()
        assert len(runs(lab, registered.id)) == 1
        at(lab, "2026-11-30T14:00")
        await service._schedules.tick()
        assert len(runs(lab, registered.id)) == 2


async def test_a_night_without_that_hour_and_one_with_two(lab: Lab) -> None:
    daily = Schedule(cron="30 2 * * *", tz="Europe/Zurich", overlap="queue")
    at(lab, "2026-10-24T12:00")
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=daily), actor="ann")
        expected = ["2026-10-25T00:30", "2026-10-26T01:30"]  # UTC: once in the doubled hour, then winter time
        for text in expected:
            assert lab.sweep(registered.id).next_run_at == datetime.fromisoformat(text).replace(tzinfo=UTC)
            at(lab, text)
            await service._schedules.tick()
        at(lab, "2027-03-28T00:30")
        await service._schedules.tick()
        assert lab.sweep(registered.id).next_run_at == datetime(2027, 3, 28, 1, 30, tzinfo=UTC)


async def test_overlap_skip_and_queue(lab: Lab) -> None:
    at(lab, "2026-11-30T12:30")
    async with lab.service() as service:
        ids = {}
        for overlap in ("skip", "queue"):
            schedule = Schedule(cron="0 * * * *", tz="UTC", overlap=overlap)
            body = sweep_in(schedule=schedule, trials=2, experiment=overlap)
            ids[overlap] = (await service.start(body, actor="ann")).id
        for hour in (13, 14):
            at(lab, f"2026-11-30T{hour}:00")
            await service._schedules.tick()
        [only] = runs(lab, ids["skip"])
        assert f"skipped: {only} still runs" in lab.sweep(ids["skip"]).cause
        first, second = runs(lab, ids["queue"])
        await until(lambda: len(lab.trials(first)) == 2)
        assert lab.trials(second) == []
        await lab.work(first, lambda p: p["x"])
        await until(lambda: len(lab.trials(second)) == 2)
        with lab.store.read() as conn:
            assert len(events.page(conn, kinds=["sweep.skipped"]).items) == 1


async def test_until_ends_the_run_and_drops_what_has_not_started(lab: Lab) -> None:
    at(lab, "2026-11-30T21:00")
    async with lab.service() as service:
        registered = await service.start(sweep_in(schedule=NIGHTLY, trials=50, parallel=2), actor="ann")
        at(lab, "2026-12-01T21:00")
        await service._schedules.tick()
        [run] = runs(lab, registered.id)
        queued = await until(lambda: (q := lab.of_state(run, TrialState.QUEUED)) and len(q) == 2 and q)
        lab.begin(queued[0].id)
        at(lab, "2026-12-02T07:00")  # 08:00 in Zurich
        service._wake()
        lab.store.write(lambda conn: searches.note(conn, run, ""))
        await until(lambda: lab.of_state(run, TrialState.CANCELLED), 15)
        assert lab.sweep(run).state is SweepState.ACTIVE  # one trial still works
        lab.move(queued[0].id, TrialState.COMPLETED, value=1.0)
        done = await until(lambda: (s := lab.sweep(run)).state is SweepState.FINISHED and s)
        assert done.cause == "no new trials after 08:00 CET"


async def test_stopping_a_registration_stops_its_runs_and_its_alarm(lab: Lab) -> None:
    at(lab, "2026-11-30T12:30")
    async with lab.service() as service:
        every = Schedule(cron="0 * * * *", tz="UTC")
        registered = await service.start(sweep_in(schedule=every), actor="ann")
        at(lab, "2026-11-30T13:00")
        await service._schedules.tick()
        [run] = runs(lab, registered.id)
        await until(lambda: lab.of_state(run, TrialState.QUEUED))
        await service.stop(registered.id, actor="ann", reason="enough")
        assert lab.sweep(run).state is SweepState.STOPPED
        assert not lab.of_state(run, TrialState.QUEUED)
        assert service._schedules._alarm.get_jobs() == []
        at(lab, "2026-11-30T14:00")
        await service._schedules.tick()
        assert len(runs(lab, registered.id)) == 1


async def test_the_alarm_rings_by_itself_and_survives_a_restart(lab: Lab) -> None:
    """The real clock and APScheduler's own persistent store: no tick of ours is near."""
    clock = SystemClock()
    async with lab.service(clock=clock) as service:
        registered = await service.start(sweep_in(schedule=Schedule(cron="0 0 1 1 *", tz="UTC")), actor="ann")
    soon = datetime.now(UTC) + timedelta(seconds=1)
    lab.store.write(lambda conn: sweeps.set_next_run(conn, registered.id, soon))
    assert (lab.home / "schedules.db").exists()
    async with lab.service(clock=clock) as service:
        job = service._schedules._alarm.get_job(registered.id)
        assert job is not None
        assert abs((job.next_run_time - soon).total_seconds()) < 0.001
        await until(lambda: runs(lab, registered.id), 4)
    assert lab.sweep(registered.id).next_run_at is not None


@pytest.mark.parametrize(
    "schedule",
    [Schedule(cron="every day"), Schedule(cron="0 0 31 2 *"), Schedule(cron="0 0 * * *", tz="Nowhere/Land")],
)
async def test_schedules_that_cannot_work_are_refused(lab: Lab, schedule: Schedule) -> None:
    async with lab.service() as service:
        with pytest.raises(InvalidSpecError):
            await service.start(sweep_in(schedule=schedule), actor="ann")
    assert lab.sweeps() == []
