"""Which metrics MLflow may hear now: its history cannot be taken back, so a step is told once it cannot be lost.

A resumed trial repeats the steps after the checkpoint from which it forked. Told too early, they would stand in MLflow
twice. So a step waits until a commit covers it, its trial ends, or the fork is known; and while the trial runs well it
waits no longer than the patience, since people watch curves.
"""

from enum import Enum

from overnight.core.enums import TrialState
from overnight.core.states import END_STATES
from overnight.store.lineages import NOTHING
from overnight.store.projection import TrialFacts

_AT_WORK = frozenset({TrialState.RUNNING, TrialState.YIELDING, TrialState.STOPPING})


class Verdict(Enum):
    """What to do with a step."""

    TELL = "tell"
    HOLD = "hold"
    DROP = "drop"


def judge(facts: TrialFacts, attempt: int, generation: int, step: int, *, patient: bool) -> Verdict:
    """Whether a step of (attempt, generation) counts, may still be lost, or does not count.

    Args:
        facts: The trial, from the same snapshot as the metric.
        attempt: Number of the attempt that measured it.
        generation: Its generation.
        step: The step.
        patient: Whether it has not waited for long.
    """
    newest = (facts.tokens[-1].attempt, facts.tokens[-1].generation) if facts.tokens else (0, 0)
    token = next((t for t in facts.tokens if (t.attempt, t.generation) == (attempt, generation)), None)
    if token is None and (attempt, generation) < newest:
        return Verdict.DROP
    waits = patient or facts.state not in _AT_WORK
    if token is not None and token.until_step is not None:
        if step <= token.until_step:
            return Verdict.TELL
        return Verdict.HOLD if waits and _may_turn(facts, attempt, generation) else Verdict.DROP
    if facts.state in END_STATES or step <= facts.committed.get((attempt, generation), -1):
        return Verdict.TELL
    if (attempt, generation) < newest:  # a later start has not said yet where it forks
        return Verdict.HOLD
    return Verdict.HOLD if waits else Verdict.TELL


def _may_turn(facts: TrialFacts, attempt: int, generation: int) -> bool:
    """Whether a later start may yet go on behind this token's fork, and from what it did there.

    As long as no start after it has committed, a checkpoint that the token published at the last moment, or one that
    proves to be readable after all, may become the parent of the next start.
    """
    if facts.state in END_STATES or facts.tokens[-1].parent is None:
        return False
    line = [(token.attempt, token.generation) for token in facts.tokens if token.until_step != NOTHING]
    return not any(token > (attempt, generation) and token in facts.committed for token in line)


def has_forked(facts: TrialFacts, attempt: int, generation: int) -> bool:
    """Whether this token continues an earlier one, so that MLflow may have heard of its steps before."""
    return bool(facts.tokens) and (attempt, generation) > (facts.tokens[0].attempt, facts.tokens[0].generation)
