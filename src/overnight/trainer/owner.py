"""Whose a run is: a copy of the process, made by ``fork``, has all of its objects and none of its threads.

Such a copy must not act as the run: its saves and its words would be those of an attempt that goes on elsewhere, and it
would wait for ever for a thread that it does not have.
"""

import os

from overnight.core.errors import BadInputError


class Owner:
    """The process that made this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether that is the process that asks."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Refuses to act as the run anywhere else.

        Raises:
            BadInputError: This is another process.
        """
        if not self.is_here:
            raise BadInputError(
                f"this process was forked from the run, which belongs to process {self._pid}",
                hint="Leave a forked child with os._exit() before it comes back to the run's loop, "
                "or start helpers with multiprocessing.",
            )
