"""The end of an attempt: evidence in, one transaction out.

Whoever learns that an attempt is over (the spool endpoint with the exit event, a node's report, the scheduler with an
expired lease) calls :func:`conclude` inside a store write. The first one decides; for the others nothing is left to do.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from overnight.core.enums import DeviceState, DirectiveAction, Outcome, TrialState
from overnight.core.models.api import Attempt, TrialError
from overnight.core.models.node import Ended, LaunchFailed
from overnight.core.models.spec import TrialConfig
from overnight.core.states import state_after
from overnight.platform.outcome import Exit, ObjectiveState, decide_outcome
from overnight.store import attempts, devices, metrics, trials

if TYPE_CHECKING:
    from overnight.store.engine import Connection

__all__ = ["Exit", "ObjectiveState", "conclude", "conclude_ended", "conclude_unlaunched", "decide_outcome"]

BACKOFF_SECONDS = 1.0
BACKOFF_FACTOR = 4.0
MAX_BACKOFF_SECONDS = 120.0


def backoff_seconds(retries_used: int) -> float:
    """How long an infrastructure fault keeps a trial back: 1, 4, 16, 64, 120 … seconds."""
    return min(BACKOFF_SECONDS * BACKOFF_FACTOR ** min(retries_used, 10), MAX_BACKOFF_SECONDS)


def conclude(
    conn: "Connection", *, attempt_id: str, now: datetime, vanished: str = "", actor: str = "server"
) -> Outcome | None:
    """Ends an attempt from what is known about it, and moves its trial; the lease becomes ``releasing``.

    Args:
        conn: Of a store write.
        attempt_id: The attempt.
        now: Wall time, for the record.
        vanished: Why it is believed to be gone, when there is no exit event: the outcome is then ``vanished`` unless
            a device was condemned or a stop was under way. An exit event, if there is one, counts instead.
        actor: Who found out.

    Returns:
        The outcome; None if the attempt had ended before, or there is neither an exit event nor ``vanished``.

    Raises:
        NotFoundError: No such attempt.
    """
    directive = attempts.standing_directive(conn, attempt_id)
    if directive is None:
        return None
    data = attempts.exit_report(conn, attempt_id)
    if data is None and not vanished:
        return None
    attempt = attempts.get(conn, attempt_id)
    exit = None if data is None else Exit.parse(data)
    reading = _read_objective(conn, attempt.trial_id)
    outcome, cause = decide_outcome(exit, directive, _verdicts(conn, attempt), reading)
    if outcome is Outcome.VANISHED and vanished:
        cause = vanished
    stopping = directive.action is DirectiveAction.STOP
    _end(conn, attempt, outcome, cause, now, actor, exit or Exit(), stopping=stopping)
    return outcome


def conclude_ended(conn: "Connection", *, ended: Ended, now: datetime, actor: str) -> Outcome | None:
    """A node says that no process of the attempt is left: it ends if it had not, and its lease is clean."""
    cause = ended.cause or "its supervisor ended without a report"
    outcome = conclude(conn, attempt_id=ended.attempt_id, now=now, vanished=cause, actor=actor)
    attempts.clean(conn, attempt_id=ended.attempt_id, now=now)
    return outcome


def conclude_unlaunched(conn: "Connection", *, failed: LaunchFailed, now: datetime, actor: str) -> Outcome | None:
    """A launch that could not be made. Nothing was started, so its lease is clean at once."""
    attempt = attempts.get(conn, failed.attempt_id)
    outcome = None
    if attempt.ended_at is None:
        cause = f"{failed.type}: {failed.message}"
        error = TrialError(type=failed.type, message=failed.message)
        stopping = attempts.directive(conn, attempt.id).action is DirectiveAction.STOP
        outcome = Outcome.USER_ERROR if failed.user else Outcome.INFRA_FAULT
        _end(conn, attempt, outcome, cause, now, actor, Exit(error=error), stopping=stopping)
    attempts.clean(conn, attempt_id=attempt.id, now=now)
    return outcome


def _end(
    conn: "Connection",
    attempt: Attempt,
    outcome: Outcome,
    cause: str,
    now: datetime,
    actor: str,
    exit: Exit,
    *,
    stopping: bool,
) -> None:
    row = trials.row(conn, attempt.trial_id)
    config = TrialConfig.model_validate(row.config)
    after = state_after(outcome, may_retry=row.retries_used < config.max_retries, stopping=stopping)
    fault = outcome in (Outcome.INFRA_FAULT, Outcome.VANISHED)
    if fault and after is TrialState.FAILED:
        cause = f"{cause}; given up after {row.retries_used} retries without progress"
    retry = fault and after is TrialState.QUEUED
    attempts.end(
        conn,
        attempt_id=attempt.id,
        outcome=outcome,
        cause=cause,
        now=now,
        next_state=after,
        exit_codes=exit.exit_codes,
        error=_error(outcome, cause, exit),
        not_before=now + timedelta(seconds=backoff_seconds(row.retries_used)) if retry else None,
        actor=actor,
    )


def _error(outcome: Outcome, cause: str, exit: Exit) -> TrialError | None:
    """What ``show`` tells of a failure, with the last lines of the output even when no exception was reported."""
    if outcome in (Outcome.COMPLETED, Outcome.PRUNED, Outcome.CANCELLED, Outcome.PREEMPTED):
        return None
    if exit.error is not None:
        return exit.error.model_copy(update={"last_lines": exit.last_lines})
    return TrialError(type=outcome.value, message=cause, last_lines=exit.last_lines)


def _read_objective(conn: "Connection", trial_id: str) -> ObjectiveState:
    objective = trials.objective(conn, trial_id)
    if objective is None:
        return ObjectiveState()
    reading = metrics.reduce(conn, trial_id, objective)
    bad = (reading.text or "not a number") if reading.reported and reading.value is None else None
    return ObjectiveState.of(objective, reading.value, bad)


def _verdicts(conn: "Connection", attempt: Attempt) -> Sequence[str]:
    """One text per device of the lease that was condemned while the attempt ran."""
    found = (devices.get(conn, device_id) for device_id in attempt.devices)
    return [
        f"{device.id} was quarantined while it ran: {device.cause}"
        for device in found
        if device.state is DeviceState.QUARANTINED and device.since is not None and device.since >= attempt.created_at
    ]
