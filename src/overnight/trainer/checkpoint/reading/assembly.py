"""Tensors out of a checkpoint: which bytes to read, and where they go.

A wanted chunk (mostly the whole tensor) is put together from the stored ones, whatever sharding they were saved under.
What is one run of bytes both in the file and in the tensor is read straight to its place; the rest (another sharding
along an inner dimension) passes through memory of its own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.index import Chunk as StoredChunk
from overnight.trainer.checkpoint.index import Index, TensorEntry
from overnight.trainer.checkpoint.reading.memory import Slabs, shaped
from overnight.trainer.checkpoint.reading.source import Want
from overnight.trainer.checkpoint.sharding import Chunk


def whole_of(entry: TensorEntry) -> Chunk:
    """All of a tensor, as a chunk."""
    return Chunk((0,) * len(entry.shape), entry.shape)


@dataclass
class Assembly:
    """Reads to do, and copies to do after them.

    Attributes:
        index: Of the checkpoint.
        wants: By file, for :func:`~overnight.trainer.checkpoint.reading.transfer.transfer`.
    """

    index: Index
    wants: dict[str, list[Want]] = field(default_factory=dict)
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def tensor(self, key: str, chunk: Chunk | None = None, slabs: Slabs | None = None) -> torch.Tensor:
        """Fresh memory for a tensor or a part of it; it is filled once the wants are and :meth:`finish` was called.

        Args:
            key: In the index.
            chunk: Which part, None for all of it.
            slabs: Where the memory comes from; without, from a slab of its own.

        Raises:
            CorruptCheckpointError: The checkpoint has no such tensor, or not all of it.
        """
        if (entry := self.index.get(key)) is None:
            raise CorruptCheckpointError(f"{key} is not in the index of the checkpoint")
        chunk = whole_of(entry) if chunk is None else chunk
        dtype = dtype_of(entry.dtype)
        memory = (slabs or Slabs()).take(math.prod(chunk.shape) * dtype.itemsize)
        target = shaped(memory, dtype, chunk.shape)
        for stored, part in _parts(entry, chunk, key):
            self._want(stored, part, chunk, memory, target)
        return target

    def _want(self, stored: StoredChunk, part: Chunk, chunk: Chunk, memory: memoryview, target: torch.Tensor) -> None:
        size = target.dtype.itemsize
        first, last = _run(part, Chunk(stored.at, stored.shape))
        start, end = _run(part, chunk)
        if last - first == end - start == math.prod(part.shape):
            into = memory[start * size : end * size]
        else:
            into = Slabs().take((last - first) * size)
            source = shaped(into, target.dtype, (last - first,)).as_strided(part.shape, _strides(stored.shape))
            here = tuple(slice(p - c, p - c + n) for p, c, n in zip(part.at, chunk.at, part.shape, strict=True))
            self._copies.append((target[here], source))
        self.wants.setdefault(stored.file, []).append(Want(stored.offset + first * size, into))

    def finish(self) -> None:
        """Copies what could not be read to its place; once, after the reads."""
        for target, source in self._copies:
            target.copy_(source)
        self._copies.clear()


def _parts(entry: TensorEntry, chunk: Chunk, key: str) -> Iterator[tuple[StoredChunk, Chunk]]:
    """The stored chunks that a chunk is put together from, each with what it gives."""
    missing = math.prod(chunk.shape)
    if missing and _overlap(whole_of(entry), chunk) != chunk:
        raise CorruptCheckpointError(f"{key} has the shape {list(entry.shape)}, {chunk} is no part of it")
    for stored in entry.chunks:
        if (part := _overlap(Chunk(stored.at, stored.shape), chunk)) is not None:
            missing -= math.prod(part.shape)
            yield stored, part
    if missing:
        raise CorruptCheckpointError(f"{key}: the stored chunks do not make up {chunk}")


def _overlap(one: Chunk, other: Chunk) -> Chunk | None:
    at = tuple(max(a, b) for a, b in zip(one.at, other.at, strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.at, one.shape, other.at, other.shape, strict=True))
    shape = tuple(end - start for start, end in zip(at, ends, strict=True))
    return Chunk(at, shape) if all(length > 0 for length in shape) else None


def _run(part: Chunk, chunk: Chunk) -> tuple[int, int]:
    """First and last element (exclusive), in C order of ``chunk``, of the shortest run that holds all of ``part``."""
    strides = _strides(chunk.shape)
    first = sum((p - c) * stride for p, c, stride in zip(part.at, chunk.at, strides, strict=True))
    return first, first + 1 + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def dtype_of(name: str) -> torch.dtype:
    """The type that torch names so.

    Raises:
        CorruptCheckpointError: This version of torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptCheckpointError(f"this version of torch has no type {name}", hint="Use the version that saved it.")
    return found
