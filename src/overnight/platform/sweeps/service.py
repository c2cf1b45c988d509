"""The sweeps of a server: a task for each active one, woken by commits, and the schedules that start more."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from overnight.core.clock import Clock
from overnight.core.enums import SweepState, TrialState
from overnight.core.errors import InvalidSpecError, NotFoundError, OvernightError
from overnight.core.ids import IdFactory, new_id
from overnight.core.models.api import Sweep, SweepIn
from overnight.core.settings import Settings
from overnight.core.states import END_STATES
from overnight.planning.planners import check
from overnight.platform.sweeps.cron import trigger_of
from overnight.platform.sweeps.planner import PlannerProcess
from overnight.platform.sweeps.pruning import Pruning
from overnight.platform.sweeps.schedules import Schedules
from overnight.platform.sweeps.search import Search, Submit, cancel_trials
from overnight.store import experiments, searches, sweeps
from overnight.store.engine import Store, Topics

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

TICK_SECONDS = 5.0
"""Deadlines and budgets pass without a commit; so often a sweep looks up by itself."""

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0
_TOPICS = frozenset({"trials", "sweeps"})
"""What a sweep's progress depends on. Which sweeps there are depends on ``sweeps`` alone."""

_OPEN = frozenset(TrialState) - END_STATES


class _Rehearsed(Exception):
    """Leaves a dry run's transaction without a trace."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep


class SweepService:
    """What routes call and the server's lifespan opens and closes.

    Args:
        store: The truth; what is in memory can be rebuilt from it at any time.
        settings: For the home and the grace.
        clock: For records and deadlines.
        submit: Takes a sweep's proposals as the API would, see :data:`overnight.platform.sweeps.search.Submit`.
        planner: The planner process; a fresh one if None.
        ids: Makes ids.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: Clock,
        submit: Submit,
        planner: PlannerProcess | None = None,
        ids: IdFactory = new_id,
    ) -> None:
        self._store = store
        self._clock = clock
        self._submit = submit
        self._ids = ids
        self._grace_seconds = settings.grace_seconds
        self._planner = planner or PlannerProcess()
        self._pruning = Pruning(store, clock, settings.grace_seconds)
        self._schedules = Schedules(store, settings.effective_store_url, str(settings.home), clock, ids)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[str, asyncio.Event] = {}
        self._manager: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._unsubscribe: Callable[[], None] | None = None

    async def open(self) -> None:
        """Takes up every active sweep and schedule where the store says that they are."""
        loop = asyncio.get_running_loop()
        self._unsubscribe = self._store.subscribe(partial(self._heard, loop))
        await self._schedules.open()
        self._manager = asyncio.create_task(self._manage(), name="sweeps")

    async def close(self) -> None:
        """Stops; sweeps go on where they are when it is opened again."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        await self._schedules.close()
        tasks = [*self._tasks.values(), *([self._manager] if self._manager else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        await self._planner.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self, body: SweepIn, actor: str) -> Sweep:
        """Starts a sweep, or with a schedule registers one whose runs are started when it is due.

        Raises:
            InvalidSpecError: A space, planner, rule or schedule that cannot work.
            KeyReusedError, ConflictError, InvalidParamsError: See :func:`overnight.store.sweeps.add`.
        """
        body = await asyncio.to_thread(self._completed, body)
        check_sweep(body)
        now = self._clock.now()

        def write(conn: "Connection") -> Sweep:
            sweep = sweeps.add(conn, ids=self._ids, now=now, actor=actor, sweep=body)
            if body.dry_run:
                raise _Rehearsed(sweep)
            return sweep

        try:
            sweep = await self._store.awrite(write)
        except _Rehearsed as rehearsed:
            return rehearsed.sweep
        if sweep.schedule is not None:
            await self._schedules.register(sweep.id)
        return self._get(sweep.id)

    async def stop(self, sweep_id: str, actor: str, reason: str = "") -> Sweep:
        """Ends a sweep now: cancels what is queued, stops what runs, and for a registration its runs as well.

        One that has ended stays as it is.

        Raises:
            NotFoundError: No such sweep.
        """
        now, cause = self._clock.now(), reason or "stopped"

        def write(conn: "Connection") -> None:
            runs = searches.runs_of(conn, sweep_id, [SweepState.ACTIVE, SweepState.PAUSED])
            for each in (sweep_id, *runs):
                stopped = sweeps.set_state(
                    conn,
                    sweep_id=each,
                    state=SweepState.STOPPED,
                    cause=cause,
                    now=now,
                    actor=actor,
                    expected={SweepState.ACTIVE, SweepState.PAUSED},
                )
                if stopped:
                    ids = searches.open_trials(conn, each, _OPEN)
                    why = f"sweep {each} was stopped" + (f": {reason}" if reason else "")
                    cancel_trials(conn, ids=ids, actor=actor, reason=why, now=now, grace=self._grace_seconds)

        await self._store.awrite(write)
        sweep = self._get(sweep_id)
        if sweep.schedule is not None:
            self._schedules.unregister(sweep_id)
        return sweep

    async def on_report(self, attempt_id: str, reports: Sequence[Mapping[str, Any]]) -> None:
        """Prunes if need be; called after the reports are in the store. Never raises: reports must get through.

        Args:
            attempt_id: Who reported.
            reports: ``{"step", "values": {name: number or text}}``, in their order.
        """
        try:
            await self._pruning.on_report(attempt_id, reports)
        except Exception:
            log.exception("pruning after a report of %s failed", attempt_id)

    def _completed(self, body: SweepIn) -> SweepIn:
        """With the experiment's objective when the trial's config names none."""
        if body.config.objective is not None:
            return body
        with self._store.read() as conn, contextlib.suppress(NotFoundError):
            objective = experiments.get(conn, body.config.experiment).objective
            return body.model_copy(update={"config": body.config.model_copy(update={"objective": objective})})
        return body

    def _get(self, sweep_id: str) -> Sweep:
        with self._store.read() as conn:
            return sweeps.get(conn, sweep_id)

    def _heard(self, loop: asyncio.AbstractEventLoop, topics: Topics) -> None:
        if topics & _TOPICS:
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(self._wake, "sweeps" in topics)

    def _wake(self, are_sweeps_changed: bool = True) -> None:
        if are_sweeps_changed:
            self._changed.set()
        for event in self._wakes.values():
            event.set()

    async def _manage(self) -> None:
        """Keeps one task for each active sweep."""
        while True:
            self._changed.clear()
            try:
                for sweep_id in await asyncio.to_thread(self._active):
                    if sweep_id not in self._tasks:
                        self._wakes[sweep_id] = asyncio.Event()
                        self._tasks[sweep_id] = asyncio.create_task(self._drive(sweep_id), name=sweep_id)
                await self._schedules.tick()
            except OvernightError as error:
                log.warning("sweeps: %s", error)
            except Exception:
                log.exception("sweeps: looking around failed")
            await _wait(self._changed, TICK_SECONDS)

    def _active(self) -> list[str]:
        with self._store.read() as conn:
            return searches.active(conn)

    async def _drive(self, sweep_id: str) -> None:
        """Steps one sweep until it has ended."""
        search = Search(sweep_id, self._store, self._clock, self._submit, self._planner, self._grace_seconds)
        wake = self._wakes[sweep_id]
        pause = 0.0
        try:
            while True:
                wake.clear()
                pulse = await asyncio.to_thread(self._pulse, sweep_id)
                try:
                    while await search.step():
                        pass
                    pause = 0.0
                except Exception as error:
                    pause = min(max(FIRST_PAUSE_SECONDS, pause * 2), MAX_PAUSE_SECONDS)
                    known = isinstance(error, OvernightError)
                    log.warning("sweep %s pauses for %g s: %s", sweep_id, pause, error, exc_info=not known)
                    await asyncio.sleep(pause)
                    continue
                if pulse[0] != SweepState.ACTIVE.value:
                    return
                await self._rest(sweep_id, wake, pulse)
        finally:
            self._pruning.forget(sweep_id)
            self._tasks.pop(sweep_id, None)
            self._wakes.pop(sweep_id, None)

    async def _rest(self, sweep_id: str, wake: asyncio.Event, pulse: tuple[Any, ...]) -> None:
        """Waits for a commit that changes this sweep; most commits are about others or say only "still alive"."""
        while await _wait(wake, TICK_SECONDS):
            wake.clear()
            if await asyncio.to_thread(self._pulse, sweep_id) != pulse:
                return

    def _pulse(self, sweep_id: str) -> tuple[Any, ...]:
        with self._store.read() as conn:
            return searches.pulse(conn, sweep_id)


def check_sweep(body: SweepIn) -> None:
    """What can be said of a sweep before it is stored.

    Raises:
        InvalidSpecError: It cannot work; the message says what to change.
    """
    check(body.sweep)
    needs = {"planner tpe": body.sweep.planner == "tpe", "prune": body.sweep.prune is not None}
    needs["stop.target"] = body.sweep.stop.target is not None
    missing = [name for name, needed in needs.items() if needed]
    if missing and body.config.objective is None:
        raise InvalidSpecError(
            f"{' and '.join(missing)} need an objective, and neither the spec nor the experiment has one",
            hint="Add objective: {metric: val_loss, mode: min}.",
        )
    if body.schedule is not None:
        trigger_of(body.schedule)


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
