"""Who may decide: a row whose counter its holder raises; others watch the counter, never a stored time."""

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa


@dataclass(frozen=True)
class Leader:
    """The holder of a role and the counter of its sign of life."""

    name: str
    holder: str
    counter: int


def read(conn: sa.Connection, name: str = "scheduler") -> Leader | None:
    """Who holds it."""
    raise NotImplementedError


def acquire(conn: sa.Connection, *, holder: str, now: datetime, seen: Leader | None, name: str = "scheduler") -> bool:
    """Takes the role if it is free or still exactly as ``seen`` (unchanged for a lease period on your own clock)."""
    raise NotImplementedError


def renew(conn: sa.Connection, *, holder: str, now: datetime, name: str = "scheduler") -> bool:
    """Raises the counter; False when somebody else holds the role: stop deciding."""
    raise NotImplementedError


def release(conn: sa.Connection, *, holder: str, name: str = "scheduler") -> None:
    """Gives the role up."""
    raise NotImplementedError
