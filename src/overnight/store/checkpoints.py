"""Committed checkpoints, as the workers told of them. What is on disk is the truth; these rows are for people.

A row stays when its files go, and says so: how far a trial has ever been decides what is progress, and from where a
later start can have forked. Readers see those that are there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.addresses import discreet
from overnight.core.models.api import Checkpoint
from overnight.store import models
from overnight.store.upserts import upsert
from overnight.store.writer import touch

_TABLE = models.checkpoints
_KEY = (_TABLE.c.trial_id, _TABLE.c.attempt, _TABLE.c.generation, _TABLE.c.step)
_ALL_OF_TRIAL = sa.select(_TABLE).where(_TABLE.c.trial_id == sa.bindparam("trial")).order_by(*_KEY)
_OF_TRIAL = _ALL_OF_TRIAL.where(_TABLE.c.deleted_at.is_(None))
_DELETED_OF_TRIAL = _ALL_OF_TRIAL.where(_TABLE.c.deleted_at.is_not(None))
_COMMITTED = sa.select(_TABLE.c.trial_id).where(_TABLE.c.committed_at >= sa.bindparam("since")).distinct()
_MARK = (
    sa.update(_TABLE)
    .where(*(column == sa.bindparam(f"of_{column.name}") for column in _KEY))
    .values(deleted_at=sa.bindparam("deleted"))
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
    """Records a commit; whether it is new and further than every one before (that is progress).

    Of several at one step, the last one counts.
    """
    newest = conn.scalar(sa.select(sa.func.max(_TABLE.c.step)).where(_TABLE.c.trial_id == checkpoint.trial_id))
    values = checkpoint.model_dump() | {"committed_at": now}
    insert = upsert(conn, _TABLE)
    again = {name: insert.excluded[name] for name in ("uri", "bytes", "committed_at")} | {"deleted_at": None}
    conn.execute(insert.on_conflict_do_update(index_elements=_KEY, set_=again), values)
    return newest is None or checkpoint.step > newest


def of_trial(conn: sa.Connection, trial_id: str) -> list[Checkpoint]:
    """Those that are there, oldest first."""
    return [_checkpoint(row) for row in conn.execute(_OF_TRIAL, {"trial": trial_id})]


def _checkpoint(row: sa.Row[Any]) -> Checkpoint:
    return Checkpoint.model_validate({name: getattr(row, name) for name in Checkpoint.model_fields})


def committed_since(conn: sa.Connection, since: datetime) -> list[str]:
    """Trials that have committed something since."""
    return list(conn.scalars(_COMMITTED, {"since": since}))


@dataclass(frozen=True)
class Differences:
    """Where the rows of a trial are not what its place holds.

    Attributes:
        gone: Of files that are not there.
        back: Of files that were gone, and are there again.
    """

    gone: tuple[Checkpoint, ...]
    back: tuple[Checkpoint, ...]

    def __bool__(self) -> bool:
        return bool(self.gone or self.back)


def compare(conn: sa.Connection, trial_id: str, place: str, names: Collection[str], looked_at: datetime) -> Differences:
    """Compares the rows of a trial with its place. What lies elsewhere, a script's own, is left alone.

    Args:
        conn: For reading.
        trial_id: Whose.
        place: Of its checkpoints.
        names: What it holds.
        looked_at: When somebody began to look; what was committed after that may not have been seen.
    """
    place = discreet(place)  # as the rows have it
    held = {f"{place}/{name}" for name in names}
    alive = of_trial(conn, trial_id)
    ours = [one for one in alive if one.uri.startswith(f"{place}/") and one.committed_at <= looked_at]
    gone = tuple(one for one in ours if one.uri not in held)
    if not held.difference(one.uri for one in alive):
        return Differences(gone, ())
    deleted = map(_checkpoint, conn.execute(_DELETED_OF_TRIAL, {"trial": trial_id}))
    return Differences(gone, tuple(one for one in deleted if one.uri in held))


def mark(conn: sa.Connection, now: datetime, differences: Differences) -> None:
    """Records what :func:`compare` has found."""
    rows = [(one, now) for one in differences.gone] + [(one, None) for one in differences.back]
    for one, deleted_at in rows:
        key = {f"of_{column.name}": getattr(one, column.name) for column in _KEY}
        conn.execute(_MARK, key | {"deleted": deleted_at})
    for trial_id in {one.trial_id for one, _ in rows}:
        touch(conn, "checkpoints", f"trial:{trial_id}")


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
