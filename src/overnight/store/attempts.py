"""Attempts: begin with a lease in one transaction, end with an outcome, and what the supervisor is told between."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import DirectiveAction, LeaseState, Outcome, TrialState
from overnight.core.ids import IdFactory
from overnight.core.models.api import Attempt, TrialError
from overnight.core.models.node import Directive


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
        expected_attempt: ``attempts_made`` as the caller saw it; the new attempt's number is one more.

    Raises:
        StaleAttemptError: The trial is not QUEUED any more or has another attempt number.
        ConflictError: A device is leased, or not in a state to be leased.
        NotFoundError: No such trial, node or device.
    """
    raise NotImplementedError


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

    Raises:
        StaleAttemptError: Already ended, or no longer the trial's current attempt.
    """
    raise NotImplementedError


def release(conn: sa.Connection, *, attempt_id: str, now: datetime) -> bool:
    """Lease active -> releasing; whether it changed."""
    raise NotImplementedError


def clean(conn: sa.Connection, *, attempt_id: str, now: datetime) -> bool:
    """Lease -> clean: its node has said that no process is left. Whether it changed."""
    raise NotImplementedError


def get(conn: sa.Connection, attempt_id: str) -> Attempt:
    """Raises NotFoundError."""
    raise NotImplementedError


def of_trial(conn: sa.Connection, trial_id: str) -> list[Attempt]:
    """Oldest first."""
    raise NotImplementedError


def live(conn: sa.Connection, node_id: str | None = None) -> list[LiveAttempt]:
    """Attempts that have not ended or whose lease is not clean, oldest first."""
    raise NotImplementedError


def advance_generation(
    conn: sa.Connection, *, attempt_id: str, generation: int, fork_step: int | None, now: datetime
) -> None:
    """A new start of the ranks. Raises StaleAttemptError when ``generation`` is lower than the current one."""
    raise NotImplementedError


def set_directive(
    conn: sa.Connection, *, attempt_id: str, action: DirectiveAction, reason: str, grace_seconds: float = 30.0
) -> Directive:
    """Tells the attempt something else; the version rises. The same words again change nothing."""
    raise NotImplementedError


def directive(conn: sa.Connection, attempt_id: str) -> Directive:
    """What the attempt is told now. Raises NotFoundError."""
    raise NotImplementedError


def exit_report(conn: sa.Connection, attempt_id: str) -> dict[str, Any] | None:
    """The data of the ``exit`` event, once it has been spooled."""
    raise NotImplementedError


def set_dir(conn: sa.Connection, attempt_id: str, directory: str) -> None:
    """Where the attempt's files are."""
    raise NotImplementedError


def beat(conn: sa.Connection, attempt_id: str, counter: int) -> None:
    """Stores a heartbeat counter (the small lease row; the scheduler compares counters, never times)."""
    raise NotImplementedError
