"""How a run leaves before its end: by an exception that nothing after the loop can mistake for an error.

They derive from :class:`SystemExit`, hence from :class:`BaseException`: ``except Exception`` in a script does not
swallow them, nothing behind the loop runs by mistake, and an interpreter that sees one leave ends quietly with its
code.
"""

import traceback
from typing import Any

from overnight.core.addresses import discreet

MAX_TRACEBACK = 20_000
MAX_MESSAGE = 4_000

EXIT_LEFT = 75
"""Exit code of a process that left on a directive: ``EX_TEMPFAIL`` of sysexits.h, "try again later"."""

EXIT_INTERRUPTED = 130
"""What shells report for a process that ended by Ctrl-C."""


class Left(SystemExit):
    """The run left at a boundary because it was told to.

    Args:
        step: Updates done when it left.
        saved: Whether the state of exactly that step is committed.
        reason: Why, in a word: ``preempted``, ``pruned``, ``cancelled`` ...
    """

    why = "stop"
    exit_code = EXIT_LEFT

    def __init__(self, step: int, *, saved: bool, reason: str = "") -> None:
        super().__init__(self.exit_code)
        self.step = step
        self.saved = saved
        self.reason = reason

    def __str__(self) -> str:
        return f"left at step {self.step} ({self.reason or self.why}), {'saved' if self.saved else 'not saved'}"


class Yielded(Left):
    """The devices were wanted elsewhere; the trial goes on later from its checkpoint."""

    why = "yield"


class Stopped(Left):
    """The trial was pruned or cancelled."""


class Interrupted(Left):
    """A person pressed Ctrl-C in a run that is alone; the next start goes on from here."""

    why = "yield"
    exit_code = EXIT_INTERRUPTED


def is_success(error: BaseException | None) -> bool:
    """Whether a script ran through; ``sys.exit()`` and ``sys.exit(0)`` are as good as that."""
    if isinstance(error, SystemExit) and not isinstance(error, Left):
        return error.code in (None, 0)
    return error is None


def describe(error: BaseException, step: int) -> dict[str, Any]:
    """An error as ``/v1/error`` carries it: type, message and the end of the traceback, bounded, without passwords."""
    message = discreet(str(error))[:MAX_MESSAGE]
    text = discreet("".join(traceback.format_exception(error)))[-MAX_TRACEBACK:]
    return {"type": type(error).__name__, "message": message, "traceback": text, "step": step}
