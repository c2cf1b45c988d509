"""Which steps of which (attempt, generation) count, after restarts that went back to an older checkpoint.

A token forks at the step of the checkpoint that it restored: what its ancestors did beyond that step was done again, so
it is not part of the trial's history. The same rule holds for checkpoints in the checkpoint place.
"""

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from overnight.store import models
from overnight.store.upserts import upsert

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
    statement = upsert(conn, _TABLE)
    known = {"fork_step": sa.func.coalesce(_TABLE.c.fork_step, statement.excluded.fork_step)}
    values = {
        "trial_id": trial_id,
        "attempt": attempt,
        "generation": generation,
        "fork_step": fork_step,
        "started_at": now,
    }
    conn.execute(statement.on_conflict_do_update(index_elements=_TABLE.primary_key.columns, set_=known), values)


def tokens(conn: sa.Connection, trial_id: str) -> list[Token]:
    """Oldest first, each cut where a later one forked.

    A token that never said where it forked forks before the first step that it logged: a command that starts over
    replaces what it had logged before.
    """
    query = sa.select(_TABLE.c.attempt, _TABLE.c.generation, _TABLE.c.fork_step)
    known = {
        (row.attempt, row.generation): row.fork_step for row in conn.execute(query.where(_TABLE.c.trial_id == trial_id))
    }
    if len(known) != 1 or None in known.values():
        for row in conn.execute(_first_steps(trial_id)):
            token = (row.attempt, row.generation)
            if known.get(token) is None:
                known[token] = row.first_step - 1
    found: list[Token] = []
    until: int | None = None
    for attempt, generation in sorted(known, reverse=True):
        fork = known[attempt, generation]
        found.append(Token(attempt, generation, fork, until))
        if fork is not None:
            until = fork if until is None else min(until, fork)
    return found[::-1]


def _first_steps(trial_id: str) -> sa.Select[tuple[int, int, int]]:
    table = _METRICS
    query = sa.select(table.c.attempt, table.c.generation, sa.func.min(table.c.step).label("first_step"))
    return query.where(table.c.trial_id == trial_id).group_by(table.c.attempt, table.c.generation)


def in_lineage(found: list[Token]) -> sa.ColumnElement[bool]:
    """The condition on metrics rows that they belong to the lineage."""
    return sa.or_(sa.false(), *(_holds(token) for token in found))


def _holds(token: Token) -> sa.ColumnElement[bool]:
    same = (_METRICS.c.attempt == token.attempt) & (_METRICS.c.generation == token.generation)
    return same if token.until_step is None else same & (_METRICS.c.step <= token.until_step)
