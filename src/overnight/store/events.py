"""Events: one row for each durable change, numbered without gaps in the order of commits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.models.api import Page


@dataclass(frozen=True)
class NewEvent:
    """An event that has no number yet. ``subject`` is the id of what it is about."""

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
    """Writes events; returns the number of the first."""
    raise NotImplementedError


def page(
    conn: sa.Connection, after: int = 0, *, trial_id: str | None = None, kinds: Sequence[str] = (), limit: int = 1_000
) -> Page:
    """Events with ``seq > after``, oldest first; the cursor is the last one's number, None when there are none."""
    raise NotImplementedError


def last_seq(conn: sa.Connection) -> int:
    """Number of the newest event, 0 if there is none."""
    raise NotImplementedError
