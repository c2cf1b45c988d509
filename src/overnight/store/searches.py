"""What a sweep has asked for and what became of it: all that its planner and pruner need, read in few queries."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import ProposalStatus, SweepState, TrialState
from overnight.store.models import attempts, metrics, proposals, sweeps, trials
from overnight.store.writer import touch

_IDS_PER_QUERY = 500


@dataclass(frozen=True)
class SearchTrial:
    """A trial as its sweep sees it."""

    id: str
    name: str
    sweep_id: str | None
    params: dict[str, Any]
    state: TrialState
    state_cause: str
    value: float | None
    attempts_made: int
    ended_at: datetime | None


@dataclass(frozen=True)
class Asked:
    """One proposal of a sweep.

    Attributes:
        number: From its key, see :func:`proposal_key`; None when somebody else proposed it into the sweep.
        trial: The first trial that it became, or that it repeats; None if it was refused.
    """

    number: int | None
    status: ProposalStatus
    hint: str
    trial: SearchTrial | None


def proposal_key(sweep_id: str, number: int) -> str:
    """The idempotency key of a sweep's proposal: asked again after a crash, the same number is the same proposal."""
    return f"{sweep_id}:{number}"


def asked(conn: sa.Connection, sweep_id: str) -> list[Asked]:
    """Everything proposed into the sweep, by number; what others proposed comes first."""
    columns = (proposals.c.id, proposals.c.key, proposals.c.status, proposals.c.hint, proposals.c.trial_ids)
    rows = conn.execute(sa.select(*columns).where(proposals.c.sweep_id == sweep_id).order_by(proposals.c.id)).all()
    first = {row.id: row.trial_ids[0] for row in rows if row.trial_ids}
    found = _trials(conn, trials.c.sweep_id == sweep_id)
    missing = sorted({trial_id for trial_id in first.values() if trial_id not in found})
    for chunk in _chunks(missing):
        found |= _trials(conn, trials.c.id.in_(chunk))
    result = [
        Asked(_number(row.key, sweep_id), ProposalStatus(row.status), row.hint, found.get(first.get(row.id, "")))
        for row in rows
    ]
    return sorted(result, key=lambda a: -1 if a.number is None else a.number)


def curves(conn: sa.Connection, trial_ids: Collection[str], metric: str) -> dict[str, list[tuple[int, float]]]:
    """``(step, value)`` of a metric by rising step. Where a later start reported again, what it left behind is gone."""
    result: dict[str, dict[int, float]] = {trial_id: {} for trial_id in trial_ids}
    columns = (metrics.c.trial_id, metrics.c.attempt, metrics.c.generation, metrics.c.step, metrics.c.value)
    for chunk in _chunks(sorted(result)):
        query = sa.select(*columns).where(metrics.c.trial_id.in_(chunk), metrics.c.key == metric)
        query = query.order_by(metrics.c.trial_id, metrics.c.attempt, metrics.c.generation, metrics.c.step)
        token: tuple[str, int, int] | None = None
        for trial_id, attempt, generation, step, value in conn.execute(query):
            if token != (trial_id, attempt, generation):
                token = (trial_id, attempt, generation)
                result[trial_id] = {at: v for at, v in result[trial_id].items() if at < step}
            result[trial_id][step] = float("nan") if value is None else value
    return {trial_id: sorted(curve.items()) for trial_id, curve in result.items()}


def active(conn: sa.Connection) -> list[str]:
    """Ids of the sweeps that want trials, oldest first; registrations are not among them."""
    query = sa.select(sweeps.c.id).where(sweeps.c.state == SweepState.ACTIVE.value, sweeps.c.schedule.is_(None))
    return list(conn.scalars(query.order_by(sweeps.c.id)))


def pulse(conn: sa.Connection, sweep_id: str) -> tuple[Any, ...]:
    """Something cheap that differs whenever a sweep may have something to do."""
    sibling = sweeps.alias()
    is_active = (sibling.c.parent_id == sweeps.c.parent_id) & (sibling.c.state == SweepState.ACTIVE.value)
    siblings = sa.select(sa.func.count()).select_from(sibling).where(is_active).scalar_subquery()
    state, num_siblings = conn.execute(sa.select(sweeps.c.state, siblings).where(sweeps.c.id == sweep_id)).one()
    columns = (trials.c.state, sa.func.count(), sa.func.min(trials.c.value), sa.func.max(trials.c.value))
    counts = conn.execute(sa.select(*columns).where(trials.c.sweep_id == sweep_id).group_by(trials.c.state))
    return (state, num_siblings, *sorted(tuple(row) for row in counts))


def note(conn: sa.Connection, sweep_id: str, cause: str) -> None:
    """What people should know of a sweep whose state does not change."""
    conn.execute(sa.update(sweeps).where(sweeps.c.id == sweep_id).values(cause=cause))
    touch(conn, "sweeps", f"sweep:{sweep_id}")


def open_trials(conn: sa.Connection, sweep_id: str, states: Collection[TrialState]) -> list[str]:
    """Ids of the sweep's trials in these states."""
    query = sa.select(trials.c.id).where(trials.c.sweep_id == sweep_id, trials.c.state.in_(list(states)))
    return list(conn.scalars(query))


def of_attempt(conn: sa.Connection, attempt_id: str) -> tuple[str, str | None] | None:
    """Trial id and sweep id of an attempt; None if there is no such attempt."""
    query = sa.select(trials.c.id, trials.c.sweep_id).join(attempts, attempts.c.trial_id == trials.c.id)
    row = conn.execute(query.where(attempts.c.id == attempt_id)).one_or_none()
    return (row.id, row.sweep_id) if row is not None else None


def runs_of(conn: sa.Connection, parent_id: str, states: Collection[str]) -> list[str]:
    """Ids of the sweeps that a registration has started and that are in these states, oldest first."""
    query = sa.select(sweeps.c.id).where(sweeps.c.parent_id == parent_id, sweeps.c.state.in_(list(states)))
    return list(conn.scalars(query.order_by(sweeps.c.id)))


def _trials(conn: sa.Connection, where: sa.ColumnElement[bool]) -> dict[str, SearchTrial]:
    t = trials.c
    columns = (t.id, t.name, t.sweep_id, t.params, t.state, t.state_cause, t.value, t.attempts_made, t.ended_at)
    rows = conn.execute(sa.select(*columns).where(where)).mappings()
    return {row["id"]: SearchTrial(**{**row, "state": TrialState(row["state"])}) for row in rows}


def _number(key: str | None, sweep_id: str) -> int | None:
    owner, _, number = (key or "").rpartition(":")
    return int(number) if owner == sweep_id and number.isdecimal() else None


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(ids)
    while chunk := list(islice(iterator, _IDS_PER_QUERY)):
        yield chunk
