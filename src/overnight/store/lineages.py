"""Which steps of which (attempt, generation) count, after restarts that went back to an older checkpoint.

A token forks from a token, its parent, at the step of the checkpoint that it restored: what the parent did beyond that
step was done again, and what any other token did since the parent forked was in vain. Neither is part of the trial's
history. Checkpoints in the checkpoint place follow the same rule
(:mod:`overnight.trainer.checkpoint.reading.lineage`), so that a curve never shows work that the weights do not hold.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from overnight.store import models
from overnight.store.upserts import insert_for

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

Parent = tuple[int, int]
"""(attempt, generation) of the token from whose checkpoint another one went on."""

SCRATCH: Final[Parent] = (0, 0)
"""The parent of a token that says that it began from nothing."""

NOTHING: Final = -(2**63)
"""The last step that counts of a token of which nothing counts; it is below every step."""

_TABLE = models.generations
_METRICS = models.metrics


@dataclass(frozen=True)
class Token:
    """One (attempt, generation) of a trial.

    Attributes:
        fork_step: Step of the checkpoint that it restored; None for the first, and for one that has logged nothing.
        until_step: The last step that counts; None: all of them; :data:`NOTHING` beside the lineage.
        parent: Whose checkpoint that was, :data:`SCRATCH` for none; None if it has not said.
    """

    attempt: int
    generation: int
    fork_step: int | None
    until_step: int | None
    parent: Parent | None = None


def record(
    conn: sa.Connection,
    trial_id: str,
    attempt: int,
    generation: int,
    fork_step: int | None,
    now: datetime,
    parent: Parent | None = None,
) -> None:
    """Stores a token; told again, it only learns a fork that was not known before."""
    parent_attempt, parent_generation = parent or (None, None)
    _upsert(
        conn,
        trial_id,
        attempt,
        generation,
        fork_step=fork_step,
        parent_attempt=parent_attempt,
        parent_generation=parent_generation,
        started_at=now,
    )


def note_first_step(conn: sa.Connection, trial_id: str, attempt: int, generation: int, step: int) -> None:
    """Stores the lowest step that a token has logged so far."""
    _upsert(conn, trial_id, attempt, generation, first_step=step)


def _upsert(conn: sa.Connection, trial_id: str, attempt: int, generation: int, **values: Any) -> None:
    token = {"trial_id": trial_id, "attempt": attempt, "generation": generation}
    empty = dict.fromkeys(("fork_step", "parent_attempt", "parent_generation", "first_step", "started_at"))
    conn.execute(_merge(conn.dialect.name, tuple(values)), token | empty | values)


@lru_cache
def _merge(dialect: str, names: tuple[str, ...]) -> "postgresql.Insert | sqlite.Insert":
    """The insert that, where the token is known, merges the columns ``names`` into it."""
    statement = insert_for(dialect, _TABLE)
    new, old = statement.excluded, _TABLE.c
    lower = (old.first_step.is_(None)) | (new.first_step < old.first_step)
    changes: dict[str, sa.ColumnElement[Any]] = {name: sa.func.coalesce(old[name], new[name]) for name in names}
    if "first_step" in names:
        changes["first_step"] = sa.case((lower, new.first_step), else_=old.first_step)
    return statement.on_conflict_do_update(index_elements=_TABLE.primary_key.columns, set_=changes)


def tokens(conn: sa.Connection, trial_id: str) -> list[Token]:
    """Oldest first, each with how far it counts on the way from the newest one back over the parents.

    A token that never said where it forked goes on from the one before it, and forks before the first step that it
    logged: a command that starts over replaces what it had logged before.
    """
    query = sa.select(_TABLE).where(_TABLE.c.trial_id == trial_id)
    rows = conn.execute(query.order_by(_TABLE.c.attempt, _TABLE.c.generation)).all()
    own = [Token(row.attempt, row.generation, _fork_step(row, row is rows[0]), NOTHING, _parent(row)) for row in rows]
    return counted(own)


def _fork_step(row: sa.Row[Any], is_oldest: bool) -> int | None:
    if row.fork_step is None and row.first_step is not None and not is_oldest:
        return int(row.first_step) - 1
    fork_step: int | None = row.fork_step
    return fork_step


def _parent(row: sa.Row[Any]) -> Parent | None:
    return None if row.parent_attempt is None else (row.parent_attempt, row.parent_generation)


def counted(own: Sequence[Token]) -> list[Token]:
    """The same tokens, each with its ``until_step``.

    Args:
        own: All tokens of a trial that are known, oldest first. A parent that is not among them (its node was lost
            before it could tell) stands for the newest one before it.
    """
    limits: dict[Parent, int | None] = {}
    names = [(token.attempt, token.generation) for token in own]
    place, until = len(own) - 1, None
    while place >= 0:
        token = own[place]
        limits[names[place]] = until
        if token.fork_step is not None:
            until = token.fork_step if until is None else min(until, token.fork_step)
        place = min(place, bisect_right(names, token.parent) if token.parent is not None else place) - 1
    return [replace(token, until_step=limits.get(name, NOTHING)) for token, name in zip(own, names, strict=True)]


def in_lineage(found: list[Token]) -> sa.ColumnElement[bool]:
    """The condition on metrics rows that they belong to the lineage."""
    return sa.or_(sa.false(), *(_holds(token) for token in found))


def _holds(token: Token) -> sa.ColumnElement[bool]:
    same = (_METRICS.c.attempt == token.attempt) & (_METRICS.c.generation == token.generation)
    return same if token.until_step is None else same & (_METRICS.c.step <= token.until_step)
