"""How a run leaves before its end: by an exception that nothing after the loop can mistake for an error.

They derive from :class:`SystemExit`, hence from :class:`BaseException`: ``except Exception`` in a script does not
swallow them, nothing behind the loop runs by mistake, and an interpreter that sees one leave ends quietly with its
code.
"""

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
