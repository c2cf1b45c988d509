"""An append-only file of checksummed frames, which survives being cut anywhere.

A process that is killed leaves at most one incomplete frame, at the end. A reader stops there; a writer that opens the
file again cuts it off first, since frames behind it could never be reached.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import xxhash

_HEADER = struct.Struct("<II")
_BUFFER_BYTES = 1 << 16


class FrameWriter:
    """Appends frames, buffered; nothing is forced to the disk.

    Args:
        path: The file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._buffer = bytearray()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end = sum(_HEADER.size + len(payload) for payload in read_frames(path))
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)

    def append(self, payload: bytes) -> None:
        """Adds one frame. Writes only when the buffer is full.

        Raises:
            OSError: The file cannot be written. What is buffered stays so, and the next flush goes on with it.
        """
        self._buffer += _HEADER.pack(len(payload), xxhash.xxh32_intdigest(payload))
        self._buffer += payload
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands everything to the operating system, where it outlives this process.

        Raises:
            OSError: As with :meth:`append`.
        """
        while self._buffer:
            num_written = os.write(self._fd, self._buffer)
            del self._buffer[:num_written]

    def close(self) -> None:
        """Flushes and closes. Safe to call twice."""
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = -1


def read_frames(path: Path) -> Iterator[bytes]:
    """The payloads of all whole frames from the start of a file, up to the first that is cut or damaged."""
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            size, checksum = _HEADER.unpack(header)
            payload = file.read(size)
            if len(payload) < size or xxhash.xxh32_intdigest(payload) != checksum:
                return
            yield payload
