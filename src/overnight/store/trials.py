"""Trials: lookups, lists, the queue's order, and the wire form."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import PriorityClass, TrialState
from overnight.core.models.api import Leaderboard, Page, Trial
from overnight.core.models.spec import Compute, Objective, Resume


@dataclass(frozen=True)
class TrialFilter:
    """Which trials; None is all. ``experiment`` is a name or id."""

    experiment: str | None = None
    sweep: str | None = None
    states: Collection[TrialState] | None = None


@dataclass(frozen=True)
class SchedTrial:
    """What the scheduler knows of a trial: HELD ones and those in an end state are not its business."""

    id: str
    name: str
    experiment: str
    sweep_id: str | None
    state: TrialState
    priority: PriorityClass
    rank: int
    place: int
    not_before: datetime | None
    compute: Compute
    resume: Resume | None
    is_trainer: bool
    max_retries: int
    retries_used: int
    attempts_made: int
    preemptions: int
    step: int
    last_commit_step: int | None
    last_commit_at: datetime | None
    started_at: datetime | None


def row(conn: sa.Connection, ref: str) -> sa.Row[Any]:
    """The table row by id or name. Raises NotFoundError."""
    raise NotImplementedError


def get(conn: sa.Connection, ref: str) -> Trial:
    """By id or name, with attempts, checkpoints, devices and queue position. Raises NotFoundError."""
    raise NotImplementedError


def find(conn: sa.Connection, refs: Sequence[str]) -> list[Trial]:
    """Several by id or name, without attempts and checkpoints, in the order of ``refs``. Raises NotFoundError."""
    raise NotImplementedError


def page(conn: sa.Connection, filters: TrialFilter, cursor: str | None = None, limit: int = 100) -> Page:
    """Newest first, without attempts and checkpoints."""
    raise NotImplementedError


def to_wire(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Trial]:
    """Table rows as wire models: name of the experiment and leased devices filled in, nothing else."""
    raise NotImplementedError


def queue(conn: sa.Connection, limit: int = 100) -> list[Trial]:
    """QUEUED trials in the order in which they would start, with ``position``."""
    raise NotImplementedError


def schedulable(conn: sa.Connection, trial_ids: Collection[str] | None = None) -> list[SchedTrial]:
    """QUEUED and live trials in queue order (all, or those of ``trial_ids`` which still are)."""
    raise NotImplementedError


def counts(
    conn: sa.Connection, *, experiment_id: str | None = None, sweep_id: str | None = None
) -> dict[TrialState, int]:
    """Trials by state; states without trials are left out."""
    raise NotImplementedError


def leaderboard(conn: sa.Connection, experiment_ref: str, limit: int = 20) -> Leaderboard:
    """Trials with a value, best first by the experiment's mode."""
    raise NotImplementedError


def objective(conn: sa.Connection, trial_id: str) -> Objective | None:
    """What the trial's config asks for."""
    raise NotImplementedError


def set_mlflow_run(conn: sa.Connection, trial_id: str, run_id: str) -> None:
    """Records the trial's MLflow run."""
    raise NotImplementedError


def set_progress(conn: sa.Connection, trial_id: str, step: int, phase: str | None = None) -> None:
    """The newest step heard of."""
    raise NotImplementedError


def set_value(conn: sa.Connection, trial_id: str, value: float | None) -> None:
    """The objective so far."""
    raise NotImplementedError
