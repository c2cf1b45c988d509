"""Copying thousands of tensors in one system call, because every return to the interpreter may cost 5 ms.

A thread that copies tensor by tensor takes the interpreter's lock between any two of them, and waits up to a switch
interval for it while the script computes in Python: 1,000 tensors took 5 s instead of 0.1 s. ``pwritev`` takes 1,024
pieces of memory at once, into a file that is memory too, on exactly one thread, at 0.8 times the speed of memcpy.

A piece whose memory has been unmapped meanwhile is an error (EFAULT), not the end of the process.
"""

import ctypes
import errno
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from overnight.trainer.checkpoint.writing.order import LARGE_BYTES, PAGE_BYTES

ALIGNMENT = 64
"""Bytes; where tensors begin in the arena, as in the files that ``torch.save`` writes. Large ones, if they come first,
begin at a page: so they can go from there to the disk without another copy."""

_MAX_PIECES = 1024
_ADDRESS, _LENGTH = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)
_pwritev = _libc.pwritev
_pwritev.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
_pwritev.restype = ctypes.c_ssize_t

_ZEROS = (ctypes.c_char * PAGE_BYTES)()


class Gather:
    """Pieces of memory that belong next to each other in a file. What is large takes whole pages.

    Args:
        start: Where the first one begins in the file.
        lengths: Bytes of each.
        alignment: Where each begins: at a multiple of it. Gaps cost as much time as small pieces do.

    Attributes:
        offsets: Where each begins in the file.
        lengths: Bytes of each.
        end: Where the next would begin.
    """

    def __init__(self, start: int, lengths: Sequence[int] | NDArray[np.int64], *, alignment: int = ALIGNMENT) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        units = np.where(self.lengths < LARGE_BYTES, alignment, PAGE_BYTES)
        padded = -(-self.lengths // units) * units
        self.offsets = start + np.cumsum(padded) - padded
        self.end = start + int(padded.sum())
        gaps = padded - self.lengths
        rows = np.zeros((2 * len(gaps), 2), dtype=np.uint64)
        rows[0::2, _LENGTH] = self.lengths
        rows[1::2, _ADDRESS] = ctypes.addressof(_ZEROS)
        rows[1::2, _LENGTH] = gaps
        used = rows[:, _LENGTH] > 0
        self._start = start
        self._rows = rows[used]
        self._slots = np.cumsum(used)[0::2][used[0::2]] - 1
        self._filled = used[0::2]

    def __len__(self) -> int:
        return len(self.lengths)

    def write(self, descriptor: int, addresses: Sequence[int] | NDArray[np.uint64]) -> None:
        """Copies the pieces, which lie at these addresses, into the file.

        Raises:
            OSError: No memory for the file, or some address is not readable any more.
        """
        rows = self._rows.copy()
        rows[self._slots, _ADDRESS] = np.asarray(addresses, dtype=np.uint64)[self._filled]
        write_pieces(descriptor, self._start, rows)


def write_pieces(descriptor: int, offset: int, rows: NDArray[np.uint64]) -> None:
    """Writes pieces of memory one behind the other; the interpreter's lock is free meanwhile.

    Args:
        descriptor: Of a file.
        offset: Where the first goes.
        rows: Address and length of each, shape ``(n, 2)``; changed on the way. No length is 0.

    Raises:
        OSError: As ``pwritev``.
    """
    first = 0
    while first < len(rows):
        count = min(_MAX_PIECES, len(rows) - first)
        written = _pwritev(descriptor, rows[first:].ctypes.data, count, offset)
        if written < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            raise OSError(number, os.strerror(number))
        offset += written
        first = _advance(rows, first, written)


def _advance(rows: NDArray[np.uint64], first: int, written: int) -> int:
    """Which piece comes next; one that was written in part (a call takes 2 GiB at most) is shortened."""
    ends = np.cumsum(rows[first : first + _MAX_PIECES, _LENGTH])
    done = int(np.searchsorted(ends, written, side="right"))
    rest = written - (int(ends[done - 1]) if done else 0)
    if rest:
        rows[first + done] += np.array([rest, -rest], dtype=np.int64).view(np.uint64)
    return first + done
