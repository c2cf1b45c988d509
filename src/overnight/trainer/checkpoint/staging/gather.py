"""Copying thousands of tensors in one system call, because every return to the interpreter may cost 5 ms.

A thread that copies tensor by tensor takes the interpreter's lock between any two of them, and waits up to a switch
interval for it while the script computes in Python: 1,000 tensors took 5 s instead of 0.1 s. ``pwritev`` takes 1,024
pieces of memory at once, into a file that is memory too, on exactly one thread, at 0.8 times the speed of memcpy.

A file is locked while it is written to. Several threads at once copy into its mapping instead, by ``process_vm_readv``
from this process to itself.

A piece whose memory has been unmapped meanwhile is an error (EFAULT), not the end of the process.
"""

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Sequence

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
_readv = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    _readv.restype = ctypes.c_ssize_t

Rows = NDArray[np.uint64]
"""Address and length of pieces of memory, shape ``(n, 2)``. No length is 0."""

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
        write_pieces(descriptor, self._start, self._rows_at(addresses))

    def shares(self, addresses: Sequence[int] | NDArray[np.uint64], num: int) -> list[tuple[int, Rows]]:
        """The same in equal parts, cut at whole pages: where each begins in the file, and its pieces."""
        rows = self._rows_at(addresses)
        ends = np.cumsum(rows[:, _LENGTH], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        cuts = [total * index // num // PAGE_BYTES * PAGE_BYTES for index in range(num)] + [total]
        pairs = [(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]
        return [(self._start + start, _between(rows, ends, start, stop)) for start, stop in pairs]

    def _rows_at(self, addresses: Sequence[int] | NDArray[np.uint64]) -> Rows:
        rows = self._rows.copy()
        rows[self._slots, _ADDRESS] = np.asarray(addresses, dtype=np.uint64)[self._filled]
        return rows


def write_pieces(descriptor: int, offset: int, rows: Rows) -> None:
    """Writes pieces of memory one behind the other; the interpreter's lock is free meanwhile.

    Args:
        descriptor: Of a file.
        offset: Where the first goes.
        rows: The pieces; changed on the way.

    Raises:
        OSError: As ``pwritev``.
    """

    def write(done: int, some: Rows) -> int:
        return int(_pwritev(descriptor, some.ctypes.data, len(some), offset + done))

    _move(write, rows)


def copy_pieces(address: int, rows: Rows) -> None:
    """As :func:`write_pieces`, to memory of this process.

    Args:
        address: Where the first goes; there is room for all.
        rows: The pieces; changed on the way.

    Raises:
        OSError: As ``process_vm_readv``; ENOSYS, EPERM or EACCES where the system does not allow it.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    own = os.getpid()

    def copy(done: int, some: Rows) -> int:
        there = np.array([address + done, some[:, _LENGTH].sum()], dtype=np.uint64)
        return int(_readv(own, there.ctypes.data, 1, some.ctypes.data, len(some), 0))

    _move(copy, rows)


def _move(call: Callable[[int, Rows], int], rows: Rows) -> None:
    """Calls the system until all is done.

    Args:
        call: Moves some pieces behind so many bytes; returns how many bytes, or -1.
        rows: The pieces.
    """
    first = done = 0
    while first < len(rows):
        moved = call(done, rows[first : first + _MAX_PIECES])
        if moved < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            raise OSError(number, os.strerror(number))
        if moved == 0:  # no kernel does, and the next step would wait for ever
            raise OSError(errno.EIO, "nothing of the state was copied")
        done += moved
        first = _advance(rows, first, moved)


def _between(rows: Rows, ends: NDArray[np.int64], start: int, stop: int) -> Rows:
    """The pieces of a range of bytes, the outer ones cut.

    Args:
        rows: All pieces.
        ends: Where each ends.
        start, stop: The range; not empty.
    """
    first, last = int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(ends, stop, side="left"))
    part = rows[first : last + 1].copy()
    part[-1, _LENGTH] -= np.uint64(int(ends[last]) - stop)
    skipped = np.uint64(start - (int(ends[first]) - int(rows[first, _LENGTH])))
    part[0, _ADDRESS] += skipped
    part[0, _LENGTH] -= skipped
    return part


def _advance(rows: Rows, first: int, written: int) -> int:
    """Which piece comes next; one that was written in part (a call takes 2 GiB at most) is shortened."""
    ends = np.cumsum(rows[first : first + _MAX_PIECES, _LENGTH])
    done = int(np.searchsorted(ends, written, side="right"))
    rest = written - (int(ends[done - 1]) if done else 0)
    if rest:
        rows[first + done] += np.array([rest, -rest], dtype=np.int64).view(np.uint64)
    return first + done
