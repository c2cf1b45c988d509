"""Attempts: begin with a lease in one transaction, end with an outcome, and what the supervisor is told between."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import DeviceState, LeaseState, Outcome, TrialState
from overnight.core.errors import ConflictError, NotFoundError, StaleAttemptError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Attempt, TrialError
from overnight.core.models.node import Directive
from overnight.core.states import END_STATES, LIVE_STATES
from overnight.store import events, ledger, lineages, models, transitions
from overnight.store.directives import INITIAL, directive, no_attempt, set_directive
from overnight.store.events import NewEvent
from overnight.store.models import storable
from overnight.store.writer import touch

__all__ = ["directive", "set_directive"]

_TABLE = models.attempts
_LEASES = models.leases
_HELD = models.lease_devices
_LEASABLE = frozenset({DeviceState.HEALTHY, DeviceState.SUSPECT, DeviceState.PROBATION})

# Built once, here and wherever a trial's start and end pass: building a statement costs as much as executing it.
_ONE = sa.select(_TABLE).where(_TABLE.c.id == sa.bindparam("which"))
_UPDATE = sa.update(_TABLE).where(_TABLE.c.id == sa.bindparam("which"))
_INSERT = sa.insert(_TABLE)
_INSERT_LEASE = sa.insert(_LEASES)
_INSERT_HELD = sa.insert(_HELD)
_OF_TRIAL = sa.select(_TABLE).where(_TABLE.c.trial_id == sa.bindparam("trial")).order_by(_TABLE.c.number)
_LEASE_STATES = sa.select(_LEASES.c.attempt_id, _LEASES.c.state).where(
    _LEASES.c.attempt_id.in_(sa.bindparam("attempts", expanding=True))
)
_DEVICES = (
    sa.select(_HELD.c.attempt_id, _HELD.c.device_id)
    .join(models.devices, models.devices.c.id == _HELD.c.device_id)
    .where(_HELD.c.attempt_id.in_(sa.bindparam("attempts", expanding=True)))
    .order_by(models.devices.c.node_id, models.devices.c.index)
)
_LIVE = (
    sa.select(_TABLE, _LEASES.c.state.label("lease_state"), _LEASES.c.heartbeat)
    .join(_LEASES, _LEASES.c.attempt_id == _TABLE.c.id)
    .where(_LEASES.c.state != LeaseState.CLEAN.value)
    .order_by(_TABLE.c.created_at, _TABLE.c.id)
)
_LIVE_ON_NODE = _LIVE.where(_TABLE.c.node_id == sa.bindparam("node"))
_STANDING = sa.select(_TABLE.c.ended_at, _TABLE.c.directive).where(_TABLE.c.id == sa.bindparam("which"))
_EXIT = sa.select(_TABLE.c.exit).where(_TABLE.c.id == sa.bindparam("which"))
_BEAT = (
    sa.update(_LEASES)
    .where(_LEASES.c.attempt_id == sa.bindparam("which"))
    .values(heartbeat=sa.bindparam("counter", type_=_LEASES.c.heartbeat.type))
)
_MOVE_LEASE = sa.update(_LEASES).where(
    _LEASES.c.attempt_id == sa.bindparam("which"), _LEASES.c.state.in_(sa.bindparam("before", expanding=True))
)
_FREE = sa.update(_HELD).where(_HELD.c.attempt_id == sa.bindparam("which")).values(clean=1).returning(_HELD.c.device_id)
_TO_LEASE = (
    sa.select(models.devices.c.id, models.devices.c.node_id, models.devices.c.state, models.devices.c.cause)
    .where(models.devices.c.id.in_(sa.bindparam("devices", expanding=True)))
    .with_for_update()
)


@dataclass(frozen=True)
class LiveAttempt:
    """An attempt that has not ended, or whose lease is not clean yet."""

    id: str
    trial_id: str
    number: int
    generation: int
    node_id: str
    device_ids: tuple[str, ...]
    lease_state: LeaseState
    heartbeat: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    outcome: Outcome | None
    directive: Directive
    acked: int


def begin(
    conn: sa.Connection,
    *,
    ids: IdFactory,
    now: datetime,
    trial_id: str,
    expected_attempt: int,
    node_id: str,
    device_ids: Sequence[str],
    cause: str,
    actor: str = "scheduler",
) -> Attempt:
    """Attempt row n, lease, trial STARTING and event in one go: intent before any process is started.

    Args:
        conn: Of a store write.
        ids: Makes the attempt's id.
        now: Wall time, for the record.
        trial_id: The trial.
        expected_attempt: ``attempts_made`` as the caller saw it; the new attempt's number is one more.
        node_id: Where it runs.
        device_ids: What it gets; at least one.
        cause: Why now and why there.
        actor: Who decided.

    Raises:
        StaleAttemptError: The trial is not QUEUED any more or has another attempt number.
        ConflictError: A device is leased, or not in a state to be leased.
        NotFoundError: No such trial, node or device.
    """
    attempt = _new(ids("attempt"), trial_id, expected_attempt + 1, node_id, device_ids, now)
    _start_trial(conn, attempt, actor, cause)
    _require_leasable(conn, node_id, device_ids)
    _insert(conn, attempt)
    _lease(conn, attempt.id, device_ids)
    touch(conn, "attempts", "devices", f"attempt:{attempt.id}", f"node:{node_id}")
    return attempt


def _new(
    attempt_id: str, trial_id: str, number: int, node_id: str, device_ids: Sequence[str], now: datetime
) -> Attempt:
    return Attempt(
        id=attempt_id,
        trial_id=trial_id,
        number=number,
        generation=1,
        node_id=node_id,
        devices=tuple(device_ids),
        lease_state=LeaseState.ACTIVE,
        created_at=now,
        started_at=None,
        ended_at=None,
        outcome=None,
    )


def _start_trial(conn: sa.Connection, attempt: Attempt, actor: str, cause: str) -> None:
    """Whoever began an attempt of this number before has moved the trial on, so that it is begun once."""
    transitions.transition(
        conn,
        trial_id=attempt.trial_id,
        expected={TrialState.QUEUED},
        after=TrialState.STARTING,
        attempt=attempt.number - 1,
        actor=actor,
        cause=cause,
        now=attempt.created_at,
        attempt_id=attempt.id,
        data={"attempt": attempt.number, "devices": list(attempt.devices)},
        changes={"attempts_made": attempt.number},
    )


def _insert(conn: sa.Connection, attempt: Attempt) -> None:
    values = {
        "id": attempt.id,
        "trial_id": attempt.trial_id,
        "number": attempt.number,
        "generation": attempt.generation,
        "node_id": attempt.node_id,
        "created_at": attempt.created_at,
        "cause": attempt.cause,
        "exit_codes": [],
        "directive": INITIAL,
    }
    conn.execute(_INSERT, values)
    lease = {"attempt_id": attempt.id, "state": LeaseState.ACTIVE.value, "created_at": attempt.created_at}
    conn.execute(_INSERT_LEASE, lease)


def _require_leasable(conn: sa.Connection, node_id: str, device_ids: Sequence[str]) -> None:
    if not device_ids or len(set(device_ids)) != len(device_ids):
        raise ConflictError(f"an attempt needs distinct devices, not {list(device_ids)}")
    found = {row.id: row for row in conn.execute(_TO_LEASE, {"devices": list(device_ids)})}
    for device_id in device_ids:
        device = found.get(device_id)
        if device is None or device.node_id != node_id:
            raise NotFoundError(f"node {node_id} has no device {device_id!r}")
        if DeviceState(device.state) not in _LEASABLE:
            raise ConflictError(f"device {device_id} is {device.state}: {device.cause}", device=device_id)


def _lease(conn: sa.Connection, attempt_id: str, device_ids: Sequence[str]) -> None:
    rows = [{"attempt_id": attempt_id, "device_id": device_id, "clean": 0} for device_id in device_ids]
    try:
        conn.execute(_INSERT_HELD, rows)
    except sa.exc.IntegrityError as error:
        raise ConflictError(
            f"one of {', '.join(device_ids)} is leased to another attempt", devices=list(device_ids)
        ) from error


def end(
    conn: sa.Connection,
    *,
    attempt_id: str,
    outcome: Outcome,
    cause: str,
    now: datetime,
    next_state: TrialState,
    exit_codes: Sequence[int | None] = (),
    error: TrialError | None = None,
    not_before: datetime | None = None,
    actor: str = "server",
) -> None:
    """Closes the attempt, moves the trial, counts retries and pre-emptions, lease active -> releasing.

    Args:
        conn: Of a store write.
        attempt_id: The attempt.
        outcome: How it ended.
        cause: Why, for people.
        now: Wall time, for the record.
        next_state: Where its trial goes.
        exit_codes: Per rank; negative is a signal, None unknown.
        error: What ``show`` tells of a failure.
        not_before: Until when a requeued trial waits.
        actor: Who found out.

    Raises:
        NotFoundError: No such attempt.
        StaleAttemptError: Already ended, or no longer the trial's current attempt.
    """
    row = _row(conn, attempt_id)
    if row.ended_at is not None:
        raise StaleAttemptError(f"attempt {attempt_id} has ended before ({row.outcome})", attempt=attempt_id)
    dumped = None if error is None else error.model_dump(mode="json")
    transitions.transition(
        conn,
        trial_id=row.trial_id,
        expected=LIVE_STATES,
        after=next_state,
        attempt=row.number,
        actor=actor,
        cause=cause,
        now=now,
        attempt_id=attempt_id,
        data={"outcome": outcome.value, "attempt": row.number},
        changes=_trial_changes(outcome, next_state, dumped, not_before),
    )
    values = {
        "ended_at": now,
        "outcome": outcome.value,
        "cause": cause,
        "exit_codes": list(exit_codes),
        "error": dumped,
    }
    conn.execute(_UPDATE, {"which": attempt_id, **values})
    release(conn, attempt_id=attempt_id, now=now)
    touch(conn, "attempts", f"attempt:{attempt_id}", f"node:{row.node_id}")


def _trial_changes(
    outcome: Outcome, next_state: TrialState, error: dict[str, Any] | None, not_before: datetime | None
) -> dict[str, Any]:
    table = models.trials
    changes: dict[str, Any] = {}
    if next_state is TrialState.QUEUED:
        changes["not_before"] = not_before
    elif next_state in END_STATES:
        changes["error"] = error
    if outcome is Outcome.PREEMPTED:
        changes["preemptions"] = table.c.preemptions + 1
    if outcome in {Outcome.INFRA_FAULT, Outcome.VANISHED} and next_state is TrialState.QUEUED:
        changes["retries_used"] = table.c.retries_used + 1
    return changes


def release(conn: sa.Connection, *, attempt_id: str, now: datetime) -> bool:
    """Lease active -> releasing; whether it changed."""
    return _set_lease(conn, attempt_id, {LeaseState.ACTIVE}, LeaseState.RELEASING, {"released_at": now})


def clean(conn: sa.Connection, *, attempt_id: str, now: datetime) -> bool:
    """Lease -> clean: its node has said that no process is left. Whether it changed.

    The attempt must have ended: whoever hears that its processes are gone ends it first, in the same write.

    Raises:
        ConflictError: The attempt has not ended.
    """
    row = _row(conn, attempt_id)
    if row.ended_at is None:
        raise ConflictError(f"attempt {attempt_id} has not ended; its lease cannot be clean", attempt=attempt_id)
    before = {LeaseState.ACTIVE, LeaseState.RELEASING}
    if not _set_lease(conn, attempt_id, before, LeaseState.CLEAN, {"clean_at": now}):
        return False
    freed = sorted(conn.scalars(_FREE, {"which": attempt_id}))
    event = NewEvent("lease.clean", attempt_id, "node", "", row.trial_id, attempt_id, data={"devices": freed})
    events.append(conn, now, event)
    return True


def _set_lease(
    conn: sa.Connection, attempt_id: str, before: set[LeaseState], after: LeaseState, values: dict[str, Any]
) -> bool:
    guard = {"which": attempt_id, "before": [state.value for state in before]}
    changed = conn.execute(_MOVE_LEASE, {**guard, "state": after.value, **values}).rowcount == 1
    if changed:
        touch(conn, "leases", "devices", f"attempt:{attempt_id}")
    return changed


def _row(conn: sa.Connection, attempt_id: str) -> sa.Row[Any]:
    row = conn.execute(_ONE, {"which": storable(attempt_id)}).one_or_none()
    if row is None:
        raise no_attempt(attempt_id)
    return row


def get(conn: sa.Connection, attempt_id: str) -> Attempt:
    """By id.

    Raises:
        NotFoundError: There is none.
    """
    return _to_wire(conn, [_row(conn, attempt_id)])[0]


def of_trial(conn: sa.Connection, trial_id: str) -> list[Attempt]:
    """Oldest first."""
    return _to_wire(conn, conn.execute(_OF_TRIAL, {"trial": trial_id}).all())


def _to_wire(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Attempt]:
    if not rows:
        return []
    found = [row.id for row in rows]
    held = _devices(conn, found)
    states = {row.attempt_id: row.state for row in conn.execute(_LEASE_STATES, {"attempts": found})}
    spent = ledger.of_attempts(conn, found)
    return [
        Attempt(
            id=row.id,
            trial_id=row.trial_id,
            number=row.number,
            generation=row.generation,
            node_id=row.node_id,
            devices=held.get(row.id, ()),
            lease_state=states.get(row.id),
            created_at=row.created_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            outcome=row.outcome,
            cause=row.cause,
            exit_codes=tuple(row.exit_codes),
            error=row.error,
            dir=row.dir,
            ledger=spent.get(row.id, {}),
        )
        for row in rows
    ]


def _devices(conn: sa.Connection, attempt_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for row in conn.execute(_DEVICES, {"attempts": list(attempt_ids)}):
        found[row.attempt_id] += (row.device_id,)
    return found


def live(conn: sa.Connection, node_id: str | None = None) -> list[LiveAttempt]:
    """Attempts that have not ended or whose lease is not clean, oldest first."""
    found = conn.execute(_LIVE) if node_id is None else conn.execute(_LIVE_ON_NODE, {"node": node_id})
    rows = found.all()
    held = _devices(conn, [row.id for row in rows]) if rows else {}
    return [
        LiveAttempt(
            id=row.id,
            trial_id=row.trial_id,
            number=row.number,
            generation=row.generation,
            node_id=row.node_id,
            device_ids=held.get(row.id, ()),
            lease_state=LeaseState(row.lease_state),
            heartbeat=row.heartbeat,
            created_at=row.created_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            outcome=None if row.outcome is None else Outcome(row.outcome),
            directive=Directive.model_validate(row.directive),
            acked=row.acked,
        )
        for row in rows
    ]


def seconds_of_trials(conn: sa.Connection, trial_ids: Sequence[str], now: datetime | None = None) -> dict[str, float]:
    """Running seconds per trial, over its attempts; those that still run count until ``now``, or not at all."""
    query = sa.select(_TABLE.c.trial_id, _TABLE.c.started_at, _TABLE.c.ended_at)
    query = query.where(_TABLE.c.trial_id.in_(trial_ids), _TABLE.c.started_at.is_not(None))
    found: dict[str, float] = defaultdict(float)
    for row in conn.execute(query):
        until = row.ended_at or now
        if until is not None:
            found[row.trial_id] += max(0.0, (until - row.started_at).total_seconds())
    return found


def advance_generation(
    conn: sa.Connection,
    *,
    attempt_id: str,
    generation: int,
    fork_step: int | None,
    now: datetime,
    parent: lineages.Parent | None = None,
) -> None:
    """A new start of the ranks inside the attempt.

    Args:
        conn: Of a store write.
        attempt_id: The attempt.
        generation: From 1. The current one again only adds a fork that was not known before.
        fork_step: Step of the checkpoint that it restored; 0 is from scratch, None not known (yet).
        now: Wall time, for the record.
        parent: Whose checkpoint that was, ``lineages.SCRATCH`` for none; None not known.

    Raises:
        NotFoundError: No such attempt.
        StaleAttemptError: ``generation`` is lower than the current one.
    """
    row = _row(conn, attempt_id)
    if generation < row.generation:
        raise StaleAttemptError(f"generation {generation} of {attempt_id} is over, {row.generation} is current")
    if generation > row.generation:
        conn.execute(_UPDATE, {"which": attempt_id, "generation": generation})
    lineages.record(conn, row.trial_id, row.number, generation, fork_step, now, parent)
    touch(conn, "attempts", f"attempt:{attempt_id}")


def exit_report(conn: sa.Connection, attempt_id: str) -> dict[str, Any] | None:
    """The data of the ``exit`` event, once it has been spooled."""
    found: dict[str, Any] | None = conn.scalar(_EXIT, {"which": attempt_id})
    return found


def standing_directive(conn: sa.Connection, attempt_id: str) -> Directive | None:
    """What an attempt that has not ended is told; None when it has.

    Raises:
        NotFoundError: No such attempt.
    """
    row = conn.execute(_STANDING, {"which": storable(attempt_id)}).one_or_none()
    if row is None:
        raise no_attempt(attempt_id)
    return Directive.model_validate(row.directive) if row.ended_at is None else None


def beat(conn: sa.Connection, attempt_id: str, counter: int) -> None:
    """Stores a heartbeat counter (the small lease row; the scheduler compares counters, never times)."""
    conn.execute(_BEAT, {"which": attempt_id, "counter": counter})
