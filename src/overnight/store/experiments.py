"""Experiments: a name, an objective, and the counter that numbers trials."""

from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from overnight.core.ids import IdFactory
from overnight.core.models.api import Experiment
from overnight.core.models.spec import Objective


@dataclass(frozen=True)
class ExperimentRow:
    """An experiment without what is counted from its trials."""

    id: str
    name: str
    objective: Objective | None
    description: str
    mlflow_experiment_id: str | None
    created_at: datetime


def ensure(
    conn: sa.Connection,
    ids: IdFactory,
    now: datetime,
    name: str,
    objective: Objective | None = None,
    description: str = "",
    actor: str = "system",
) -> ExperimentRow:
    """The experiment of that name, made if it is new. An objective is set once.

    Raises:
        ConflictError: The experiment has another objective (metric, mode or reduce).
    """
    raise NotImplementedError


def get(conn: sa.Connection, ref: str) -> ExperimentRow:
    """By name or id. Raises NotFoundError."""
    raise NotImplementedError


def to_wire(conn: sa.Connection, row: ExperimentRow) -> Experiment:
    """With counts by state and the best trial."""
    raise NotImplementedError


def list_(conn: sa.Connection) -> list[Experiment]:
    """All of them, newest first."""
    raise NotImplementedError


def set_mlflow_id(conn: sa.Connection, experiment_id: str, mlflow_experiment_id: str) -> None:
    """Records the MLflow experiment."""
    raise NotImplementedError
