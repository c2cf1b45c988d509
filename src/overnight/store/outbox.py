"""What MLflow has not heard yet, in order. Rows stay until they are done.

Everything that MLflow should know is written here in the transaction that makes it true, and told later by a process of
its own: an MLflow that is slow or away delays nothing and loses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.store import models, sequences
from overnight.store.writer import touch

_INSERT = sa.insert(models.outbox)


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
    """Adds (trial id, kind, data) rows. Touches ``outbox``."""
    if not rows:
        return
    first = sequences.take(conn, sequences.OUTBOX, len(rows))
    conn.execute(
        _INSERT,
        [
            {"seq": first + offset, "trial_id": trial_id, "kind": kind, "data": data, "created_at": now}
            for offset, (trial_id, kind, data) in enumerate(rows)
        ],
    )
    touch(conn, "outbox")


def pending(conn: sa.Connection, limit: int = 500, after: int = 0) -> list[OutboxRow]:
    """The oldest rows with ``seq > after``."""
    table = models.outbox
    query = sa.select(table).where(table.c.seq > after).order_by(table.c.seq).limit(limit)
    return [OutboxRow(**row) for row in conn.execute(query).mappings()]


def done(conn: sa.Connection, up_to: int) -> int:
    """Removes rows with ``seq <= up_to``; returns how many."""
    return conn.execute(sa.delete(models.outbox).where(models.outbox.c.seq <= up_to)).rowcount


def remove(conn: sa.Connection, seqs: Sequence[int]) -> int:
    """Removes single rows (told out of order, or refused by MLflow for good); returns how many."""
    if not seqs:
        return 0
    return conn.execute(sa.delete(models.outbox).where(models.outbox.c.seq.in_(seqs))).rowcount


def lag(conn: sa.Connection) -> int:
    """How many rows MLflow has not heard."""
    return conn.scalar(sa.select(sa.func.count()).select_from(models.outbox)) or 0
