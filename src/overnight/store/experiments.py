"""Experiments: a name, an objective, and the counter that numbers trials."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import Mode, TrialState
from overnight.core.errors import ConflictError, NotFoundError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Experiment, TrialBrief
from overnight.core.models.spec import Objective
from overnight.store import events, models
from overnight.store.events import NewEvent
from overnight.store.models import storable
from overnight.store.upserts import upsert
from overnight.store.writer import touch

_TABLE = models.experiments
_LOCK = sa.select(_TABLE).where(_TABLE.c.name == sa.bindparam("wanted")).with_for_update()
_NUMBER = (
    sa.update(_TABLE)
    .where(_TABLE.c.id == sa.bindparam("experiment"))
    .values(trials_made=_TABLE.c.trials_made + sa.bindparam("num"))
    .returning(_TABLE.c.trials_made)
)


@dataclass(frozen=True)
class ExperimentRow:
    """An experiment without what is counted from its trials."""

    id: str
    name: str
    objective: Objective | None
    description: str
    mlflow_experiment_id: str | None
    created_at: datetime


def _from_row(row: sa.Row[Any]) -> ExperimentRow:
    return ExperimentRow(
        id=row.id,
        name=row.name,
        objective=None if row.objective is None else Objective.model_validate(row.objective),
        description=row.description,
        mlflow_experiment_id=row.mlflow_experiment_id,
        created_at=row.created_at,
    )


def is_comparable(left: Objective, right: Objective) -> bool:
    """Whether values of the two can stand in one leaderboard, wherever they are read from."""
    return (left.metric, left.mode, left.reduce) == (right.metric, right.mode, right.reduce)


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

    Until the transaction ends nobody else numbers trials of this experiment.

    Raises:
        ConflictError: The experiment has another objective (metric, mode or reduce).
    """
    found = lock(conn, name)
    if found is None:
        found = _create(conn, ids, now, name, objective, description, actor)
    if objective is None or found.objective == objective:
        return found
    if found.objective is None:
        dumped = objective.model_dump(mode="json")
        conn.execute(sa.update(_TABLE).where(_TABLE.c.id == found.id).values(objective=dumped))
        touch(conn, "experiments")
        return ExperimentRow(**{**found.__dict__, "objective": objective})
    if not is_comparable(found.objective, objective):
        raise other_objective(found, objective)
    return found


def other_objective(found: ExperimentRow, asked: Objective) -> ConflictError:
    """Why trials with another objective do not belong into an experiment."""
    has = found.objective or asked
    return ConflictError(
        f"experiment {found.name} has the objective {has.mode.value} {has.metric} ({has.reduce}), "
        f"not {asked.mode.value} {asked.metric} ({asked.reduce})",
        hint="Values of different objectives cannot be compared: give the experiment another name.",
    )


def lock(conn: sa.Connection, name: str) -> ExperimentRow | None:
    """The experiment of that name, locked until the transaction ends; None if there is none."""
    row = conn.execute(_LOCK, {"wanted": name}).one_or_none()
    return None if row is None else _from_row(row)


def _create(
    conn: sa.Connection,
    ids: IdFactory,
    now: datetime,
    name: str,
    objective: Objective | None,
    description: str,
    actor: str,
) -> ExperimentRow:
    values = {
        "id": ids("experiment"),
        "name": name,
        "objective": None if objective is None else objective.model_dump(mode="json"),
        "description": description,
        "created_at": now,
    }
    statement = upsert(conn, _TABLE).on_conflict_do_nothing(index_elements=["name"]).returning(_TABLE.c.id)
    made = conn.scalar(statement, values) is not None
    found = lock(conn, name)
    if found is None:
        raise NotFoundError(f"experiment {name} was removed while it was made")
    if made:
        events.append(conn, now, NewEvent("experiment.created", name, actor, description[:200]))
        touch(conn, "experiments")
    return found


def number_trials(conn: sa.Connection, experiment_id: str, num: int) -> int:
    """Takes ``num`` trial numbers and returns the first."""
    last: int = conn.execute(_NUMBER, {"experiment": experiment_id, "num": num}).scalar_one()
    return last - num + 1


def get(conn: sa.Connection, ref: str) -> ExperimentRow:
    """By name or id.

    Raises:
        NotFoundError: There is none.
    """
    known = storable(ref)
    query = sa.select(_TABLE).where((_TABLE.c.name == known) | (_TABLE.c.id == known))
    row = conn.execute(query.limit(1)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no experiment {ref[:200]!r}", hint="`overnight ls` shows what there is.")
    return _from_row(row)


def to_wire(conn: sa.Connection, row: ExperimentRow) -> Experiment:
    """With counts by state and the best trial."""
    return _to_wire(conn, [row])[0]


def list_(conn: sa.Connection) -> list[Experiment]:
    """All of them, newest first."""
    query = sa.select(_TABLE).order_by(_TABLE.c.created_at.desc(), _TABLE.c.id.desc())
    return _to_wire(conn, [_from_row(row) for row in conn.execute(query)])


def _to_wire(conn: sa.Connection, rows: Collection[ExperimentRow]) -> list[Experiment]:
    counts = _counts(conn, [row.id for row in rows])
    return [
        Experiment(
            **row.__dict__, trials_by_state=counts.get(row.id, {}), best=best_of(conn, row.objective, experiment=row.id)
        )
        for row in rows
    ]


def _counts(conn: sa.Connection, ids: list[str]) -> dict[str, dict[TrialState, int]]:
    table = models.trials
    query = (
        sa.select(table.c.experiment_id, table.c.state, sa.func.count().label("num"))
        .where(table.c.experiment_id.in_(ids))
        .group_by(table.c.experiment_id, table.c.state)
    )
    found: dict[str, dict[TrialState, int]] = {}
    for row in conn.execute(query):
        found.setdefault(row.experiment_id, {})[TrialState(row.state)] = row.num
    return found


def best_of(
    conn: sa.Connection, objective: Objective | None, *, experiment: str | None = None, sweep: str | None = None
) -> TrialBrief | None:
    """The trial with the best value of an experiment or a sweep, by ids."""
    if objective is None:
        return None
    table = models.trials
    order = table.c.value.asc() if objective.mode is Mode.MIN else table.c.value.desc()
    query = sa.select(table.c.id, table.c.name, table.c.params, table.c.value).where(table.c.value.is_not(None))
    query = query.where(table.c.experiment_id == experiment) if experiment else query.where(table.c.sweep_id == sweep)
    row = conn.execute(query.order_by(order, table.c.seq).limit(1)).one_or_none()
    return None if row is None else TrialBrief(id=row.id, name=row.name, params=row.params, value=row.value)


def set_mlflow_id(conn: sa.Connection, experiment_id: str, mlflow_experiment_id: str) -> None:
    """Records the MLflow experiment."""
    values = {"mlflow_experiment_id": mlflow_experiment_id}
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == experiment_id).values(values))
    touch(conn, "experiments")
