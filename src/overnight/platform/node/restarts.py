"""How often ranks may be started again inside one attempt.

A restart costs a second, another attempt a queue; but what fails again and again is for the scheduler to judge, who
can try other devices. So restarts are bounded, and progress that lasts begins the count anew.

Standard library only: runs in the user's interpreter too.
"""

MAX_RESTARTS = 3
"""Restarts in a row without a checkpoint further than any before; the next failure ends the attempt."""

_MAX_CAUSES = 50


class Restarts:
    """Counts the restarts of one attempt.

    Args:
        limit: Restarts in a row without progress.

    Attributes:
        causes: Why, oldest first; the newest 50.
    """

    def __init__(self, limit: int = MAX_RESTARTS) -> None:
        self._limit = limit
        self._in_vain = 0
        self._reached = -1
        self.causes: list[str] = []

    @property
    def in_vain(self) -> int:
        """Restarts since the last progress."""
        return self._in_vain

    @property
    def allowed(self) -> bool:
        """Whether the ranks may start once more."""
        return self._in_vain < self._limit

    def note(self, cause: str) -> None:
        """They do."""
        self._in_vain += 1
        self.causes = [*self.causes, cause][-_MAX_CAUSES:]

    def forked(self, step: int) -> None:
        """The ranks went on from the checkpoint of this step, 0 from scratch: to commit it again is no progress."""
        self._reached = max(self._reached, step)

    def committed(self, step: int) -> None:
        """A checkpoint was committed."""
        if step > self._reached:
            self._reached = step
            self._in_vain = 0
