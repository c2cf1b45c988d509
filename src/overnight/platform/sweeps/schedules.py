"""Sweeps that start by themselves. APScheduler is the alarm clock; what is due and what was done is in the store.

A run is started in the transaction that moves ``next_run_at`` on, so that it is started once, whatever is killed when.
"""

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from overnight.core.clock import Clock
from overnight.core.enums import SweepState
from overnight.core.ids import IdFactory
from overnight.core.models.api import Sweep, SweepIn
from overnight.platform.sweeps.cron import trigger_of
from overnight.store import events, searches, sweeps
from overnight.store.engine import Store
from overnight.store.events import NewEvent
from overnight.store.schedules import job_store

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

GRACE = timedelta(hours=1)
MISFIRE_RULE = (
    "A run that was missed while the server was away or asleep starts late if it is at most one hour late, "
    "once however many were missed; otherwise it is skipped."
)

_open: dict[str, "Schedules"] = {}
"""By home: APScheduler keeps the name of a function and its arguments, not an object."""


async def ring(home: str, sweep_id: str) -> None:
    """What APScheduler calls when a registration is due."""
    if home in _open:
        await _open[home].fire(sweep_id)


class Schedules:
    """All registrations of a store.

    Args:
        store: The truth.
        store_url: Where APScheduler's own table goes, see :func:`overnight.store.schedules.job_store`.
        home: Names this object to APScheduler.
        clock: Decides what is due.
        ids: Makes the ids of the sweeps that are started.
    """

    def __init__(self, store: Store, store_url: str, home: str, clock: Clock, ids: IdFactory) -> None:
        self._store = store
        self._home = home
        self._clock = clock
        self._ids = ids
        self._alarm = AsyncIOScheduler(
            jobstores={"default": job_store(store_url)},
            # Never a misfire for APScheduler: `fire` applies the one rule that there is.
            job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 1},
            timezone=UTC,
        )

    async def open(self) -> None:
        """Starts ringing; first starts or skips what was missed."""
        _open[self._home] = self
        self._alarm.start(paused=True)
        known = {sweep.id for sweep in self._registrations()}
        for job in self._alarm.get_jobs():
            if job.id not in known:
                job.remove()
        for sweep_id in known:
            await self.fire(sweep_id)
            self._set_alarm(sweep_id)
        self._alarm.resume()

    async def close(self) -> None:
        """Stops ringing."""
        _open.pop(self._home, None)
        if self._alarm.running:
            self._alarm.shutdown(wait=False)

    async def register(self, sweep_id: str) -> None:
        """Takes up a registration that was just added."""
        await self.fire(sweep_id)
        self._set_alarm(sweep_id)

    def unregister(self, sweep_id: str) -> None:
        """Forgets one; it may be forgotten already."""
        if self._alarm.get_job(sweep_id) is not None:
            self._alarm.remove_job(sweep_id)

    async def tick(self) -> None:
        """Looks at the clock again: after a suspended night or a changed clock the alarm is wrong."""
        now = self._clock.now()
        for sweep in self._registrations():
            if sweep.next_run_at is None or sweep.next_run_at <= now:
                await self.register(sweep.id)

    async def fire(self, sweep_id: str) -> str | None:
        """Starts the run that is due. Returns the new sweep's id, None when nothing was due or it was skipped."""
        now = self._clock.now()
        return await self._store.awrite(lambda conn: self._fire(conn, sweep_id, now))

    def _fire(self, conn: "Connection", sweep_id: str, now: datetime) -> str | None:
        sweep = sweeps.get(conn, sweep_id)
        if sweep.schedule is None or sweep.state is not SweepState.ACTIVE:
            return None
        due = sweep.next_run_at
        if due is not None and due > now:
            return None
        sweeps.set_next_run(conn, sweep_id, trigger_of(sweep.schedule).get_next_fire_time(None, _after(now)))
        if due is None:
            searches.note(conn, sweep_id, MISFIRE_RULE)
            return None
        running = searches.runs_of(conn, sweep_id, [SweepState.ACTIVE])
        if now - due > GRACE:
            self._skip(conn, sweep, now, due, f"the server came back {_hours(now - due)} late")
            return None
        if running and sweep.schedule.overlap == "skip":
            self._skip(conn, sweep, now, due, f"{running[0]} still runs")
            return None
        body = SweepIn(config=sweep.config, sweep=sweep.sweep, key=f"{sweep_id}@{due.isoformat()}")
        actor = f"schedule:{sweep_id}"
        run = sweeps.add(conn, ids=self._ids, now=now, actor=actor, sweep=body, parent_id=sweep_id)
        searches.note(conn, sweep_id, f"The run of {due:%Y-%m-%d %H:%M} UTC is {run.id}. {MISFIRE_RULE}")
        return run.id

    def _skip(self, conn: "Connection", sweep: Sweep, now: datetime, due: datetime, why: str) -> None:
        cause = f"The run of {due:%Y-%m-%d %H:%M} UTC was skipped: {why}."
        events.append(conn, now, NewEvent("sweep.skipped", sweep.id, f"schedule:{sweep.id}", cause))
        searches.note(conn, sweep.id, f"{cause} {MISFIRE_RULE}")

    def _registrations(self) -> list[Sweep]:
        with self._store.read() as conn:
            return [s for s in sweeps.list_(conn, states={SweepState.ACTIVE}) if s.schedule is not None]

    def _set_alarm(self, sweep_id: str) -> None:
        with self._store.read() as conn:
            sweep = sweeps.get(conn, sweep_id)
        if sweep.schedule is None or sweep.state is not SweepState.ACTIVE or sweep.next_run_at is None:
            self.unregister(sweep_id)
            return
        self._alarm.add_job(
            ring,
            trigger_of(sweep.schedule),
            args=[self._home, sweep_id],
            id=sweep_id,
            name=sweep.experiment,
            next_run_time=sweep.next_run_at,
            replace_existing=True,
        )


def _after(now: datetime) -> datetime:
    return now + timedelta(microseconds=1)


def _hours(late: timedelta) -> str:
    return f"{late.total_seconds() / 3_600:.1f} h"
