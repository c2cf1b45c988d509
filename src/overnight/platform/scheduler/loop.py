"""Around the pure core: hears of commits, turns decisions into guarded writes, and notices silence.

The store is the truth. The state in memory is rebuilt from it at the start and after anything unexpected; an action
that the store refuses is dropped, and the refreshed state decides again.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from overnight.core.clock import Clock
from overnight.core.enums import DeviceState
from overnight.core.errors import ConflictError, NotFoundError, OvernightError
from overnight.core.ids import IdFactory, new_id
from overnight.core.models.api import Attempt, Trial, Why
from overnight.core.models.spec import Compute
from overnight.core.settings import Settings
from overnight.platform.attempts import conclude
from overnight.platform.scheduler import why
from overnight.platform.scheduler.core import Rules, State
from overnight.platform.scheduler.events import Action, Event, Phase, Preempt, Start, TrialStarted, TrialYielding
from overnight.platform.scheduler.expiry import SilenceWatch
from overnight.platform.scheduler.feed import (
    BIND_MARGIN_SECONDS,
    Facts,
    Times,
    device_events,
    is_resumable,
    lease_events,
    priority_index,
    trial_events,
)
from overnight.platform.scheduler.leadership import Leadership
from overnight.store import attempts, devices, nodes
from overnight.store.engine import Store
from overnight.store.transitions import preempt

if TYPE_CHECKING:
    from overnight.store.engine import Connection

_log = logging.getLogger(__name__)

ACTOR = "scheduler"
KILL_MARGIN_SECONDS = 15.0
"""After the grace the supervisor sends SIGTERM and 10 s later SIGKILL; then it is the node's turn."""
MAX_RETRY_SECONDS = 5.0
LAUNCH_SECONDS = 300.0
"""Longest launch: a node waits up to 2 minutes for a warm process, and a cold one imports torch from a slow disk."""
_RELEVANT = ("trials", "trial:", "attempts", "leases", "device:", "nodes")
"""Beginnings of the topics to listen to. A lease touches ``devices`` too; only ``device:ID`` is about a state."""
_OUT_OF_SERVICE = frozenset({DeviceState.QUARANTINED})
_LOSABLE = frozenset({DeviceState.HEALTHY, DeviceState.SUSPECT, DeviceState.PROBATION, DeviceState.BUSY})


class SchedulerLoop:
    """The scheduler of one server.

    Args:
        store: The database.
        publish: Called with a node's id, on the event loop, when the work of that node has changed.
        clock: Wall and monotonic time.
        settings: Grace, lease and heartbeat periods.
        ids: Makes attempt ids.
    """

    def __init__(
        self,
        store: Store,
        publish: Callable[[str], None],
        clock: Clock,
        settings: Settings,
        ids: IdFactory = new_id,
    ) -> None:
        self._store = store
        self._publish = publish
        self._clock = clock
        self._settings = settings
        self._ids = ids
        self._rules = Rules(span_nodes=False)
        self._state = State(self._rules)
        self._facts = Facts()
        self._leadership = Leadership(f"{socket.gethostname()}:{settings.home}", settings.lease_seconds)
        self._leases = SilenceWatch(settings.lease_seconds)
        self._launches = SilenceWatch(max(settings.lease_seconds, LAUNCH_SECONDS))
        self._nodes = SilenceWatch(settings.lease_seconds)
        self._overdue_at: dict[str, float] = {}
        self._kills: dict[str, str] = {}
        self._must_resync = True
        self._num_refusals = 0
        self._looks_at = 0.0
        self._retry_at: float | None = None
        self._topics: set[str] = set()
        self._topics_lock = threading.Lock()
        self._waker: Callable[[], object] | None = None
        self._unsubscribe = store.subscribe(self._hear)

    async def run(self) -> None:
        """Decides until cancelled."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        self._waker = lambda: loop.call_soon_threadsafe(woken.set)
        try:
            while True:
                try:
                    await self.tick()
                except OvernightError as error:
                    _log.warning("the scheduler could not reach the store: %s", error)
                    self._back_off()
                except Exception:
                    _log.exception("the scheduler failed; it rebuilds its state")
                    self._back_off()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._seconds_to_next_tick()):
                        await woken.wait()
                woken.clear()
        finally:
            self._waker = None
            self.close()

    def close(self) -> None:
        """Stops listening to the store."""
        self._unsubscribe()

    async def tick(self) -> None:
        """One round: take note of what was committed, look for silence, decide, act."""
        if not await self._lead():
            return
        if self._retry_at is not None and self._clock.monotonic() < self._retry_at:
            return
        self._retry_at = None
        self._refresh()
        await self._look_for_silence()
        self._mark_kills()
        actions = self._state.decide(self._clock.monotonic())
        results = await asyncio.gather(*(self._act(action) for action in actions))
        if all(results):
            self._num_refusals = 0
        else:
            self._back_off()

    def explain(self, trial: Trial) -> Why:
        """Why the trial is not running, and what would change that."""
        return why.explain(
            self._state,
            trial.id,
            now=self._clock.monotonic(),
            trial_state=trial.state,
            name=lambda trial_id: trial.name if trial_id == trial.id else self._facts.trial_name(trial_id),
        )

    def queue(self, limit: int | None = None) -> list[str]:
        """Ids of the queued trials in the order in which they would start."""
        return list(self._state.line.ordered(limit))

    def unsatisfiable(self, compute: Compute) -> str | None:
        """Why no devices that exist could ever give what is asked; None if they could."""
        return why.unsatisfiable(self._state.fleet.devices.values(), compute, self._rules)

    def kills(self, node_id: str) -> tuple[str, ...]:
        """Ids of the attempts that this node must kill now, without grace."""
        return tuple(attempt_id for attempt_id, node in self._kills.items() if node == node_id)

    def _hear(self, topics: frozenset[str]) -> None:
        """Called by the store's writer thread after a commit."""
        relevant = [topic for topic in topics if topic.startswith(_RELEVANT)]
        if not relevant:
            return
        with self._topics_lock:
            self._topics.update(relevant)
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has just been closed
                waker()

    def _seconds_to_next_tick(self) -> float:
        now = self._clock.monotonic()
        times = [self._looks_at, self._state.next_wake(), self._retry_at, min(self._overdue_at.values(), default=None)]
        soonest = min(time for time in times if time is not None and time > now - 1e9)
        return max(0.0, min(soonest - now, self._settings.heartbeat_seconds))

    def _back_off(self) -> None:
        """Something was refused or failed: believe nothing, and do not spin."""
        self._must_resync = True
        self._num_refusals += 1
        seconds = min(MAX_RETRY_SECONDS, 0.01 * 2 ** min(self._num_refusals, 16))
        self._retry_at = self._clock.monotonic() + (0.0 if self._num_refusals == 1 else seconds)

    async def _lead(self) -> bool:
        """Whether this scheduler may decide."""
        was_leader = self._leadership.is_held
        if not self._leadership.is_due(self._clock.monotonic()):
            return was_leader
        now = self._clock.monotonic()
        leads = await self._store.awrite(
            lambda conn: self._leadership.hold(conn, wall_now=self._clock.now(), monotonic_now=now)
        )
        if leads and not was_leader:
            _log.info("this scheduler decides from now on")
            self._must_resync = True
        elif was_leader and not leads:
            _log.warning("another scheduler decides from now on")
        return leads

    def _refresh(self) -> None:
        with self._topics_lock:
            topics, self._topics = self._topics, set()
        if self._must_resync:
            self._must_resync = False
            self._state, self._facts = State(self._rules), Facts()
            topics = {"nodes", "leases", "trials"}
        if not topics:
            return
        trial_ids = {topic.removeprefix("trial:") for topic in topics if topic.startswith("trial:")}
        with self._store.read() as conn:
            # Read after the snapshot began: what it shows is not newer than these.
            times = Times(self._clock.now(), self._clock.monotonic())
            if "nodes" in topics or any(topic.startswith("device:") for topic in topics):
                self._apply(device_events(conn, self._state, self._facts))
            if topics & {"leases", "attempts"}:
                self._apply(lease_events(conn, self._state, self._facts, times))
            if trial_ids or "trials" in topics:
                self._apply(trial_events(conn, self._state, self._facts, times, trial_ids or None))

    def _apply(self, events: Iterable[Event]) -> None:
        for event in events:
            self._state.apply(event)

    async def _look_for_silence(self) -> None:
        """Ends attempts and disconnects nodes that have given no sign of life for a lease period."""
        now = self._clock.monotonic()
        if now < self._looks_at:
            return
        self._looks_at = now + self._settings.heartbeat_seconds
        with self._store.read() as conn:
            live = {a.id: a for a in attempts.live(conn) if a.ended_at is None}
            known = {node.id: node for node in nodes.list_(conn)}
        connected = {node.id: node.seen_at for node in known.values() if node.connected}
        seconds = self._settings.lease_seconds
        for node_id in self._nodes.look(connected, now):
            _log.warning("node %s has been silent for %g s", known[node_id].name, seconds)
            await self._store.awrite(lambda conn, node_id=node_id: self._lose(conn, node_id))  # type: ignore[misc]
        # Until its supervisor speaks, its node speaks for a launch: a first import may outlast a lease.
        beating = {
            a.id: (a.heartbeat, a.acked, None if a.started_at else known[a.node_id].seen_at) for a in live.values()
        }
        launching = {a.id: a.heartbeat for a in live.values() if a.started_at is None}
        causes = dict.fromkeys(self._launches.look(launching, now), "it was not launched in time")
        causes |= dict.fromkeys(self._leases.look(beating, now), f"no sign of life for {seconds:g} s")
        for attempt_id, cause in causes.items():
            await self._store.awrite(
                lambda conn, attempt_id=attempt_id, cause=cause: conclude(  # type: ignore[misc]
                    conn, attempt_id=attempt_id, now=self._clock.now(), vanished=cause, actor=ACTOR
                )
            )
            self._publish(live[attempt_id].node_id)

    def _lose(self, conn: "Connection", node_id: str) -> None:
        now = self._clock.now()
        cause = f"its node has been silent for {self._settings.lease_seconds:g} s"
        nodes.disconnect(conn, node_id=node_id, cause=cause, now=now, actor=ACTOR)
        for device in devices.list_(conn, node_id):
            if device.state in _LOSABLE:
                devices.set_state(conn, device_id=device.id, state=DeviceState.LOST, cause=cause, now=now, actor=ACTOR)

    def _mark_kills(self) -> None:
        """Attempts on a condemned device, and those that outlived their grace, are their nodes' to kill."""
        now = self._clock.monotonic()
        live = self._state.live
        self._overdue_at = {a: at for a, at in self._overdue_at.items() if a in live}
        self._kills = {a: node_id for a, node_id in self._kills.items() if a in live}
        for attempt in live.values():
            if attempt.attempt_id in self._kills or (row := self._facts.attempts.get(attempt.attempt_id)) is None:
                continue
            if attempt.phase in (Phase.YIELDING, Phase.STOPPING):
                grace_seconds = max(row.directive.grace_seconds, self._settings.grace_seconds)
                self._overdue_at.setdefault(attempt.attempt_id, now + grace_seconds + KILL_MARGIN_SECONDS)
            if attempt.phase is Phase.RELEASING:
                continue
            is_overdue = self._overdue_at.get(attempt.attempt_id, now + 1.0) <= now
            if is_overdue or any(self._is_condemned(device_id) for device_id in attempt.device_ids):
                self._kills[attempt.attempt_id] = row.node_id
                self._overdue_at.pop(attempt.attempt_id, None)
                self._publish(row.node_id)

    def _is_condemned(self, device_id: str) -> bool:
        device = self._state.fleet.devices.get(device_id)
        return device is not None and device.state in _OUT_OF_SERVICE

    async def _act(self, action: Action) -> bool:
        """Writes one action; False if the store refused it."""
        try:
            if isinstance(action, Start):
                await self._start(action)
            else:
                await self._preempt(action)
        except (ConflictError, NotFoundError) as error:
            _log.info("%r came too late: %s", action, error.message)
            return False
        return True

    async def _start(self, action: Start) -> None:
        trial = self._facts.trials[action.trial_id]
        node_id = self._state.fleet.devices[action.device_ids[0]].node_id

        def write(conn: "Connection") -> Attempt:
            self._leadership.require(conn)
            return attempts.begin(
                conn,
                ids=self._ids,
                now=self._clock.now(),
                trial_id=trial.id,
                expected_attempt=trial.attempts_made,
                node_id=node_id,
                device_ids=action.device_ids,
                cause=f"{len(action.device_ids)} free device{'s' if len(action.device_ids) != 1 else ''}",
                actor=ACTOR,
            )

        attempt = await self._store.awrite(write)
        now = self._clock.monotonic()
        since = min(now, Times(self._clock.now(), now).monotonic_at(attempt.created_at))
        self._state.apply(
            TrialStarted(attempt.id, trial.id, action.device_ids, priority_index(trial), is_resumable(trial), since)
        )
        self._publish(node_id)

    async def _preempt(self, action: Preempt) -> None:
        row = self._facts.attempts[action.attempt_id]
        grace_seconds = self._settings.grace_seconds
        cause = f"pre-empted by {self._facts.trial_name(action.for_trial_id)}"

        def write(conn: "Connection") -> None:
            self._leadership.require(conn)
            preempt(
                conn,
                trial_id=action.trial_id,
                attempt=row.number,
                actor=ACTOR,
                cause=cause,
                now=self._clock.now(),
                grace_seconds=grace_seconds,
                for_trial_id=action.for_trial_id,
            )

        await self._store.awrite(write)
        until = self._clock.monotonic() + grace_seconds + BIND_MARGIN_SECONDS
        self._state.apply(TrialYielding(action.attempt_id, action.for_trial_id, until))
        self._publish(row.node_id)
