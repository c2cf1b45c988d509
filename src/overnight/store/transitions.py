"""The one function that changes a trial's state, and the helpers that people, planners and the scheduler call."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import TrialState


def transition(
    conn: sa.Connection,
    *,
    trial_id: str,
    expected: Collection[TrialState],
    after: TrialState,
    attempt: int | None = None,
    actor: str,
    cause: str,
    now: datetime,
    attempt_id: str | None = None,
    data: dict[str, Any] | None = None,
) -> TrialState:
    """Moves a trial along one edge and writes its event; returns the state before.

    Re-exported as ``trials.transition``.

    Args:
        expected: States in which the caller believes the trial to be.
        attempt: Number of the attempt that the caller speaks for; None speaks for no attempt.

    Raises:
        NotFoundError: No such trial.
        StaleAttemptError: It is in another state, or another attempt is current.
        IllegalTransitionError: The state machine has no such edge.
    """
    raise NotImplementedError


def cancel(
    conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime, grace_seconds: float = 30.0
) -> TrialState:
    """HELD or QUEUED becomes CANCELLED; a live trial STOPPING with a ``stop`` directive. Returns the state now.

    Already CANCELLED or being cancelled: no change. Raises IllegalTransitionError when it has ended otherwise.
    """
    raise NotImplementedError


def prune(
    conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime, grace_seconds: float = 30.0
) -> TrialState:
    """:func:`cancel` on a pruner's behalf: PRUNED, directive reason ``pruned``."""
    raise NotImplementedError


def preempt(
    conn: sa.Connection,
    *,
    trial_id: str,
    attempt: int,
    actor: str,
    cause: str,
    now: datetime,
    grace_seconds: float = 30.0,
    reason: str = "preempted",
) -> None:
    """RUNNING or STARTING becomes YIELDING with a ``yield`` directive. Raises StaleAttemptError."""
    raise NotImplementedError


def hold(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> TrialState:
    """QUEUED to HELD; HELD stays. Raises IllegalTransitionError otherwise."""
    raise NotImplementedError


def unhold(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> TrialState:
    """HELD to QUEUED at its old place; QUEUED stays. Raises IllegalTransitionError otherwise."""
    raise NotImplementedError


def bump(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> int:
    """Before all others of its class: its rank becomes one more than the highest queued. Returns the rank."""
    raise NotImplementedError


def rerun(conn: sa.Connection, *, trial_id: str, actor: str, reason: str, now: datetime) -> TrialState:
    """An end state to QUEUED at the end of its class, retries restored. Raises IllegalTransitionError otherwise."""
    raise NotImplementedError
