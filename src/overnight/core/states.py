"""The trial's state machine as data: one table that the store enforces and the docs show."""

from typing import Final

from overnight.core.enums import Outcome, TrialState

S = TrialState

END_STATES: Final = frozenset({S.COMPLETED, S.PRUNED, S.FAILED, S.CANCELLED})
"""States in which a trial stays until a person or planner extends or reruns it."""

LIVE_STATES: Final = frozenset({S.STARTING, S.RUNNING, S.YIELDING, S.STOPPING})
"""States in which the trial has a current attempt."""

_ENDS = set(END_STATES)

TRIAL_EDGES: Final[dict[TrialState, frozenset[TrialState]]] = {
    S.HELD: frozenset({S.QUEUED, S.CANCELLED}),
    S.QUEUED: frozenset({S.HELD, S.STARTING, S.CANCELLED, S.PRUNED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.YIELDING, S.STOPPING, S.QUEUED} | _ENDS),
    S.RUNNING: frozenset({S.YIELDING, S.STOPPING, S.QUEUED} | _ENDS),
    S.YIELDING: frozenset({S.QUEUED, S.STOPPING} | _ENDS),
    S.STOPPING: frozenset({S.QUEUED} | _ENDS),
    S.COMPLETED: frozenset({S.QUEUED}),
    S.PRUNED: frozenset({S.QUEUED}),
    S.FAILED: frozenset({S.QUEUED}),
    S.CANCELLED: frozenset({S.QUEUED}),
}
"""Allowed edges. STOPPING to QUEUED exists for the infrastructure fault that beats a prune whose reason has gone."""


def can_transition(before: TrialState, after: TrialState) -> bool:
    """Whether the edge exists."""
    return after in TRIAL_EDGES[before]


def state_after(outcome: Outcome, *, may_retry: bool, stopping: bool = False) -> TrialState:
    """The trial's next state when its attempt has ended.

    Args:
        outcome: How the attempt ended.
        may_retry: Whether the retry budget for infrastructure faults has something left.
        stopping: The trial was being stopped (prune or cancel) when the attempt ended of itself or by a fault;
            the stop's own outcome (pruned or cancelled) is then what the caller passes, never a retry.
    """
    match outcome:
        case Outcome.COMPLETED:
            return S.COMPLETED
        case Outcome.PRUNED:
            return S.PRUNED
        case Outcome.CANCELLED:
            return S.CANCELLED
        case Outcome.PREEMPTED:
            return S.QUEUED
        case Outcome.USER_ERROR | Outcome.OUT_OF_MEMORY:
            return S.FAILED
        case Outcome.INFRA_FAULT | Outcome.VANISHED:
            if stopping:
                return S.CANCELLED
            return S.QUEUED if may_retry else S.FAILED
