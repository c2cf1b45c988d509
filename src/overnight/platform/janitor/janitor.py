"""Decides when a trial's checkpoint place may be tidied, has it done, and puts every deletion on record.

A place is touched only while the store says that nobody works there: no live attempt, every lease clean. The sweeper
looks for itself once more, in the place, whether a new start has claimed it. And it ends with the server, so nothing is
deleted while that is away.

What a place holds is compared with the store's rows whenever somebody looks, and soon after each commit: live attempts
delete what they do not keep, and people delete by hand.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from overnight.core.clock import Clock
from overnight.core.errors import ConflictError, OvernightError
from overnight.core.models.api import CheckpointPruneIn
from overnight.core.settings import Settings
from overnight.core.sizes import show_bytes
from overnight.platform.janitor.process import SweeperProcess, Told
from overnight.platform.janitor.quota import Victim, victims
from overnight.store import checkpoints, events, places, trials
from overnight.store.engine import Store, Topics
from overnight.store.events import NewEvent
from overnight.store.places import Owner

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

ACTOR = "janitor"
SETTLE_SECONDS = 1.0
"""After a lease has become clean: others end in the same moment, and the trial may start again at once."""

COMPARE_SECONDS = 2.0
"""After a commit, until the trial's place is compared with its rows: the attempt has deleted something by then."""


class Janitor:
    """Tidies checkpoint places; what routes call and the server's lifespan opens and closes.

    Args:
        store: Who works where, and the record.
        settings: For the home, the quota and the time between two looks at quotas.
        clock: For the record.
        sweeper: The process that does it; a fresh one if None.
    """

    def __init__(self, store: Store, settings: Settings, clock: Clock, sweeper: SweeperProcess | None = None) -> None:
        self._store = store
        self._home = settings.paths
        self._tick_seconds = settings.janitor_seconds
        self._quota_bytes = settings.checkpoint_quota_bytes
        self._clock = clock
        self._sweeper = sweeper or SweeperProcess()
        self._seen = 0
        self._pending: dict[str, None] = {}
        self._later: dict[str, None] = {}
        self._surveys: dict[str, dict[str, Any]] = {}
        self._over: set[str] = set()
        self._changed = asyncio.Event()
        self._committed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None

    async def open(self) -> None:
        """Begins with every trial that rests, then follows leases as they become clean."""
        loop = asyncio.get_running_loop()
        self._unsubscribe = self._store.subscribe(partial(self._heard, loop))
        await asyncio.to_thread(self._begin)
        self._tasks = [
            asyncio.create_task(self._run(), name=ACTOR),
            asyncio.create_task(self._follow_commits(), name=f"{ACTOR}-commits"),
        ]

    async def close(self) -> None:
        """Stops at once; what is half done is finished by the next server."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._sweeper.close()

    async def survey(self, ref: str) -> tuple[str, dict[str, Any]]:
        """A trial's place, and what it holds.

        Raises:
            NotFoundError: There is no such trial.
            SweeperFailedError: It cannot be looked at just now.
        """
        trial_id = await asyncio.to_thread(self._read, lambda conn: trials.row(conn, ref).id)
        return self._place(trial_id), await self._ask(trial_id, {"op": "survey"})

    async def prune(self, ref: str, wish: CheckpointPruneIn, actor: str) -> tuple[str, list[dict[str, Any]]]:
        """Tidies a trial's place because somebody asks for it.

        Args:
            ref: Name or id.
            wish: What shall go.
            actor: Who asks, for the record.

        Returns:
            The place, and what was deleted: ``entry``, ``bytes``, ``cause``.

        Raises:
            NotFoundError: There is no such trial or checkpoint.
            ConflictError: The trial is live, or a checkpoint is in use.
            SweeperFailedError: It cannot be done just now.
        """
        owner = await asyncio.to_thread(self._read, lambda conn: _owner(conn, ref))
        if not owner.at_rest:
            raise ConflictError(
                f"{owner.name} is at work on its checkpoints", hint="It tidies them itself; try again when it is over."
            )
        question = wish.model_dump(mode="json") | {
            "op": "delete" if wish.entries else "sweep",
            "cause": wish.reason or "asked for",
        }
        self._surveys.pop(owner.trial_id, None)
        done: list[dict[str, Any]] = []

        async def told(deletion: dict[str, Any]) -> None:
            done.append(deletion)
            if not wish.dry_run:
                await self._record(owner, deletion, actor, wish.reason)

        await self._ask(owner.trial_id, question, told)
        return self._place(owner.trial_id), done

    def _begin(self) -> None:
        with self._store.read() as conn:
            self._seen = events.last_seq(conn)
            self._pending = dict.fromkeys(owner.trial_id for owner in places.owners(conn) if owner.at_rest)

    def _heard(self, loop: asyncio.AbstractEventLoop, topics: Topics) -> None:
        if "leases" in topics:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._changed.set)
        if "checkpoints" in topics:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._committed.set)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at = -self._tick_seconds
        while True:
            is_time = loop.time() - looked_at >= self._tick_seconds
            looked_at = loop.time() if is_time else looked_at
            try:
                await self._round(everything=is_time)
            except Exception:
                log.exception("a round failed; the next one is in %g s", self._tick_seconds)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_seconds):
                    await self._changed.wait()
                    await asyncio.sleep(SETTLE_SECONDS)
            self._changed.clear()

    async def _round(self, *, everything: bool) -> None:
        """Tidies what has come to rest. With ``everything``, also what had to wait, and looks at all quotas."""
        await asyncio.to_thread(self._take_news)
        if everything:
            self._pending |= self._later
            self._later = {}
        experiments: set[str] = set()
        for trial_id in list(self._pending):
            del self._pending[trial_id]
            try:
                if (owner := await self._resting(trial_id)) is not None:
                    experiments.add(owner.experiment_id)
                    if await self._tidy(owner):
                        self._later[trial_id] = None
            except OvernightError as error:
                log.warning("the checkpoints of %s were not tidied: %s", trial_id, error.message)
                if error.retryable:
                    self._later[trial_id] = None
        if everything or experiments:
            await self._look_at_quotas(None if everything else experiments)

    async def _look_at_quotas(self, experiments: set[str] | None) -> None:
        limits = await asyncio.to_thread(self._read, lambda conn: places.quotas(conn, self._quota_bytes))
        for experiment_id, (name, quota_bytes) in limits.items():
            if experiments is not None and experiment_id not in experiments:
                continue
            try:
                await self._enforce(experiment_id, name, quota_bytes)
            except OvernightError as error:
                log.warning("the quota of %s was not looked at: %s", name, error.message)

    def _take_news(self) -> None:
        """Trials whose lease has become clean since the last look."""
        with self._store.read() as conn:
            while items := events.page(conn, self._seen, kinds=("lease.clean",)).items:
                self._pending.update(dict.fromkeys(event.trial_id for event in items if event.trial_id))
                self._seen = items[-1].seq

    async def _tidy(self, owner: Owner) -> bool:
        """Sweeps a place; whether it is worth another look in a while."""
        self._surveys.pop(owner.trial_id, None)
        record = partial(self._record, owner, actor=ACTOR, reason="")
        done = await self._ask(owner.trial_id, {"op": "sweep"}, record)
        return bool(done["pinned"])

    async def _resting(self, trial_id: str) -> Owner | None:
        """The trial, if it has a place and nobody works there; asked right before anything is deleted."""
        if not self._home.checkpoints(trial_id).exists():
            return None
        found = await asyncio.to_thread(self._read, partial(places.owners, trial_ids=[trial_id]))
        return next((owner for owner in found if owner.at_rest), None)

    async def _enforce(self, experiment_id: str, name: str, quota_bytes: int) -> None:
        found = await asyncio.to_thread(self._read, partial(places.owners, experiment_id=experiment_id))
        found = [owner for owner in found if self._home.checkpoints(owner.trial_id).exists()]
        surveys = {owner.trial_id: await self._survey(owner) for owner in found}
        total = sum(survey["bytes"] for survey in surveys.values())
        rows = {trial_id: survey["rows"] for trial_id, survey in surveys.items()}
        resting = [owner.trial_id for owner in found if owner.at_rest]
        cause = f"the checkpoints of {name} have {show_bytes(total)}, its quota is {show_bytes(quota_bytes)}"
        for victim in victims(rows, resting, total - quota_bytes):
            total -= await self._delete(victim, cause)
        await self._tell(experiment_id, name, total, quota_bytes)

    async def _survey(self, owner: Owner) -> dict[str, Any]:
        """What a place holds; remembered while nobody works there."""
        if owner.at_rest and (known := self._surveys.get(owner.trial_id)) is not None:
            return known
        found = await self._ask(owner.trial_id, {"op": "survey"})
        self._surveys.pop(owner.trial_id, None)
        if owner.at_rest:
            self._surveys[owner.trial_id] = found
        return found

    async def _delete(self, victim: Victim, cause: str) -> int:
        """Deletes a checkpoint for a quota; returns what that freed."""
        owner = await self._resting(victim.trial_id)
        if owner is None:
            return 0
        self._surveys.pop(owner.trial_id, None)
        record = partial(self._record, owner, actor=ACTOR, reason="")
        question = {"op": "delete", "entries": [victim.entry], "cause": cause}
        try:
            await self._ask(owner.trial_id, question, record)
        except OvernightError as error:
            if error.retryable:
                raise
            log.info("%s of %s stays: %s", victim.entry, owner.name, error.message)
            return 0
        return victim.num_bytes

    async def _follow_commits(self) -> None:
        """Looks at the places of trials that have committed, each soon after, and at none more often than that."""
        while True:
            await self._committed.wait()
            self._committed.clear()
            since = self._clock.now() - timedelta(seconds=COMPARE_SECONDS)
            await asyncio.sleep(COMPARE_SECONDS)
            try:
                for trial_id in await asyncio.to_thread(self._read, partial(checkpoints.committed_since, since=since)):
                    if self._home.checkpoints(trial_id).exists():
                        await self._ask(trial_id, {"op": "survey"})
            except OvernightError as error:
                log.warning("checkpoints were not compared with their rows: %s", error.message)
            except Exception:
                log.exception("checkpoints were not compared with their rows")

    async def _ask(self, trial_id: str, question: dict[str, Any], told: Told | None = None) -> dict[str, Any]:
        """Has the sweeper look at a trial's place, and records which of its checkpoints are there."""
        place, looked_at = self._place(trial_id), self._clock.now()
        done = await self._sweeper.ask(question | {"place": place}, told)
        names = [row["name"] for row in done["rows"]]
        compare = partial(checkpoints.compare, trial_id=trial_id, place=place, names=names, looked_at=looked_at)
        if differences := await asyncio.to_thread(self._read, compare):
            await self._store.awrite(lambda conn: checkpoints.mark(conn, self._clock.now(), differences))
        return done

    async def _tell(self, experiment_id: str, name: str, total: int, quota_bytes: int) -> None:
        """Records once that a quota is exceeded though nothing more may go, and once that it no longer is."""
        is_over = total > quota_bytes
        if is_over == (experiment_id in self._over):
            return
        self._over ^= {experiment_id}
        event = NewEvent(
            kind="experiment.over_quota" if is_over else "experiment.within_quota",
            subject=name,
            actor=ACTOR,
            cause=f"{show_bytes(total)} of checkpoints are left, the quota is {show_bytes(quota_bytes)}",
            data={"bytes": total, "quota_bytes": quota_bytes},
        )
        await self._store.awrite(lambda conn: events.append(conn, self._clock.now(), event))

    async def _record(self, owner: Owner, deletion: dict[str, Any], actor: str, reason: str) -> None:
        event = NewEvent(
            kind="checkpoint.deleted",
            subject=owner.name,
            actor=actor,
            cause=": ".join(filter(None, (reason, deletion["cause"] if deletion["cause"] != reason else ""))),
            trial_id=owner.trial_id,
            data={"entry": deletion["entry"], "bytes": deletion["bytes"]},
        )
        await self._store.awrite(lambda conn: events.append(conn, self._clock.now(), event))

    def _place(self, trial_id: str) -> str:
        return str(self._home.checkpoints(trial_id))

    def _read(self, fn: "Callable[[Connection], Any]") -> Any:
        with self._store.read() as conn:
            return fn(conn)


def _owner(conn: "Connection", ref: str) -> Owner:
    row = trials.row(conn, ref)
    found = places.owners(conn, trial_ids=[row.id])
    return found[0] if found else Owner(row.id, row.name, row.experiment_id, at_rest=True)
