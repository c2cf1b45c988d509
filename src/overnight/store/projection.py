"""What the outbox needs to know of a trial besides its rows, in few queries for many trials and from one snapshot."""

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import TrialState
from overnight.store.lineages import Token
from overnight.store.lineages import tokens as lineage
from overnight.store.models import checkpoints, experiments, trials


@dataclass(frozen=True)
class TrialFacts:
    """A trial as MLflow shall see it.

    Attributes:
        tokens: The lineage, oldest first; what lies outside it does not count.
        committed: Newest committed step by (attempt, generation): no later start can fork before it, unless that
            checkpoint turns out to be unreadable.
    """

    id: str
    name: str
    experiment_id: str
    experiment: str
    mlflow_experiment_id: str | None
    mlflow_run_id: str | None
    state: TrialState
    attempts_made: int
    params: dict[str, Any]
    config: dict[str, Any]
    sweep_id: str | None
    created_at: datetime
    ended_at: datetime | None
    tokens: tuple[Token, ...] = ()
    committed: dict[tuple[int, int], int] = field(default_factory=dict)


def facts(conn: sa.Connection, trial_ids: Collection[str]) -> dict[str, TrialFacts]:
    """Facts by trial id; a trial that does not exist is left out."""
    if not trial_ids:
        return {}
    commits: dict[str, dict[tuple[int, int], int]] = {}
    for row in conn.execute(
        sa.select(
            checkpoints.c.trial_id,
            checkpoints.c.attempt,
            checkpoints.c.generation,
            sa.func.max(checkpoints.c.step).label("step"),
        )
        .where(checkpoints.c.trial_id.in_(trial_ids))
        .group_by(checkpoints.c.trial_id, checkpoints.c.attempt, checkpoints.c.generation)
    ):
        commits.setdefault(row.trial_id, {})[row.attempt, row.generation] = row.step
    query = (
        sa.select(trials, experiments.c.name.label("experiment"), experiments.c.mlflow_experiment_id)
        .join(experiments, experiments.c.id == trials.c.experiment_id)
        .where(trials.c.id.in_(trial_ids))
    )
    return {
        row.id: TrialFacts(
            id=row.id,
            name=row.name,
            experiment_id=row.experiment_id,
            experiment=row.experiment,
            mlflow_experiment_id=row.mlflow_experiment_id,
            mlflow_run_id=row.mlflow_run_id,
            state=TrialState(row.state),
            attempts_made=row.attempts_made,
            params=row.params,
            config=row.config,
            sweep_id=row.sweep_id,
            created_at=row.created_at,
            ended_at=row.ended_at,
            tokens=tuple(lineage(conn, row.id)),
            committed=commits.get(row.id, {}),
        )
        for row in conn.execute(query).all()
    }
