"""One file of tensors: archives one after the other, written once and described while they are written.

The data of large tensors are written as they lie in memory, and begin at a page of the file. All else (archives of
small ones, headers, filling) gathers in a buffer and becomes a segment of its own, so that 100,000 scalars cost some
dozens of writes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from overnight.trainer.checkpoint.index import Chunk
from overnight.trainer.checkpoint.manifest import SEGMENT_BYTES, FileEntry, Segment
from overnight.trainer.checkpoint.writing.archive import ALIGNMENT, wrap
from overnight.trainer.checkpoint.writing.content import Hashed
from overnight.trainer.checkpoint.writing.order import PAGE_BYTES
from overnight.trainer.checkpoint.writing.output import Output

_BUFFER_BYTES = 1 << 20


class DataFile:
    """A file that is being written.

    Args:
        output: The file; empty.
        name: As the manifest lists it.
    """

    def __init__(self, output: Output, name: str) -> None:
        self._output = output
        self._name = name
        self._segments: list[Segment] = []
        self._buffer = bytearray()

    def add(self, hashed: Hashed, memory: memoryview) -> Chunk:
        """Appends a tensor.

        Args:
            hashed: The tensor.
            memory: In which it lies; large ones at a page, else they are copied once more.
        """
        piece = hashed.piece
        wrapping = wrap(piece.dtype, piece.shape, piece.num_bytes)
        self._align(ALIGNMENT)
        if hashed.blocks:
            self._align(PAGE_BYTES, ahead=len(wrapping.before))
        record = self._position
        self._buffer += wrapping.before
        offset = self._position
        data = memory[piece.offset : piece.offset + piece.num_bytes]
        if hashed.blocks:
            self._flush()
            self._describe(data, hashed.blocks)
            self._output.append_pages(data)
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
            OSError: The file system refused.
        """
        if self._buffer or not self._segments:
            self._flush()
        self._output.sync()
        return FileEntry.of(self._segments)

    @property
    def _position(self) -> int:
        return self._output.position + len(self._buffer)

    def _align(self, multiple: int, ahead: int = 0) -> None:
        """Fills up so that what comes ``ahead`` bytes later begins at a multiple."""
        self._buffer += bytes(-(self._position + ahead) % multiple)

    def _flush(self) -> None:
        data = memoryview(self._buffer)
        self._buffer = bytearray()
        starts = range(0, max(1, len(data)), SEGMENT_BYTES)
        self._describe(data, [xxhash.xxh3_128_hexdigest(data[start : start + SEGMENT_BYTES]) for start in starts])
        self._output.append(data)

    def _describe(self, data: memoryview, digests: Iterable[str]) -> None:
        """Notes the segments of what is appended next."""
        for number, digest in enumerate(digests):
            start = number * SEGMENT_BYTES
            length = min(SEGMENT_BYTES, len(data) - start)
            self._segments.append(Segment(self._output.position + start, length, digest))


def write_tensors(
    path: Path,
    name: str,
    tensors: Iterable[Hashed],
    memory: memoryview,
    progress: Callable[[int], None],
    *,
    direct: bool = True,
) -> tuple[FileEntry, list[Chunk]]:
    """Writes tensors to a file, durably.

    Args:
        path: Where.
        name: As the manifest lists it.
        tensors: What, as it lies in ``memory``.
        memory: The arena.
        progress: Called with numbers of bytes.
        direct: Past the page cache; not for what is read again soon.

    Returns:
        What the manifest says of the file, and where each tensor lies.

    Raises:
        OSError: The file system refused.
    """
    output = Output(path, direct=direct, progress=progress)
    try:
        file = DataFile(output, name)
        chunks = [file.add(hashed, memory) for hashed in tensors]
        return file.finish(), chunks
    finally:
        output.close()
