"""A rank's output file, kept bounded while the rank writes to it.

Ranks write straight to the file (O_APPEND): no pipe that can break, block or die with a reader. The supervisor punches
holes into the middle (fallocate(2)), so that the first megabyte and the newest sixteen stay, at their own offsets.

Standard library only: runs in the user's interpreter too.
"""

import ctypes
import os
from pathlib import Path

HEAD_BYTES = 1024 * 1024
TAIL_BYTES = 16 * 1024 * 1024
_STEP_BYTES = 1024 * 1024
_BLOCK_BYTES = 4096
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_libc = ctypes.CDLL(None, use_errno=True)


class BoundedOutput:
    """Bounds one output file.

    Args:
        path: The file; it may not exist yet.
        head_bytes, tail_bytes: What stays of it.
    """

    def __init__(self, path: Path, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        self._path = path
        self._head = head_bytes
        self._tail = tail_bytes
        self._punched_to = head_bytes
        self._can_punch = True

    def bound(self) -> bool:
        """Drops the middle if the file has outgrown its bounds. Returns whether anything was dropped."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return False
        end = (size - self._tail) // _BLOCK_BYTES * _BLOCK_BYTES
        if end - self._punched_to < _STEP_BYTES:
            return False
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if self._can_punch and self._punch(descriptor, self._punched_to, end - self._punched_to):
                self._punched_to = end
                return True
            self._can_punch = False
            # Without holes, cutting to nothing is the one way that a writer with O_APPEND survives.
            os.ftruncate(descriptor, 0)
            return True
        finally:
            os.close(descriptor)

    @staticmethod
    def _punch(descriptor: int, offset: int, length: int) -> bool:
        result = _libc.fallocate(descriptor, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length))
        return int(result) == 0
