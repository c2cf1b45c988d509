"""Metrics by (trial, attempt, generation, key, step), and the lineage that says which of them count."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from overnight.core.models.api import Page
from overnight.core.models.spec import Objective

Row = tuple[str, int, float | str, float]
"""key, step, value (a number, or the text nan, inf, -inf), Unix seconds of the worker."""


@dataclass(frozen=True)
class Token:
    """One (attempt, generation) of a lineage: its steps in ``after_step < step <= until_step`` count.

    ``until_step`` is None for the newest token.
    """

    attempt: int
    generation: int
    after_step: int | None
    until_step: int | None


@dataclass(frozen=True)
class Reading:
    """An objective's value. ``reported``: anything came at all; ``value`` None then means it was not finite."""

    value: float | None
    reported: bool
    text: str | None = None
    step: int | None = None


def append(conn: sa.Connection, trial_id: str, attempt: int, generation: int, rows: Sequence[Row]) -> int:
    """Stores rows; repeating them changes nothing, the newest worker time wins. Returns how many were given."""
    raise NotImplementedError


def lineage(conn: sa.Connection, trial_id: str) -> list[Token]:
    """Tokens oldest first, each cut at the step from which a later one forked."""
    raise NotImplementedError


def points(
    conn: sa.Connection,
    trial_id: str,
    key: str | None = None,
    lineage: bool = True,
    after: str | None = None,
    limit: int = 1_000,
) -> Page:
    """MetricPoints by (key, step); ``after`` is the cursor of the page before."""
    raise NotImplementedError


def keys(conn: sa.Connection, trial_id: str) -> list[str]:
    """Names of all metrics."""
    raise NotImplementedError


def reduce(conn: sa.Connection, trial_id: str, objective: Objective) -> Reading:
    """The objective over the current lineage: best finite value or last one."""
    raise NotImplementedError
