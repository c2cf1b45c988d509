"""What MLflow has not heard yet, in order. Rows stay until they are done."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa


@dataclass(frozen=True)
class OutboxRow:
    """One thing to tell MLflow about a trial's run.

    ``data`` by kind:

    - ``run``: {} (create the run; experiment, params and config are read from the trial)
    - ``metrics``: ``attempt``, ``generation``, ``rows`` [[key, step, value or text, Unix seconds] ...]
    - ``params``, ``tags``: ``attempt``, ``values`` {name: text}
    - ``status``: ``state`` (a TrialState), ``at`` (Unix seconds)
    """

    seq: int
    trial_id: str
    kind: str
    data: dict[str, Any]
    created_at: datetime


def add(conn: sa.Connection, now: datetime, rows: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """Adds (trial id, kind, data) rows."""
    raise NotImplementedError


def pending(conn: sa.Connection, limit: int = 500, after: int = 0) -> list[OutboxRow]:
    """The oldest rows with ``seq > after``."""
    raise NotImplementedError


def done(conn: sa.Connection, up_to: int) -> int:
    """Removes rows with ``seq <= up_to``; returns how many."""
    raise NotImplementedError


def remove(conn: sa.Connection, seqs: Sequence[int]) -> int:
    """Removes single rows (told out of order, or refused by MLflow for good); returns how many."""
    raise NotImplementedError


def lag(conn: sa.Connection) -> int:
    """How many rows MLflow has not heard."""
    raise NotImplementedError
