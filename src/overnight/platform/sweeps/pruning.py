"""Stops hopeless trials when they report, from curves kept in memory that the store can rebuild.

A decision that a crash swallows is not taken again: the trial goes on to the next rung, which costs time and no truth.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overnight.core.clock import Clock
from overnight.core.enums import TrialState
from overnight.core.errors import ConflictError, NotFoundError
from overnight.core.models.spec import Objective, Prune
from overnight.planning.pruners import Decision, decide
from overnight.store import searches, sweeps, transitions
from overnight.store.engine import Store

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

_MOST_ATTEMPTS = 10_000


@dataclass
class _Search:
    """A sweep that prunes; ``curves`` by trial id."""

    id: str
    prune: Prune
    objective: Objective
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


class Pruning:
    """The pruners of all sweeps.

    Args:
        store: Where curves are read from and stops are written.
        clock: For the record.
        grace_seconds: From a stop to SIGTERM.
    """

    def __init__(self, store: Store, clock: Clock, grace_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._searches: dict[str, _Search | None] = {}
        self._attempts: dict[str, tuple[str, str] | None] = {}

    async def on_report(self, attempt_id: str, reports: Sequence[Mapping[str, Any]]) -> None:
        """Looks at what an attempt has just reported; the store knows it already.

        Args:
            attempt_id: Who reported.
            reports: ``{"step", "values": {name: number or text}}``, in their order.
        """
        found = await asyncio.to_thread(self._search_of, attempt_id)
        if found is None:
            return
        trial_id, search = found
        for report in reports:
            if search.objective.metric not in report.get("values", {}):
                continue
            step, value = int(report["step"]), _number(report["values"][search.objective.metric])
            search.curves.setdefault(trial_id, []).append((step, value))
            decision = decide(search.prune, search.objective.mode, search.curves, trial_id, step)
            if decision.stop:
                await self._stop(search, trial_id, decision)
                return

    def forget(self, sweep_id: str) -> None:
        """Drops a sweep that has ended."""
        self._searches.pop(sweep_id, None)

    def _search_of(self, attempt_id: str) -> tuple[str, _Search] | None:
        if attempt_id not in self._attempts:
            if len(self._attempts) >= _MOST_ATTEMPTS:
                self._attempts.clear()
            with self._store.read() as conn:
                row = searches.of_attempt(conn, attempt_id)
            self._attempts[attempt_id] = (row[0], row[1]) if row is not None and row[1] is not None else None
        known = self._attempts[attempt_id]
        if known is None:
            return None
        trial_id, sweep_id = known
        if sweep_id not in self._searches:
            self._searches[sweep_id] = self._load(sweep_id)
        search = self._searches[sweep_id]
        return None if search is None else (trial_id, search)

    def _load(self, sweep_id: str) -> _Search | None:
        with self._store.read() as conn:
            sweep = sweeps.get(conn, sweep_id)
            objective = sweep.config.objective
            if sweep.sweep.prune is None or objective is None:
                return None
            ids = searches.open_trials(conn, sweep_id, list(TrialState))
            return _Search(sweep_id, sweep.sweep.prune, objective, searches.curves(conn, ids, objective.metric))

    async def _stop(self, search: _Search, trial_id: str, decision: Decision) -> None:
        now, actor = self._clock.now(), f"sweep:{search.id}"

        def write(conn: "Connection") -> None:
            transitions.prune(
                conn,
                trial_id=trial_id,
                actor=actor,
                reason=decision.reason,
                now=now,
                grace_seconds=self._grace_seconds,
            )

        try:
            await self._store.awrite(write)
        except (ConflictError, NotFoundError) as error:
            log.info("%s was to be pruned and has moved on: %s", trial_id, error.message)


def _number(value: Any) -> float:
    """A reported value; text such as ``nan`` or anything else that is no number counts as not finite."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
