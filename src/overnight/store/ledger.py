"""Where an attempt's time and bytes went."""

from collections.abc import Mapping

import sqlalchemy as sa


def add(conn: sa.Connection, attempt_id: str, seconds: Mapping[str, float], counts: Mapping[str, float]) -> None:
    """Adds amounts (increments since the push before, not totals)."""
    raise NotImplementedError


def of_attempts(conn: sa.Connection, attempt_ids: list[str]) -> dict[str, dict[str, float]]:
    """``{attempt id: {name: amount}}``; seconds keep their category's name, counts get the prefix ``count.``."""
    raise NotImplementedError
