"""One file of tensors: archives one after the other, written once and described while they are written.

What is not the data of a large tensor (archives of small ones, headers, filling) gathers in a buffer and becomes
a segment of its own, so that 100,000 scalars cost some dozens of writes.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from overnight.trainer.checkpoint.index import Chunk
from overnight.trainer.checkpoint.manifest import SEGMENT_BYTES, FileEntry, Segment
from overnight.trainer.checkpoint.writing.archive import ALIGNMENT, wrap
from overnight.trainer.checkpoint.writing.content import Hashed

_BUFFER_BYTES = 1 << 20


class DataFile:
    """A file that is being written.

    Args:
        path: Where; an older file of that name is overwritten.
        name: As the manifest lists it.
        progress: Called with numbers of bytes.
    """

    def __init__(self, path: Path, name: str, progress: Callable[[int], None]) -> None:
        self._name = name
        self._progress = progress
        self._segments: list[Segment] = []
        self._buffer = bytearray()
        self._written = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def add(self, hashed: Hashed, memory: memoryview) -> Chunk:
        """Appends a tensor."""
        piece = hashed.piece
        self._buffer += bytes(-self._position % ALIGNMENT)
        record = self._position
        wrapping = wrap(piece.dtype, piece.shape, piece.num_bytes)
        self._buffer += wrapping.before
        offset = self._position
        data = memory[piece.offset : piece.offset + piece.num_bytes]
        if hashed.blocks:
            self._flush()
            for number, block in enumerate(hashed.blocks):
                self._append(data[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES], block)
        else:
            self._buffer += data
        self._buffer += wrapping.after
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()
        at = piece.at if piece.at is not None else (0,) * len(piece.shape)
        span = (record, self._position - record)
        return Chunk(self._name, offset, piece.num_bytes, at, piece.shape, span, hashed.digest)

    def finish(self) -> FileEntry:
        """Makes the file durable.

        Raises:
            OSError: The file system refused, or holds another number of bytes than were written.
        """
        self._flush()
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        if size != self._written:
            raise OSError(f"{self._name} has {size} bytes after {self._written} were written")
        return FileEntry.of(self._segments)

    def close(self) -> None:
        """Closes the descriptor. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _position(self) -> int:
        return self._written + len(self._buffer)

    def _flush(self) -> None:
        if self._buffer or not self._written:
            data = memoryview(bytes(self._buffer))
            self._buffer.clear()
            for start in range(0, max(1, len(data)), SEGMENT_BYTES):
                part = data[start : start + SEGMENT_BYTES]
                self._append(part, xxhash.xxh3_128_hexdigest(part))

    def _append(self, data: memoryview, digest: str) -> None:
        self._segments.append(Segment(self._written, len(data), digest))
        self._written += len(data)
        while data:
            written = os.write(self._descriptor, data)
            data = data[written:]
            self._progress(written)


def write_tensors(
    path: Path, name: str, tensors: Iterable[Hashed], memory: memoryview, progress: Callable[[int], None]
) -> tuple[FileEntry, list[Chunk]]:
    """Writes tensors to a file, durably.

    Returns:
        What the manifest says of the file, and where each tensor lies.

    Raises:
        OSError: The file system refused.
    """
    file = DataFile(path, name, progress)
    try:
        chunks = [file.add(hashed, memory) for hashed in tensors]
        return file.finish(), chunks
    finally:
        file.close()
