"""Metrics by (trial, attempt, generation, key, step), read along the lineage that counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import Mode
from overnight.core.errors import BadInputError
from overnight.core.models.api import MetricPoint, Page
from overnight.core.models.spec import Objective
from overnight.store import models
from overnight.store.lineages import Token, in_lineage, note_first_step, tokens
from overnight.store.models import storable
from overnight.store.upserts import upsert
from overnight.store.writer import touch

__all__ = ["Token"]

Row = tuple[str, int, float | str | None, float]
"""key, step, value (a number, or text such as nan, inf, -inf), Unix seconds of the worker."""

_TABLE = models.metrics
_TOKEN_ORDER = (_TABLE.c.attempt.desc(), _TABLE.c.generation.desc())


@dataclass(frozen=True)
class Reading:
    """An objective's value. ``reported``: anything came at all; ``value`` None then means it was not finite."""

    value: float | None
    reported: bool
    text: str | None = None
    step: int | None = None


def split_value(value: Any) -> tuple[float | None, str | None]:
    """A reported value as a finite number, or else as the text that says what it was."""
    if isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            return None, "inf" if value > 0 else "-inf"
        return (number, None) if math.isfinite(number) else (None, str(number))
    return None, storable(str(value), 250)


def append(conn: sa.Connection, trial_id: str, attempt: int, generation: int, rows: Sequence[Row]) -> int:
    """Stores rows; repeating them changes nothing. Of two for one step the one with the newer worker time stays.

    Touches ``metrics`` and ``trial:ID``. Returns how many were given.
    """
    if not rows:
        return 0
    statement = upsert(conn, _TABLE)
    newer = {name: statement.excluded[name] for name in ("value", "text", "time")}
    statement = statement.on_conflict_do_update(
        index_elements=_TABLE.primary_key.columns, set_=newer, where=statement.excluded.time >= _TABLE.c.time
    )
    token = {"trial_id": trial_id, "attempt": attempt, "generation": generation}
    conn.execute(statement, [token | _values(*row) for row in rows])
    note_first_step(conn, trial_id, attempt, generation, min(row[1] for row in rows))
    touch(conn, "metrics", f"trial:{trial_id}")
    return len(rows)


def _values(key: str, step: int, value: float | str | None, time: float) -> dict[str, Any]:
    number, text = split_value(value)
    return {"key": storable(key, 250), "step": step, "value": number, "text": text, "time": time}


def lineage(conn: sa.Connection, trial_id: str) -> list[Token]:
    """Tokens oldest first, each cut at the step from which a later one forked."""
    return tokens(conn, trial_id)


def points(
    conn: sa.Connection,
    trial_id: str,
    key: str | None = None,
    lineage: bool = True,
    after: str | None = None,
    limit: int = 1_000,
) -> Page:
    """MetricPoints by (key, step), one for each in the lineage.

    Args:
        conn: Of a read.
        trial_id: The trial.
        key: One metric; None is all.
        lineage: False gives every row of every token.
        after: The cursor of the page before.
        limit: Most points.

    Raises:
        BadInputError: The cursor is none.
    """
    where = [_TABLE.c.trial_id == trial_id]
    if key is not None:
        where.append(_TABLE.c.key == storable(key, 250))
    place = (_TABLE.c.key, _TABLE.c.step, _TABLE.c.attempt, _TABLE.c.generation)
    if after is not None:
        where.append(sa.tuple_(*place) > sa.tuple_(*_parse_cursor(after)))
    query = sa.select(_TABLE)
    if lineage:
        found = tokens(conn, trial_id)
        where.append(in_lineage(found))
        if len(found) > 1:  # a token may log the step again at which it forked: the newest counts
            nth = sa.func.row_number().over(partition_by=(_TABLE.c.key, _TABLE.c.step), order_by=_TOKEN_ORDER)
            ranked = sa.select(_TABLE, nth.label("nth")).where(*where).subquery()
            query = sa.select(ranked).where(ranked.c.nth == 1)
            rows = conn.execute(query.order_by(*(ranked.c[column.name] for column in place)).limit(limit)).all()
            return _page(rows, limit)
    return _page(conn.execute(query.where(*where).order_by(*place).limit(limit)).all(), limit)


def _page(rows: Sequence[sa.Row[Any]], limit: int) -> Page:
    items = tuple(
        MetricPoint(
            key=row.key,
            step=row.step,
            value=row.value,
            text=row.text,
            time=row.time,
            attempt=row.attempt,
            generation=row.generation,
        )
        for row in rows
    )
    if len(items) < limit or not items:
        return Page(items=items)
    last = items[-1]
    return Page(items=items, cursor=f"{last.step}.{last.attempt}.{last.generation}.{last.key}")


def _parse_cursor(cursor: str) -> tuple[str, int, int, int]:
    try:
        step, attempt, generation, key = cursor.split(".", 3)
        return key, int(step), int(attempt), int(generation)
    except ValueError:
        raise BadInputError(f"{cursor[:100]!r} is no cursor", hint="Pass on what the page before gave.") from None


def keys(conn: sa.Connection, trial_id: str) -> list[str]:
    """Names of all metrics."""
    query = sa.select(_TABLE.c.key).distinct().where(_TABLE.c.trial_id == trial_id).order_by(_TABLE.c.key)
    return list(conn.scalars(query))


def reduce(conn: sa.Connection, trial_id: str, objective: Objective) -> Reading:
    """The objective over the current lineage: its best finite value, or its last one whatever that is."""
    query = sa.select(_TABLE.c.value, _TABLE.c.text, _TABLE.c.step).where(
        _TABLE.c.trial_id == trial_id,
        _TABLE.c.key == storable(objective.metric, 250),
        in_lineage(tokens(conn, trial_id)),
    )
    last = conn.execute(query.order_by(_TABLE.c.step.desc(), *_TOKEN_ORDER).limit(1)).one_or_none()
    if last is None:
        return Reading(value=None, reported=False)
    if objective.reduce == "best":
        order = _TABLE.c.value.asc() if objective.mode is Mode.MIN else _TABLE.c.value.desc()
        finite = query.where(_TABLE.c.value.is_not(None))
        best = conn.execute(finite.order_by(order, _TABLE.c.step).limit(1)).one_or_none()
        last = best or last
    return Reading(value=last.value, reported=True, text=last.text, step=last.step)
