"""The index of a checkpoint: where in its files the raw bytes of every tensor lie.

``index.json`` is listed and hashed by the manifest. It says what DCP's ``.metadata`` says, but needs neither torch nor
pickle to be read, and points at the bytes themselves instead of the archive around them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from overnight.core.errors import CorruptCheckpointError

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor in one file, contiguous and in C order.

    Attributes:
        file: As the manifest lists it, relative to the checkpoint's folder.
        offset: Of the first byte of data in the file, a multiple of 64.
        num_bytes: Bytes of data.
        at: Where the chunk begins in the tensor; zeros for a whole one.
        shape: Of the chunk.
        record: Offset and length of the archive around the data, which ``torch.load`` reads.
        xxh3_128: Hash of the chunk's type, shape and bytes: equal for equal content, see
            :func:`~overnight.trainer.checkpoint.writing.content.digest_of`.
    """

    file: str
    offset: int
    num_bytes: int
    at: tuple[int, ...]
    shape: tuple[int, ...]
    record: tuple[int, int]
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor: its type as torch names it (without ``torch.``), its whole shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Index = dict[str, TensorEntry]
"""Tensors by stored key: what ranks share under its own key, what is one rank's under ``rank-R/<key>``."""


def private_key(rank: int, key: str) -> str:
    """Stored key of a tensor that belongs to one rank alone."""
    return f"rank-{rank}/{key}"


def merge(indexes: Iterable[Index]) -> Index:
    """One index of what several ranks have stored; chunks of one tensor come together, in order of their place.

    Raises:
        ValueError: Two ranks store one tensor with another type or shape, or one chunk twice.
    """
    merged: Index = {}
    for index in indexes:
        for key, entry in index.items():
            other = merged.get(key)
            if other is None:
                merged[key] = entry
                continue
            if (other.dtype, other.shape) != (entry.dtype, entry.shape):
                raise ValueError(f"{key} is {other.dtype}{list(other.shape)} and {entry.dtype}{list(entry.shape)}")
            chunks = tuple(sorted(other.chunks + entry.chunks, key=lambda chunk: chunk.at))
            if len({chunk.at for chunk in chunks}) < len(chunks):
                raise ValueError(f"a chunk of {key} was stored twice")
            merged[key] = TensorEntry(entry.dtype, entry.shape, chunks)
    return merged


def index_to_json(index: Index) -> dict[str, Any]:
    """The index as JSON."""
    names = Chunk.__dataclass_fields__
    return {
        key: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "chunks": [{name: getattr(chunk, name) for name in names} for chunk in entry.chunks],
        }
        for key, entry in index.items()
    }


def index_from_json(body: dict[str, Any]) -> Index:
    """The inverse of :func:`index_to_json`."""
    return {
        key: TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(_chunk(**chunk) for chunk in entry["chunks"]))
        for key, entry in body.items()
    }


def _chunk(*, at: list[int], shape: list[int], record: list[int], **rest: Any) -> Chunk:
    return Chunk(at=tuple(at), shape=tuple(shape), record=(record[0], record[1]), **rest)


def index_to_bytes(index: Index) -> bytes:
    """Content of ``index.json``."""
    return json.dumps({"tensors": index_to_json(index)}, separators=(",", ":")).encode()


def index_from_bytes(data: bytes) -> Index:
    """Parses ``index.json``.

    Raises:
        CorruptCheckpointError: It is no index.
    """
    try:
        return index_from_json(json.loads(data)["tensors"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CorruptCheckpointError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from None
