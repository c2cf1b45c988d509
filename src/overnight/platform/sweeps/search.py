"""One sweep: keeps its trials in flight without a barrier, one new proposal for each that ends.

Nothing is kept in memory that the store does not say: each step reads, decides, writes at most one thing, and may be
repeated after a crash. A proposal's key is the sweep's id and a number that comes from the store, so that asking again
after a crash finds the same proposal and makes no second one.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from overnight.core.clock import Clock
from overnight.core.enums import ProposalStatus, SweepState, TrialState
from overnight.core.errors import ConflictError, OvernightError
from overnight.core.models.api import Proposal, ProposalIn, Sweep
from overnight.core.models.spec import SweepConfig
from overnight.planning.observations import Observation, Request, Suggestions
from overnight.platform.sweeps.cron import zone_of
from overnight.platform.sweeps.planner import PlannerFailedError, PlannerProcess
from overnight.platform.sweeps.rules import Ending, Progress, deadline_after, ending
from overnight.store import searches, sweeps, transitions
from overnight.store.engine import Store
from overnight.store.searches import Asked

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

Submit = Callable[[str, Sequence[ProposalIn]], Awaitable[Sequence[Proposal | OvernightError]]]
"""``await submit(actor, proposals)``: an answer or an error for each, as ``POST /v1/proposals/batch`` gives."""

PLANNER_FAILURES = 3
"""So often in a row a planner may fail before its sweep breaks."""

PROPOSALS_PER_ROUND = 100


@dataclass(frozen=True)
class View:
    """All that a step decides from, of one snapshot."""

    sweep: Sweep
    asked: list[Asked]
    curves: dict[str, list[tuple[int, float]]]
    device_seconds: float
    deadline: datetime | None
    must_wait: bool
    """Its registration lets runs queue, and an older one still runs."""

    @property
    def progress(self) -> Progress:
        """Counted proposals."""
        return Progress.of(self.sweep.id, self.asked)


def look(conn: "Connection", sweep_id: str, now: datetime) -> View:
    """Reads a view.

    Raises:
        NotFoundError: No such sweep.
    """
    sweep = sweeps.get(conn, sweep_id)
    asked = searches.asked(conn, sweep_id)
    pruned = [a.trial.id for a in asked if a.trial is not None and a.trial.state is TrialState.PRUNED]
    objective = sweep.config.objective
    deadline, must_wait = None, False
    if sweep.parent_id is not None:
        schedule = sweeps.get(conn, sweep.parent_id).schedule
        if schedule is not None and schedule.until is not None:
            deadline = deadline_after(sweep.created_at, schedule.until, zone_of(schedule))
        older = searches.runs_of(conn, sweep.parent_id, [SweepState.ACTIVE])
        must_wait = bool(older) and older[0] != sweep_id
    return View(
        sweep,
        asked,
        searches.curves(conn, pruned, objective.metric) if objective and pruned else {},
        sweeps.device_seconds(conn, sweep_id, now) if sweep.sweep.stop.gpu_hours is not None else 0.0,
        deadline,
        must_wait,
    )


class Search:
    """The steps of one sweep.

    Args:
        sweep_id: The sweep.
        store: Read in snapshots.
        clock: For the record and for deadlines.
        submit: See :data:`Submit`.
        planner: Shared with other sweeps.
        grace_seconds: From a stop to SIGTERM.
    """

    def __init__(
        self,
        sweep_id: str,
        store: Store,
        clock: Clock,
        submit: Submit,
        planner: PlannerProcess,
        grace_seconds: float,
    ) -> None:
        self.sweep_id = sweep_id
        self.actor = f"sweep:{sweep_id}"
        self._store = store
        self._clock = clock
        self._submit = submit
        self._planner = planner
        self._grace_seconds = grace_seconds
        self._planner_failures = 0

    async def step(self) -> bool:
        """Does what there is to do now. True if it did something, so that there may be more."""
        now = self._clock.now()
        view = await asyncio.to_thread(self._look, now)
        if view.sweep.state is not SweepState.ACTIVE or view.must_wait:
            return False
        end = ending(
            view.sweep.sweep, view.sweep.config.objective, view.progress, view.device_seconds, now, view.deadline
        )
        if end is not None:
            return await self._end(view, end)
        num_wanted = self._wanted(view)
        return num_wanted > 0 and await self._ask(view, num_wanted)

    def _look(self, now: datetime) -> View:
        with self._store.read() as conn:
            return look(conn, self.sweep_id, now)

    def _wanted(self, view: View) -> int:
        config, progress = view.sweep.sweep, view.progress
        missing = min(config.parallel - progress.num_open, config.trials - progress.num_accepted)
        return min(missing, PROPOSALS_PER_ROUND)

    async def _ask(self, view: View, count: int) -> bool:
        try:
            found = await self._planner.propose(request(view, count))
        except PlannerFailedError as error:
            self._planner_failures += 1
            log.warning("%s: %s", self.sweep_id, error)
            if self._planner_failures < PLANNER_FAILURES:
                return True
            return await self._close(SweepState.BROKEN, f"{error.message} ({self._planner_failures} times in a row)")
        except OvernightError as error:
            return await self._close(SweepState.BROKEN, f"the planner cannot go on: {error.message}")
        self._planner_failures = 0
        if found.params:
            return await self._propose(view, found)
        if view.progress.num_open:
            return False
        return await self._close(
            SweepState.FINISHED, f"the space is exhausted: all {len(view.asked)} configurations have been tried"
        )

    async def _propose(self, view: View, found: Suggestions) -> bool:
        first = next_number(view.asked)
        proposals = [
            ProposalIn(
                config=view.sweep.config,
                params=params,
                key=searches.proposal_key(self.sweep_id, number),
                sweep_id=self.sweep_id,
            )
            for number, params in enumerate(found.params, first)
        ]
        answers = await self._submit(self.actor, proposals)
        for number, answer in enumerate(answers, first):
            if isinstance(answer, OvernightError):
                if answer.retryable:
                    raise answer
                return await self._close(SweepState.BROKEN, f"proposal {number} cannot be run: {answer.message}")
            if answer.status is ProposalStatus.REFUSED:
                return await self._close(SweepState.BROKEN, f"proposal {number} was refused: {answer.hint}")
        await self._recall(answers)
        return True

    async def _recall(self, answers: Sequence[Proposal | OvernightError]) -> None:
        """Cancels what was submitted into a sweep that somebody stopped in the meantime."""
        with self._store.read() as conn:
            state = sweeps.get(conn, self.sweep_id).state
        accepted = [a for a in answers if isinstance(a, Proposal) and a.status is ProposalStatus.ACCEPTED]
        if state is not SweepState.ACTIVE:
            await self._cancel([trial.id for answer in accepted for trial in answer.trials], "its sweep has ended")

    async def _end(self, view: View, end: Ending) -> bool:
        dropped = end.dropped(view.progress.trials)
        if end.state is SweepState.BROKEN:
            return await self._close(end.state, end.cause, dropped)
        if dropped:
            await self._cancel(dropped, end.cause)
            return True
        return not view.progress.num_open and await self._close(end.state, end.cause)

    async def _cancel(self, ids: Sequence[str], reason: str) -> None:
        now = self._clock.now()
        await self._store.awrite(
            partial(cancel_trials, ids=ids, actor=self.actor, reason=reason, now=now, grace=self._grace_seconds)
        )

    async def _close(self, state: SweepState, cause: str, dropped: Sequence[str] = ()) -> bool:
        now = self._clock.now()

        def write(conn: "Connection") -> bool:
            active = {SweepState.ACTIVE}
            changed = sweeps.set_state(
                conn, sweep_id=self.sweep_id, state=state, cause=cause, now=now, actor=self.actor, expected=active
            )
            if changed:
                cancel_trials(conn, ids=dropped, actor=self.actor, reason=cause, now=now, grace=self._grace_seconds)
            return changed

        return await self._store.awrite(write)


def cancel_trials(
    conn: "Connection", *, ids: Sequence[str], actor: str, reason: str, now: datetime, grace: float
) -> None:
    """Cancels trials; one that has ended in the meantime is left as it is."""
    for trial_id in ids:
        try:
            transitions.cancel(conn, trial_id=trial_id, actor=actor, reason=reason, now=now, grace_seconds=grace)
        except ConflictError as error:
            log.info("%s is not cancelled: %s", trial_id, error.message)


def request(view: View, count: int) -> Request:
    """The question for the planner. A duplicate's trial is history too: its result is known already."""
    history: list[Observation] = []
    for place, asked in enumerate(view.asked):
        if asked.trial is not None:
            number = asked.number if asked.number is not None else place - len(view.asked)
            curve = tuple(view.curves.get(asked.trial.id, ()))
            history.append(Observation(number, asked.trial.params, asked.trial.state, asked.trial.value, curve))
    config = view.sweep.sweep
    return Request(config, view.sweep.config.objective, history, count, seed_of(config, view.sweep))


def seed_of(config: SweepConfig, sweep: Sweep) -> int:
    """The planner's seed. Runs of one schedule differ, or each would propose what the last one did."""
    if sweep.parent_id is None:
        return config.seed
    text = f"{config.seed}/{sweep.created_at.isoformat()}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def next_number(asked: Sequence[Asked]) -> int:
    """The number of the next proposal."""
    return 1 + max((-1, *(a.number for a in asked if a.number is not None)))
