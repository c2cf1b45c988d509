"""Sweeps: what is searched, how far it is, and what planners need to know of their trials."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.canonical import canonical_json
from overnight.core.enums import SweepState, TrialState
from overnight.core.errors import NotFoundError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Sweep, SweepIn
from overnight.core.models.spec import SweepConfig, TrialConfig
from overnight.store import events, experiments, models
from overnight.store.events import NewEvent
from overnight.store.idempotency import fingerprint, key_reused
from overnight.store.models import storable
from overnight.store.writer import touch

_TABLE = models.sweeps
_ENDS = frozenset({SweepState.FINISHED, SweepState.STOPPED, SweepState.BROKEN})


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
    conn: sa.Connection,
    *,
    ids: IdFactory,
    now: datetime,
    actor: str,
    sweep: SweepIn,
    parent_id: str | None = None,
) -> Sweep:
    """A new ACTIVE sweep. With a schedule it is a registration, whose runs are sweeps with it as ``parent_id``.

    Args:
        conn: Of a store write; whoever only rehearses (``dry_run``) rolls it back.
        ids: Makes the ids of the sweep and its experiment.
        now: Wall time, for the record.
        actor: Who asks; keys are their own.
        sweep: What is asked.
        parent_id: The registration whose schedule started it.

    Raises:
        KeyReusedError: The key came with another body; with the same one, the first answer is returned.
        ConflictError: The experiment has another objective.
        InvalidParamsError: A fixed param has no canonical form.
    """
    canonical_json(sweep.sweep.fixed)
    body_hash = fingerprint(sweep)
    if sweep.key is not None:
        where = (_TABLE.c.actor == storable(actor, 200)) & (_TABLE.c.key == sweep.key)
        before = conn.execute(sa.select(_TABLE).where(where)).one_or_none()
        if before is not None and before.body_hash != body_hash:
            raise key_reused(sweep.key)
        if before is not None:
            return _to_wire(conn, [before])[0]
    config = sweep.config
    experiment = experiments.ensure(conn, ids, now, config.experiment, config.objective, actor=actor)
    sweep_id = ids("sweep")
    values = {
        "id": sweep_id,
        "experiment_id": experiment.id,
        "parent_id": parent_id,
        "actor": storable(actor, 200),
        "key": sweep.key,
        "body_hash": body_hash,
        "config": config.model_dump(mode="json"),
        "sweep": sweep.sweep.model_dump(mode="json"),
        "schedule": None if sweep.schedule is None else sweep.schedule.model_dump(mode="json"),
        "state": SweepState.ACTIVE.value,
        "cause": "",
        "created_at": now,
    }
    conn.execute(sa.insert(_TABLE), values)
    event = NewEvent("sweep.state", sweep_id, actor, "", after=SweepState.ACTIVE.value, data={"parent": parent_id})
    events.append(conn, now, event)
    touch(conn, "sweeps", f"sweep:{sweep_id}")
    return get(conn, sweep_id)


def get(conn: sa.Connection, sweep_id: str) -> Sweep:
    """By id.

    Raises:
        NotFoundError: There is none.
    """
    return _to_wire(conn, [_row(conn, sweep_id)])[0]


def _row(conn: sa.Connection, sweep_id: str) -> sa.Row[Any]:
    row = conn.execute(sa.select(_TABLE).where(_TABLE.c.id == storable(sweep_id))).one_or_none()
    if row is None:
        raise no_sweep(sweep_id)
    return row


def list_(
    conn: sa.Connection,
    *,
    states: Collection[SweepState] | None = None,
    experiment_id: str | None = None,
    parent_id: str | None = None,
) -> list[Sweep]:
    """Newest first."""
    query = sa.select(_TABLE).order_by(_TABLE.c.created_at.desc(), _TABLE.c.id.desc())
    if states is not None:
        query = query.where(_TABLE.c.state.in_([state.value for state in states]))
    if experiment_id is not None:
        query = query.where(_TABLE.c.experiment_id == experiment_id)
    if parent_id is not None:
        query = query.where(_TABLE.c.parent_id == parent_id)
    return _to_wire(conn, conn.execute(query).all())


def _to_wire(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Sweep]:
    counts = _counts(conn, [row.id for row in rows])
    return [_wire(conn, row, counts.get(row.id, {})) for row in rows]


def _wire(conn: sa.Connection, row: sa.Row[Any], counts: dict[TrialState, int]) -> Sweep:
    config = TrialConfig.model_validate(row.config)
    return Sweep(
        id=row.id,
        parent_id=row.parent_id,
        experiment=config.experiment,
        sweep=SweepConfig.model_validate(row.sweep),
        config=config,
        schedule=row.schedule,
        state=SweepState(row.state),
        cause=row.cause,
        proposed=row.proposed,
        trials_by_state=counts,
        best=experiments.best_of(conn, config.objective, sweep=row.id),
        created_at=row.created_at,
        next_run_at=row.next_run_at,
    )


def _counts(conn: sa.Connection, sweep_ids: Sequence[str]) -> dict[str, dict[TrialState, int]]:
    table = models.trials
    query = sa.select(table.c.sweep_id, table.c.state, sa.func.count().label("num"))
    query = query.where(table.c.sweep_id.in_(sweep_ids)).group_by(table.c.sweep_id, table.c.state)
    found: dict[str, dict[TrialState, int]] = {}
    for row in conn.execute(query):
        found.setdefault(row.sweep_id, {})[TrialState(row.state)] = row.num
    return found


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
    """Changes the state with an event; False when it was that already or is none of ``expected``.

    Raises:
        NotFoundError: There is none.
    """
    query = sa.select(_TABLE.c.state).where(_TABLE.c.id == storable(sweep_id)).with_for_update()
    found = conn.scalar(query)
    if found is None:
        raise no_sweep(sweep_id)
    before = SweepState(found)
    if before is state or (expected is not None and before not in expected):
        return False
    values = {"state": state.value, "cause": cause, "ended_at": now if state in _ENDS else None}
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == sweep_id).values(values))
    events.append(conn, now, NewEvent("sweep.state", sweep_id, actor, cause, before=before.value, after=state.value))
    touch(conn, "sweeps", f"sweep:{sweep_id}")
    return True


def no_sweep(sweep_id: str) -> NotFoundError:
    """What whoever asks for a sweep that does not exist is told."""
    return NotFoundError(f"there is no sweep {sweep_id[:200]!r}", hint="`overnight sweep --list` shows what there is.")


def set_next_run(conn: sa.Connection, sweep_id: str, next_run_at: datetime | None) -> None:
    """When the schedule fires next."""
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == sweep_id).values(next_run_at=next_run_at))
    touch(conn, "sweeps")


def trials_of(conn: sa.Connection, sweep_id: str) -> list[SweepTrial]:
    """All trials of the sweep in the order in which they were made."""
    table = models.trials
    columns = [table.c[name] for name in ("id", "name", "number", "params", "state", "value", "step", "ended_at")]
    query = sa.select(*columns).where(table.c.sweep_id == sweep_id).order_by(table.c.seq)
    return [SweepTrial(**{**row, "state": TrialState(row["state"])}) for row in conn.execute(query).mappings()]


def device_seconds(conn: sa.Connection, sweep_id: str, now: datetime) -> float:
    """Leased device-seconds so far; a lease counts until it is clean."""
    trials, attempts, leases, held = models.trials, models.attempts, models.leases, models.lease_devices
    query = (
        sa.select(leases.c.created_at, leases.c.clean_at)
        .select_from(held)
        .join(leases, leases.c.attempt_id == held.c.attempt_id)
        .join(attempts, attempts.c.id == leases.c.attempt_id)
        .join(trials, trials.c.id == attempts.c.trial_id)
        .where(trials.c.sweep_id == sweep_id)
    )
    spans = [(row.clean_at or now) - row.created_at for row in conn.execute(query)]
    return float(sum(max(0.0, span.total_seconds()) for span in spans))
