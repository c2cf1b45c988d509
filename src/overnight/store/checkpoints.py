"""Committed checkpoints, as the workers told of them. What is on disk is the truth; these rows are for people."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from overnight.core.models.api import Checkpoint
from overnight.store import models
from overnight.store.upserts import upsert

_TABLE = models.checkpoints
_OF_TRIAL = (
    sa.select(_TABLE)
    .where(_TABLE.c.trial_id == sa.bindparam("trial"))
    .order_by(_TABLE.c.attempt, _TABLE.c.generation, _TABLE.c.step)
)
_NEWEST = (
    sa.select(
        _TABLE.c.trial_id,
        sa.func.max(_TABLE.c.step).label("step"),
        sa.func.max(_TABLE.c.committed_at).label("committed_at"),
    )
    .where(_TABLE.c.trial_id.in_(sa.bindparam("trials", expanding=True)))
    .group_by(_TABLE.c.trial_id)
)


def add(conn: sa.Connection, now: datetime, checkpoint: Checkpoint) -> bool:
    """Records a commit; whether it is new and further than every one before (that is progress)."""
    newest = conn.scalar(sa.select(sa.func.max(_TABLE.c.step)).where(_TABLE.c.trial_id == checkpoint.trial_id))
    values = checkpoint.model_dump() | {"committed_at": now}
    conn.execute(upsert(conn, _TABLE).on_conflict_do_nothing(), values)
    return newest is None or checkpoint.step > newest


def of_trial(conn: sa.Connection, trial_id: str) -> list[Checkpoint]:
    """Oldest first."""
    return [Checkpoint.model_validate(dict(row)) for row in conn.execute(_OF_TRIAL, {"trial": trial_id}).mappings()]


@dataclass(frozen=True)
class Newest:
    """How far a trial's committed state is."""

    step: int
    committed_at: datetime


def newest(conn: sa.Connection, trial_ids: Collection[str]) -> dict[str, Newest]:
    """Furthest step and time of the last commit per trial; trials without one are left out."""
    if not trial_ids:
        return {}
    found = conn.execute(_NEWEST, {"trials": list(trial_ids)})
    return {row.trial_id: Newest(row.step, row.committed_at) for row in found}
