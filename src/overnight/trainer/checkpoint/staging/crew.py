"""Copies on all cores at once where training leaves none of them free.

Threads that compute an update together wait for each other. One thread that copies beside them takes half of one core
for the time of two copies, and all wait for what is computed there. As many as there are cores, each with its part of
the bytes, take the time from all of them alike, and the loop loses a part of it only. Where a core is free, one thread
on it costs least.
"""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.staging.gather import Gather, copy_pieces

MIN_SHARED_BYTES = 8 << 20
"""Less is copied by one thread, before another has begun."""

_FREE = 0.5
"""With less than half of a core free, none is."""

_MIN_TICKS = 10
"""Of all cores, 10 ms each. A shorter time says nothing."""

_MAX_THREADS = 8
"""More do not get more out of the memory."""

_NOT_ALLOWED = frozenset((errno.ENOSYS, errno.EPERM, errno.EACCES))
_IDLE, _WAITING = 3, 4  # for the disk


def _read_times() -> str:
    return Path("/proc/stat").read_text()


class Cores:
    """Looks whether any core was free lately, of those that this process may use.

    Args:
        read: Gives the times of all cores as ``/proc/stat`` does.
        allowed: Numbers of the cores.
    """

    def __init__(self, read: Callable[[], str] = _read_times, allowed: frozenset[int] | None = None) -> None:
        self._read = read
        self.allowed = allowed if allowed is not None else _allowed()
        self._names = {f"cpu{number}" for number in self.allowed}
        self._before = self._look()

    def begin(self) -> None:
        """From now on is lately."""
        self._before = self._look()

    def are_busy(self) -> bool:
        """Whether all were, since :meth:`begin`; False if it cannot be told."""
        (idle, total), (idle_before, total_before) = self._look(), self._before
        passed = total - total_before
        return passed >= _MIN_TICKS and (idle - idle_before) / passed * len(self.allowed) < _FREE

    def _look(self) -> tuple[int, int]:
        """Idle and whole time in ticks, summed over the cores."""
        idle = total = 0
        try:
            for line in self._read().splitlines():
                name, *fields = line.split()
                if name in self._names:
                    ticks = [int(field) for field in fields[:8]]  # what follows is counted among them
                    idle += ticks[_IDLE] + ticks[_WAITING]
                    total += sum(ticks)
        except (OSError, ValueError, IndexError):
            return 0, 0
        return idle, total


def _allowed() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


class Crew:
    """Threads that copy together; they live from the first time that they are needed to :meth:`close`.

    Args:
        cores: Says when they are.
    """

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._num = min(len(cores.allowed), _MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, group: Gather, arena: Arena, addresses: NDArray[np.uint64]) -> None:
        """Copies the pieces of a group, which lie at these addresses, to their places in the arena.

        Raises:
            OSError: No memory for the arena, or some address is not readable any more.
        """
        shared = self._num > 1 and int(group.lengths.sum()) >= MIN_SHARED_BYTES and self._cores.are_busy()
        if not (shared and self._copy_together(group, arena, addresses)):
            group.write(arena.fileno(), addresses)
        self._cores.begin()

    def _copy_together(self, group: Gather, arena: Arena, addresses: NDArray[np.uint64]) -> bool:
        """Whether all is copied. If not, nobody goes on to, and one thread may try in its own way."""
        is_done = False
        try:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num - 1, "overnight-copying")
            (own_offset, own), *others = group.shares(addresses, self._num)
            futures = [self._pool.submit(copy_pieces, arena.address + offset, rows) for offset, rows in others]
            copy_pieces(arena.address + own_offset, own)
            for future in futures:
                future.result()
            is_done = True
        except (OSError, RuntimeError) as error:  # there is memory that only a file can be written from; or no thread
            if not isinstance(error, OSError) or error.errno in _NOT_ALLOWED:
                self._num = 1
        finally:
            if not is_done:
                self.close()
        return is_done

    def close(self) -> None:
        """Ends the threads; what none of them has begun is not done any more. Safe to call twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
