"""Numbers without gaps, in the order of commits: a counter row, locked by whoever takes from it until it commits."""

import sqlalchemy as sa

from overnight.store.models import counters

EVENT = "event"
OUTBOX = "outbox"

_TAKE = (
    sa.update(counters)
    .where(counters.c.name == sa.bindparam("sequence"))
    .values(value=counters.c.value + sa.bindparam("num"))
    .returning(counters.c.value)
)


def take(conn: sa.Connection, name: str, num: int = 1) -> int:
    """Takes ``num`` numbers and returns the first; a rolled back transaction gives them back."""
    last: int = conn.execute(_TAKE, {"sequence": name, "num": num}).scalar_one()
    return last - num + 1
