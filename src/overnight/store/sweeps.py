"""Sweeps: what is searched, how far it is, and what planners need to know of their trials."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import SweepState, TrialState
from overnight.core.ids import IdFactory
from overnight.core.models.api import Sweep, SweepIn


@dataclass(frozen=True)
class SweepTrial:
    """A trial as its planner and pruner see it."""

    id: str
    name: str
    number: int
    params: dict[str, Any]
    state: TrialState
    value: float | None
    step: int
    ended_at: datetime | None


def add(
    conn: sa.Connection, *, ids: IdFactory, now: datetime, actor: str, sweep: SweepIn, parent_id: str | None = None
) -> Sweep:
    """A new ACTIVE sweep. With a schedule it is a registration, whose runs are sweeps with it as ``parent_id``.

    Raises:
        KeyReusedError: The key came with another body; with the same one, the first answer is returned.
        ConflictError: The experiment has another objective.
    """
    raise NotImplementedError


def get(conn: sa.Connection, sweep_id: str) -> Sweep:
    """Raises NotFoundError."""
    raise NotImplementedError


def list_(
    conn: sa.Connection,
    *,
    states: Collection[SweepState] | None = None,
    experiment_id: str | None = None,
    parent_id: str | None = None,
) -> list[Sweep]:
    """Newest first."""
    raise NotImplementedError


def set_state(
    conn: sa.Connection,
    *,
    sweep_id: str,
    state: SweepState,
    cause: str,
    now: datetime,
    actor: str,
    expected: Collection[SweepState] | None = None,
) -> bool:
    """Changes the state with an event; False when it was that already or is none of ``expected``."""
    raise NotImplementedError


def set_next_run(conn: sa.Connection, sweep_id: str, next_run_at: datetime | None) -> None:
    """When the schedule fires next."""
    raise NotImplementedError


def trials_of(conn: sa.Connection, sweep_id: str) -> list[SweepTrial]:
    """All trials of the sweep by number."""
    raise NotImplementedError


def device_seconds(conn: sa.Connection, sweep_id: str, now: datetime) -> float:
    """Leased device-seconds so far."""
    raise NotImplementedError
