"""How an attempt ended, decided from evidence alone.

A pure function, so that the table in docs/architecture.md ("Outcome of an attempt") can be tested row by row. An exit
code alone never decides: a directive that was given, a device that was condemned and what the ranks said come first.
"""

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overnight.core.enums import DirectiveAction, Outcome
from overnight.core.models.api import TrialError
from overnight.core.models.node import Directive
from overnight.core.models.spec import Objective

YIELD_EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h: "yielded", but only when somebody asked for it."""

MAX_LINES = 50
_OOM_TYPES = frozenset({"MemoryError", "OutOfMemoryError", "_ArrayMemoryError"})
_OOM_TEXT = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True)
class Exit:
    """A supervisor's last word, from its ``exit`` event.

    Attributes:
        exit_codes: Per rank; negative is a signal, None unknown.
        left: ``yield`` or ``stop`` when the ranks said so on leaving.
        saved: Whether they had saved before.
        killed: Why the supervisor killed them, else None.
        error: What the ranks reported before the exception left the run.
        last_lines: The end of rank 0's output.
        oom: The kernel killed a rank for memory.
        failed_rank: The rank whose failure came first, None if none failed or it is not known.
        error_rank: The rank that ``error`` is of, None if it is not known.
        out_of_time: Its supervisor stopped it at its own time limit.
    """

    exit_codes: tuple[int | None, ...] = ()
    left: str | None = None
    saved: bool = False
    killed: str | None = None
    error: TrialError | None = None
    last_lines: tuple[str, ...] = ()
    oom: bool = False
    failed_rank: int | None = None
    error_rank: int | None = None
    out_of_time: bool = False

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> "Exit":
        """Reads the event's data. What does not fit becomes unknown: the end of an attempt is never refused."""
        codes = data.get("exit_codes")
        last_lines = tuple(str(line)[:8192] for line in _list(data.get("last_lines"))[-MAX_LINES:])
        left, killed, told = data.get("left"), data.get("killed"), data.get("directive")
        return cls(
            exit_codes=tuple(code if _is_int(code) else None for code in _list(codes)),
            left=left if left in ("yield", "stop") else None,
            saved=bool(data.get("saved")),
            killed=str(killed) if killed else None,
            error=_error(data.get("error"), last_lines),
            last_lines=last_lines,
            oom=bool(data.get("oom")),
            failed_rank=_rank(data.get("failed_rank")),
            error_rank=_rank(data["error"].get("rank")) if isinstance(data.get("error"), Mapping) else None,
            out_of_time=isinstance(told, Mapping) and told.get("reason") == "max_time",
        )

    @property
    def clean(self) -> bool:
        """Every rank ended of itself with 0."""
        return bool(self.exit_codes) and all(code == 0 for code in self.exit_codes) and self.killed is None

    @property
    def lost_rank(self) -> int | None:
        """The rank that a signal took away before anything else went wrong; what its peers then raised says nothing."""
        rank = self.failed_rank
        if rank is None or rank >= len(self.exit_codes) or (self.exit_codes[rank] or 0) >= 0:
            return None
        is_consequence = self.error is None or self.error_rank not in (None, rank)
        return rank if is_consequence and self.killed in (None, "peer_failed") else None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rank(value: Any) -> int | None:
    return value if _is_int(value) and value >= 0 else None


def _error(data: Any, last_lines: tuple[str, ...]) -> TrialError | None:
    if not isinstance(data, Mapping):
        return None
    step = data.get("step")
    return TrialError(
        type=str(data.get("type") or "Exception")[:500],
        message=str(data.get("message") or "")[:20_000],
        traceback=str(data.get("traceback") or "")[-100_000:],
        last_lines=last_lines,
        step=step if _is_int(step) else None,
    )


@dataclass(frozen=True)
class ObjectiveState:
    """What is known of a trial's objective when its attempt ends.

    Attributes:
        metric: Its name; None if the trial has no objective.
        value: The value so far; None if never reported or not finite.
        bad: Text of the newest reported value when that is not a finite number: ``nan``, ``inf``, ``'high'``.
    """

    metric: str | None = None
    value: float | None = None
    bad: str | None = None

    @classmethod
    def of(cls, objective: Objective | None, value: float | None, bad: str | None) -> "ObjectiveState":
        """The state of an objective that was asked for, or of none."""
        return cls() if objective is None else cls(objective.metric, value, bad)

    @property
    def problem(self) -> str | None:
        """Why a finished trial is nevertheless worth nothing; None if all is well."""
        if self.metric is None:
            return None
        if self.bad is not None:
            return f"the objective {self.metric!r} is {self.bad}, not a finite number"
        if self.value is None:
            return f"the objective {self.metric!r} was never reported"
        if not math.isfinite(self.value):
            return f"the objective {self.metric!r} is {self.value}, not a finite number"
        return None


def decide_outcome(
    exit: Exit | None, directive: Directive, device_verdicts: Sequence[str], objective: ObjectiveState
) -> tuple[Outcome, str]:
    """The outcome and its cause in one sentence.

    Args:
        exit: The supervisor's last word; None if it or its node vanished without one.
        directive: The last directive that was given.
        device_verdicts: One text per device of the lease that was condemned while the attempt ran.
        objective: See :class:`ObjectiveState`.
    """
    if exit is not None and exit.clean and exit.left is None:
        return _finished(directive, objective)
    if directive.action is DirectiveAction.STOP and directive.reason in _STOPS:
        return _stopped(exit, directive)
    if exit is not None and exit.out_of_time:
        return Outcome.USER_ERROR, "it ran longer than its max_time" + (
            ", and saved before it left" if exit.saved else ""
        )
    if exit is not None and exit.left == "yield":
        return Outcome.PREEMPTED, _preempted(directive, "" if exit.saved else "nothing was saved when it left")
    if device_verdicts:
        return Outcome.INFRA_FAULT, "; ".join(device_verdicts)
    if exit is None:
        return Outcome.VANISHED, "its supervisor or its node vanished without a word"
    if directive.action is DirectiveAction.YIELD and exit.error is None and _driven_out(exit):
        return Outcome.PREEMPTED, _preempted(directive, f"nothing was saved: {_killed(exit) or _codes(exit)}")
    return _broken(exit)


def _driven_out(exit: Exit) -> bool:
    """Whether our own signals ended it: the kill after the grace, or the yield signal that a command did not catch."""
    ours = {-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT}
    return exit.killed is not None or any(code in ours for code in exit.exit_codes)


_STOPS = {"pruned": Outcome.PRUNED, "cancelled": Outcome.CANCELLED}


def _finished(directive: Directive, objective: ObjectiveState) -> tuple[Outcome, str]:
    problem = objective.problem
    if problem is None:
        return Outcome.COMPLETED, "every rank exited with 0"
    if directive.action is DirectiveAction.STOP and directive.reason in _STOPS:
        return _STOPS[directive.reason], f"{directive.reason}; every rank exited with 0"
    return Outcome.USER_ERROR, problem


def _stopped(exit: Exit | None, directive: Directive) -> tuple[Outcome, str]:
    """A person or pruner wanted it gone: whatever took it away, it is not run again."""
    outcome = _STOPS[directive.reason]
    if exit is None:
        return outcome, f"{directive.reason}; its supervisor or node vanished meanwhile"
    if exit.left is not None:
        return outcome, directive.reason if exit.saved else f"{directive.reason}; nothing was saved when it left"
    if exit.killed is not None:
        return outcome, f"{directive.reason}; {_killed(exit)}"
    if exit.error is not None:
        return _broken(exit)
    return outcome, f"{directive.reason}; {_codes(exit)}"


def _preempted(directive: Directive, note: str) -> str:
    reason = directive.reason or "asked to yield"
    return f"{reason}; {note}" if note else reason


def _broken(exit: Exit) -> tuple[Outcome, str]:
    error = exit.error
    if exit.oom:
        return Outcome.OUT_OF_MEMORY, "the kernel killed it: out of memory"
    if (lost := exit.lost_rank) is not None:
        return Outcome.INFRA_FAULT, f"{_code(lost, exit.exit_codes[lost])}; nobody here sent that"
    if error is not None:
        at = f" at step {error.step}" if error.step is not None else ""
        text = f"{error.type}: {error.message.strip().splitlines()[0][:300] if error.message.strip() else ''}{at}"
        memory = error.type.rpartition(".")[2] in _OOM_TYPES or _OOM_TEXT.search(error.message)
        return (Outcome.OUT_OF_MEMORY if memory else Outcome.USER_ERROR), text
    codes = [code for code in exit.exit_codes if code]
    if exit.killed is not None and not any(code > 0 for code in codes):
        return _killed_by_us(exit)
    if any(code > 0 for code in codes):
        note = " without having been asked to yield" if YIELD_EXIT_CODE in codes else ""
        return Outcome.USER_ERROR, _codes(exit) + note
    if codes:
        return Outcome.INFRA_FAULT, f"{_codes(exit)}; nobody here sent that"
    return Outcome.INFRA_FAULT, f"{_codes(exit)}; it left on a {exit.left} that nobody gave" if exit.left else _codes(
        exit
    )


def _killed_by_us(exit: Exit) -> tuple[Outcome, str]:
    return Outcome.INFRA_FAULT, f"{_killed(exit)}; {_codes(exit)}"


_KILLED = {
    "grace": "it was still there when its grace was over, and was ended",
    "killed": "it was killed at once, as asked",
    "peer_failed": "it was ended because another rank failed",
    "hung": "it made no progress any more, and was ended",
    "spool_failed": "it was killed because what it reported could not be written down",
    "stale": "it was killed because another attempt had taken its place",
}


def _killed(exit: Exit) -> str:
    """Why the supervisor killed the ranks, in words."""
    return _KILLED.get(exit.killed or "", exit.killed or "")


def _codes(exit: Exit) -> str:
    """The first rank that did not end well, in words."""
    for rank, code in enumerate(exit.exit_codes):
        if code != 0:
            return _code(rank, code)
    return "every rank exited with 0" if exit.exit_codes else "no rank was started"


def _code(rank: int, code: int | None) -> str:
    if code is None:
        return f"how rank {rank} ended is unknown"
    return f"rank {rank} exited with {code}" if code >= 0 else f"rank {rank} was killed by {_signal(-code)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
