"""Which steps of which (attempt, generation) count, after restarts that went back to an older checkpoint.

A token forks at the step of the checkpoint that it restored: what its ancestors did beyond that step was done again, so
it is not part of the trial's history. The same rule holds for checkpoints in the checkpoint place.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from overnight.store import models
from overnight.store.upserts import insert_for

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

_TABLE = models.generations
_METRICS = models.metrics


@dataclass(frozen=True)
class Token:
    """One (attempt, generation) of a trial.

    Attributes:
        fork_step: Step of the checkpoint that it restored; None for the first, and for one that has logged nothing.
        until_step: The last step that counts; None for the newest token.
    """

    attempt: int
    generation: int
    fork_step: int | None
    until_step: int | None


def record(
    conn: sa.Connection, trial_id: str, attempt: int, generation: int, fork_step: int | None, now: datetime
) -> None:
    """Stores a token; told again, it only learns a fork step that was not known before."""
    _upsert(conn, trial_id, attempt, generation, fork_step=fork_step, started_at=now)


def note_first_step(conn: sa.Connection, trial_id: str, attempt: int, generation: int, step: int) -> None:
    """Stores the lowest step that a token has logged so far."""
    _upsert(conn, trial_id, attempt, generation, first_step=step)


def _upsert(conn: sa.Connection, trial_id: str, attempt: int, generation: int, **values: Any) -> None:
    token = {"trial_id": trial_id, "attempt": attempt, "generation": generation}
    empty: dict[str, Any] = {"fork_step": None, "first_step": None, "started_at": None}
    conn.execute(_merge(conn.dialect.name, tuple(values)), token | empty | values)


@lru_cache
def _merge(dialect: str, names: tuple[str, ...]) -> "postgresql.Insert | sqlite.Insert":
    """The insert that, where the token is known, merges the columns ``names`` into it."""
    statement = insert_for(dialect, _TABLE)
    new, old = statement.excluded, _TABLE.c
    lower = (old.first_step.is_(None)) | (new.first_step < old.first_step)
    merged = {
        "fork_step": sa.func.coalesce(old.fork_step, new.fork_step),
        "first_step": sa.case((lower, new.first_step), else_=old.first_step),
        "started_at": sa.func.coalesce(old.started_at, new.started_at),
    }
    changes = {name: merged[name] for name in names}
    return statement.on_conflict_do_update(index_elements=_TABLE.primary_key.columns, set_=changes)


def tokens(conn: sa.Connection, trial_id: str) -> list[Token]:
    """Oldest first, each cut where a later one forked.

    A token that never said where it forked forks before the first step that it logged: a command that starts over
    replaces what it had logged before.
    """
    query = sa.select(_TABLE).where(_TABLE.c.trial_id == trial_id)
    rows = conn.execute(query.order_by(_TABLE.c.attempt.desc(), _TABLE.c.generation.desc())).all()
    found: list[Token] = []
    until: int | None = None
    for place, row in enumerate(rows, start=1):
        is_first = place == len(rows)
        fork = row.fork_step
        if fork is None and row.first_step is not None and not is_first:
            fork = row.first_step - 1
        found.append(Token(row.attempt, row.generation, fork, until))
        if fork is not None:
            until = fork if until is None else min(until, fork)
    return found[::-1]


def in_lineage(found: list[Token]) -> sa.ColumnElement[bool]:
    """The condition on metrics rows that they belong to the lineage."""
    return sa.or_(sa.false(), *(_holds(token) for token in found))


def _holds(token: Token) -> sa.ColumnElement[bool]:
    same = (_METRICS.c.attempt == token.attempt) & (_METRICS.c.generation == token.generation)
    return same if token.until_step is None else same & (_METRICS.c.step <= token.until_step)
