"""Ranks forked in advance, so that the next start of a gang does not wait for what can be done before it.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
from collections.abc import Collection

from overnight.platform.node.rank import Seat, fork_seat


class Spares:
    """Seats that wait for a start.

    Args:
        first: One that was forked before the attempt began; None on a cold start.
    """

    def __init__(self, first: Seat | None) -> None:
        self._first = first
        self._seats: dict[int, Seat] = {}

    @property
    def pids(self) -> Collection[int]:
        """Of those forked here, up to date whenever it is looked at."""
        return self._seats.keys()

    def take(self) -> Seat:
        """One of them, or one that is forked now.

        Raises:
            OSError: There is none and the system forks no more.
        """
        first, self._first = self._first, None
        if first is not None:
            return first
        return self._seats.popitem()[1] if self._seats else fork_seat()

    def prepare(self, num_wanted: int) -> None:
        """Forks one if there are fewer than that; no more than one at a time, as it takes some milliseconds."""
        if len(self._seats) < num_wanted:
            with contextlib.suppress(OSError):
                seat = fork_seat()
                self._seats[seat.pid] = seat

    def lose(self, pid: int) -> None:
        """Forgets the one of that process, if there is one: it has exited."""
        if (seat := self._seats.pop(pid, None)) is not None:
            seat.channel.close()
