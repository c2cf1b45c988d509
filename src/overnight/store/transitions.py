"""The one function that changes a trial's state, and the helpers that people, planners and the scheduler call."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import DirectiveAction, TrialState
from overnight.core.errors import IllegalTransitionError, NotFoundError, StaleAttemptError
from overnight.core.states import END_STATES, LIVE_STATES, can_transition
from overnight.store import directives, events, models, outbox
from overnight.store.events import NewEvent
from overnight.store.models import storable
from overnight.store.writer import touch

S = TrialState
_TABLE = models.trials
_MAX_RANK = 1_000_000
_ONE = sa.select(_TABLE).where(_TABLE.c.id == sa.bindparam("which")).with_for_update()
_UPDATE = sa.update(_TABLE).where(_TABLE.c.id == sa.bindparam("which"))


def transition(
    conn: sa.Connection,
    *,
    trial_id: str,
    expected: Collection[TrialState],
    after: TrialState,
    attempt: int | None = None,
    actor: str,
    cause: str,
    now: datetime,
    attempt_id: str | None = None,
    data: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> TrialState:
    """Moves a trial along one edge, writes its event and what MLflow should hear; returns the state before.

    Args:
        conn: Of a store write.
        trial_id: The trial.
        expected: States in which the caller believes the trial to be.
        after: Where it goes.
        attempt: Number of the attempt that the caller speaks for; None speaks for no attempt.
        actor: Who.
        cause: Why, for people.
        now: Wall time, for the record.
        attempt_id: For the event.
        data: For the event.
        changes: Further columns of the trial that change with it.

    Raises:
        NotFoundError: No such trial.
        StaleAttemptError: It is in another state, or another attempt is current.
        IllegalTransitionError: The state machine has no such edge.
    """
    row = _lock(conn, trial_id)
    before = S(row.state)
    if attempt is not None and row.attempts_made != attempt:
        raise StaleAttemptError(
            f"attempt {attempt} of {row.name} is not the current one, {row.attempts_made} is",
            hint=f"`overnight show {row.name}` lists its attempts.",
            trial=row.name,
        )
    if before not in expected:
        named = ", ".join(sorted(state.value for state in expected))
        raise StaleAttemptError(
            f"{row.name} is {before.value}, not {named}",
            hint=f"It has moved on meanwhile; `overnight show {row.name}` says how.",
            trial=row.name,
            state=before.value,
        )
    if not can_transition(before, after):
        raise IllegalTransitionError(
            f"{row.name} is {before.value} and cannot become {after.value}",
            hint=_way_on(row),
            trial=row.name,
            state=before.value,
        )
    event = NewEvent("trial.state", row.name, actor, cause, trial_id, attempt_id, before.value, after.value, data or {})
    seq = events.append(conn, now, event)
    values = {"state": after.value, "state_cause": cause, **_consequences(row, after, now, seq), **(changes or {})}
    _update(conn, trial_id, values)
    outbox.add(conn, now, [(trial_id, "status", {"state": after.value, "at": now.timestamp()})])
    touch(conn, "trials", f"trial:{trial_id}")
    return before


def _consequences(row: sa.Row[Any], after: TrialState, now: datetime, seq: int) -> dict[str, Any]:
    """Columns that follow from the state alone. A trial that ended goes to the end of its class when it is rerun."""
    if after in END_STATES:
        return {"ended_at": now, "not_before": None, "phase": None}
    if after is S.QUEUED and S(row.state) in END_STATES:
        return {"ended_at": None, "place": seq, "retries_used": 0, "error": None, "not_before": None}
    if after is S.QUEUED:
        return {"phase": None}
    if after is S.STARTING:
        return {"started_at": row.started_at or now, "not_before": None}
    return {}


def _update(conn: sa.Connection, trial_id: str, values: dict[str, Any]) -> None:
    """Plain values go as parameters of a statement that is compiled already; only increments need one of their own."""
    computed = {name: value for name, value in values.items() if isinstance(value, sa.ColumnElement)}
    plain = {name: value for name, value in values.items() if name not in computed}
    conn.execute(_UPDATE.values(computed) if computed else _UPDATE, {"which": trial_id, **plain})


def _lock(conn: sa.Connection, trial_id: str) -> sa.Row[Any]:
    row = conn.execute(_ONE, {"which": storable(trial_id)}).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no trial {trial_id[:200]!r}", hint="`overnight ls` shows what there is.")
    return row


def _way_on(row: sa.Row[Any]) -> str:
    """What a person can do with a trial in the state that it is in."""
    match S(row.state):
        case S.QUEUED:
            return f"It waits in the queue: `overnight hold {row.name}` keeps it there."
        case S.HELD:
            return f"`overnight unhold {row.name}` puts it into the queue."
        case state if state in END_STATES:
            return f"`overnight rerun {row.name}` puts it into the queue again."
        case _:
            return f"It has a device; `overnight cancel {row.name}` stops it."


def cancel(
    conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime, grace_seconds: float = 30.0
) -> TrialState:
    """HELD or QUEUED becomes CANCELLED; a live trial STOPPING with a ``stop`` directive. Returns the state now.

    Already CANCELLED or being cancelled: no change.

    Raises:
        IllegalTransitionError: It has ended otherwise.
    """
    return _stop(conn, _lock(conn, trial_id), S.CANCELLED, "cancelled", actor, reason, now, grace_seconds)


def prune(
    conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime, grace_seconds: float = 30.0
) -> TrialState:
    """:func:`cancel` on a pruner's behalf: PRUNED, directive reason ``pruned``. A cancel under way stays one."""
    return _stop(conn, _lock(conn, trial_id), S.PRUNED, "pruned", actor, reason, now, grace_seconds)


def _stop(
    conn: sa.Connection,
    row: sa.Row[Any],
    goal: TrialState,
    word: str,
    actor: str,
    reason: str,
    now: datetime,
    grace_seconds: float,
) -> TrialState:
    state = S(row.state)
    if state is goal:
        return state
    cause = reason or word
    if state is S.STOPPING:
        if goal is S.CANCELLED:  # a person's word beats a pruner's
            _direct(conn, row, DirectiveAction.STOP, word, grace_seconds)
        return state
    if state not in LIVE_STATES:
        transition(conn, trial_id=row.id, expected={state}, after=goal, actor=actor, cause=cause, now=now)
        return goal
    attempt_id = _direct(conn, row, DirectiveAction.STOP, word, grace_seconds)
    transition(
        conn,
        trial_id=row.id,
        expected={state},
        after=S.STOPPING,
        attempt=row.attempts_made,
        actor=actor,
        cause=cause,
        now=now,
        attempt_id=attempt_id,
    )
    return S.STOPPING


def _direct(conn: sa.Connection, row: sa.Row[Any], action: DirectiveAction, reason: str, grace_seconds: float) -> str:
    attempt_id = directives.current_attempt(conn, row.id, row.attempts_made)
    directives.set_directive(conn, attempt_id=attempt_id, action=action, reason=reason, grace_seconds=grace_seconds)
    return attempt_id


def preempt(
    conn: sa.Connection,
    *,
    trial_id: str,
    attempt: int,
    actor: str,
    cause: str,
    now: datetime,
    grace_seconds: float = 30.0,
    reason: str = "preempted",
    for_trial_id: str | None = None,
) -> None:
    """RUNNING or STARTING becomes YIELDING with a ``yield`` directive; the event records for whom.

    Raises:
        StaleAttemptError: It is neither, or another attempt is current.
    """
    row = _lock(conn, trial_id)
    transition(
        conn,
        trial_id=trial_id,
        expected={S.RUNNING, S.STARTING},
        after=S.YIELDING,
        attempt=attempt,
        actor=actor,
        cause=cause,
        now=now,
        attempt_id=directives.current_attempt(conn, trial_id, row.attempts_made) if row.attempts_made else None,
        data=None if for_trial_id is None else {"for_trial": for_trial_id},
    )
    _direct(conn, row, DirectiveAction.YIELD, reason, grace_seconds)


def hold(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> TrialState:
    """QUEUED to HELD; HELD stays.

    Raises:
        IllegalTransitionError: It is in another state.
    """
    return _move(conn, trial_id, S.QUEUED, S.HELD, actor, reason or "held", now)


def unhold(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> TrialState:
    """HELD to QUEUED at its old place; QUEUED stays.

    Raises:
        IllegalTransitionError: It is in another state.
    """
    return _move(conn, trial_id, S.HELD, S.QUEUED, actor, reason or "released", now)


def _move(
    conn: sa.Connection, trial_id: str, before: TrialState, after: TrialState, actor: str, cause: str, now: datetime
) -> TrialState:
    row = _lock(conn, trial_id)
    if row.state == after.value:
        return after
    if row.state != before.value:
        raise IllegalTransitionError(
            f"{row.name} is {row.state}; only a trial that is {before.value} can become {after.value} like this",
            hint=_way_on(row),
            trial=row.name,
            state=row.state,
        )
    transition(conn, trial_id=trial_id, expected={before}, after=after, actor=actor, cause=cause, now=now)
    return after


def bump(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> int:
    """Before all others of its class: its rank becomes one more than the highest queued. Returns the rank.

    Raises:
        IllegalTransitionError: It is neither queued nor held.
    """
    row = _lock(conn, trial_id)
    if row.state not in {S.QUEUED.value, S.HELD.value}:
        raise IllegalTransitionError(
            f"{row.name} is {row.state} and does not wait in the queue", hint=_way_on(row), trial=row.name
        )
    others = (_TABLE.c.state == S.QUEUED.value) & (_TABLE.c.priority == row.priority) & (_TABLE.c.id != trial_id)
    highest = conn.scalar(sa.select(sa.func.max(_TABLE.c.rank)).where(others))
    rank: int = row.rank if highest is None else min(max(highest + 1, row.rank), _MAX_RANK)
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == trial_id).values(rank=rank))
    event = NewEvent("trial.bumped", row.name, actor, reason, trial_id, data={"rank": rank, "before": row.rank})
    events.append(conn, now, event)
    touch(conn, "trials", f"trial:{trial_id}")
    return rank


def rerun(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> TrialState:
    """An end state to QUEUED at the end of its class, retries restored; it goes on from its last checkpoint.

    Raises:
        IllegalTransitionError: It has not ended.
    """
    row = _lock(conn, trial_id)
    if S(row.state) not in END_STATES:
        raise IllegalTransitionError(
            f"{row.name} is {row.state} and has not ended", hint="Cancel it first.", trial=row.name, state=row.state
        )
    transition(
        conn,
        trial_id=trial_id,
        expected={S(row.state)},
        after=S.QUEUED,
        actor=actor,
        cause=reason or "rerun",
        now=now,
    )
    return S.QUEUED
