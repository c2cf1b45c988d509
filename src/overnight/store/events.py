"""Events: one row for each durable change, numbered without gaps in the order of commits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.models.api import Event, Page
from overnight.store import models, sequences
from overnight.store.models import storable
from overnight.store.writer import touch

_INSERT = sa.insert(models.events)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that has no number yet.

    Attributes:
        kind: ``trial.created``, ``trial.state``, ``trial.bumped``, ``device.state``, ``node.connected`` …
        subject: The name of what it is about, as people type it.
        actor: Who did it.
    """

    kind: str
    subject: str
    actor: str
    cause: str = ""
    trial_id: str | None = None
    attempt_id: str | None = None
    before: str | None = None
    after: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


def append(conn: sa.Connection, now: datetime, *new: NewEvent) -> int:
    """Writes events; returns the number of the first. Touches ``events``."""
    first = sequences.take(conn, sequences.EVENT, len(new))
    rows = [
        {
            "seq": first + offset,
            "at": now,
            "actor": storable(event.actor, 200),
            "kind": event.kind,
            "subject": storable(event.subject, 250),
            "trial_id": event.trial_id,
            "attempt_id": event.attempt_id,
            "before": event.before,
            "after": event.after,
            "cause": event.cause,
            "data": event.data,
        }
        for offset, event in enumerate(new)
    ]
    if rows:
        conn.execute(_INSERT, rows)
        touch(conn, "events")
    return first


def page(
    conn: sa.Connection, after: int = 0, *, trial_id: str | None = None, kinds: Sequence[str] = (), limit: int = 1_000
) -> Page:
    """Events with ``seq > after``, oldest first; the cursor is the last one's number, None when there are none."""
    table = models.events
    query = sa.select(table).where(table.c.seq > after).order_by(table.c.seq).limit(limit)
    if trial_id is not None:
        query = query.where(table.c.trial_id == trial_id)
    if kinds:
        query = query.where(table.c.kind.in_(kinds))
    items = tuple(Event.model_validate(dict(row)) for row in conn.execute(query).mappings())
    return Page(items=items, cursor=str(items[-1].seq) if items else None)


def data_of_last(conn: sa.Connection, *, trial_id: str, attempt_id: str, after: str) -> dict[str, Any]:
    """What was recorded when the trial last came into that state during the attempt; empty if it never did."""
    table = models.events
    query = sa.select(table.c.data).where(
        table.c.trial_id == trial_id, table.c.attempt_id == attempt_id, table.c.after == after
    )
    found: dict[str, Any] | None = conn.scalar(query.order_by(table.c.seq.desc()).limit(1))
    return found or {}


def last_seq(conn: sa.Connection) -> int:
    """Number of the newest event, 0 if there is none."""
    return conn.scalar(sa.select(sa.func.max(models.events.c.seq))) or 0
