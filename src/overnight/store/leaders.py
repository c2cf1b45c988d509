"""Who may decide: a row whose counter its holder raises; others watch the counter, never a stored time."""

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from overnight.store import models
from overnight.store.upserts import upsert

_TABLE = models.leaders
_ONE = sa.select(_TABLE).where(_TABLE.c.name == sa.bindparam("role"))


@dataclass(frozen=True)
class Leader:
    """The holder of a role and the counter of its sign of life."""

    name: str
    holder: str
    counter: int


def read(conn: sa.Connection, name: str = "scheduler") -> Leader | None:
    """Who holds it."""
    row = conn.execute(_ONE, {"role": name}).one_or_none()
    return None if row is None else Leader(row.name, row.holder, row.counter)


def acquire(conn: sa.Connection, *, holder: str, now: datetime, seen: Leader | None, name: str = "scheduler") -> bool:
    """Takes the role if it is free, one's own already, or still exactly as ``seen``.

    Args:
        holder: Identity of this process: another start is another holder.
        now: For the record.
        seen: What :func:`read` gave at the beginning of a whole lease period, measured on your own monotonic clock;
            None if nobody held the role.
        name: The role.

    Returns:
        Whether ``holder`` has it now.
    """
    if seen is None:
        values = {"name": name, "holder": holder, "counter": 1, "acquired_at": now, "renewed_at": now}
        statement = upsert(conn, _TABLE).on_conflict_do_nothing(index_elements=["name"]).returning(_TABLE.c.name)
        return conn.scalar(statement, values) is not None or renew(conn, holder=holder, now=now, name=name)
    unchanged = (_TABLE.c.name == name) & (_TABLE.c.holder == seen.holder) & (_TABLE.c.counter == seen.counter)
    values = {"holder": holder, "counter": seen.counter + 1, "acquired_at": now, "renewed_at": now}
    return conn.execute(sa.update(_TABLE).where(unchanged).values(values)).rowcount == 1


def renew(conn: sa.Connection, *, holder: str, now: datetime, name: str = "scheduler") -> bool:
    """Raises the counter; False when somebody else holds the role: stop deciding."""
    mine = (_TABLE.c.name == name) & (_TABLE.c.holder == holder)
    values = {"counter": _TABLE.c.counter + 1, "renewed_at": now}
    return conn.execute(sa.update(_TABLE).where(mine).values(values)).rowcount == 1


def release(conn: sa.Connection, *, holder: str, name: str = "scheduler") -> None:
    """Gives the role up."""
    conn.execute(sa.delete(_TABLE).where((_TABLE.c.name == name) & (_TABLE.c.holder == holder)))
