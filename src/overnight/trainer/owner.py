"""Whose a run is, and until when: a copy of the process, made by ``fork``, has all of its objects and no thread of it.

Such a copy must not act as the run: its saves and its words would be those of an attempt that goes on elsewhere, and it
would wait for ever for a thread that it does not have. Nor may anything act as a run that has ended and told its
result.
"""

import os

from overnight.core.errors import BadInputError


class Owner:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._has_ended = False

    def end(self) -> None:
        """Nothing may act as the run any more."""
        self._has_ended = True

    @property
    def is_here(self) -> bool:
        """Whether that is the process that asks."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Refuses to act as the run anywhere else, or after its end.

        Raises:
            BadInputError: This is another process, or the run is over.
        """
        self.require_running()
        if not self.is_here:
            raise BadInputError(
                f"this process was forked from the run, which belongs to process {self._pid}",
                hint="Leave a forked child with os._exit() before it comes back to the run's loop, "
                "or start helpers with multiprocessing.",
            )

    def require_running(self) -> None:
        """Refuses what would come too late.

        Raises:
            BadInputError: The run is over.
        """
        if self._has_ended:
            raise BadInputError(
                "the run has ended: what it has reached is saved and told",
                hint="Do this inside the block of `with trainer.run(...) as run:`.",
            )
