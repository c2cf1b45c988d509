"""Where an attempt's time and bytes went."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from overnight.store import models
from overnight.store.models import storable
from overnight.store.upserts import upsert

SECONDS = "seconds"
COUNT = "count"
_OF_ATTEMPTS = sa.select(models.ledger).where(models.ledger.c.attempt_id.in_(sa.bindparam("attempts", expanding=True)))


def add(conn: sa.Connection, attempt_id: str, seconds: Mapping[str, float], counts: Mapping[str, float]) -> None:
    """Adds amounts (increments since the push before, not totals)."""
    table = models.ledger
    rows = [_entry(attempt_id, SECONDS, *item) for item in seconds.items()]
    rows += [_entry(attempt_id, COUNT, *item) for item in counts.items()]
    if rows:
        statement = upsert(conn, table)
        summed = {"amount": table.c.amount + statement.excluded.amount}
        conn.execute(statement.on_conflict_do_update(index_elements=table.primary_key.columns, set_=summed), rows)


def _entry(attempt_id: str, unit: str, name: str, amount: float) -> dict[str, Any]:
    return {"attempt_id": attempt_id, "unit": unit, "name": storable(name, 100), "amount": float(amount)}


def of_attempts(conn: sa.Connection, attempt_ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """``{attempt id: {name: amount}}``; seconds keep their category's name, counts get the prefix ``count.``."""
    found: dict[str, dict[str, float]] = {}
    for row in conn.execute(_OF_ATTEMPTS, {"attempts": list(attempt_ids)}):
        name = row.name if row.unit == SECONDS else f"count.{row.name}"
        found.setdefault(row.attempt_id, {})[name] = row.amount
    return found
