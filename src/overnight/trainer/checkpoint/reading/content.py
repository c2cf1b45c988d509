"""The files of a checkpoint that are not tensors: the index, and what each rank saved as JSON. Free of torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.index import INDEX, Index, index_from_bytes, private_key
from overnight.trainer.checkpoint.manifest import FileEntry
from overnight.trainer.checkpoint.reading.source import Source, Want
from overnight.trainer.checkpoint.reading.transfer import transfer


@dataclass(frozen=True)
class SavedObjects:
    """The objects that one rank saved.

    Attributes:
        objects: JSON by name; tensors are references to keys.
        private: Keys under which this rank stored what differs from the other ranks.
        rank: Which.
    """

    objects: dict[str, Any]
    private: frozenset[str]
    rank: int

    def stored_key(self, key: str) -> str:
        """The key in the index of a key to which an object refers."""
        return private_key(self.rank, key) if key in self.private else key

    def stored_keys(self, name: str) -> dict[str, str]:
        """Keys in the index of one object's tensors, by the keys to which the object refers."""
        return {key: self.stored_key(key) for key in _tensor_keys(self.objects[name])}


def _tensor_keys(encoded: Any) -> Iterator[str]:
    if isinstance(encoded, list):
        for item in encoded:
            yield from _tensor_keys(item)
    elif isinstance(encoded, dict):
        if encoded.get("$") in ("tensor", "array"):
            yield encoded["key"]
        else:
            for item in encoded.values():
                yield from _tensor_keys(item)


def read_verified(source: Source, files: Mapping[str, FileEntry], name: str) -> bytes:
    """A whole small file, as the manifest describes it.

    Raises:
        CorruptCheckpointError: It is not listed, missing, truncated or altered.
        UnavailableError: A remote store did not answer.
    """
    if (entry := files.get(name)) is None:
        raise CorruptCheckpointError(f"{name} is not listed in the manifest")
    data = bytearray(entry.size)
    everything = [(name, segment) for segment in entry.segments]
    transfer(source, files, {name: [Want(0, memoryview(data))]}, everything)
    return bytes(data)


def read_index(source: Source, files: Mapping[str, FileEntry]) -> Index:
    """Where each tensor lies; raises as :func:`read_verified` does."""
    return index_from_bytes(read_verified(source, files, INDEX))


def read_objects(source: Source, files: Mapping[str, FileEntry], rank: int) -> SavedObjects:
    """What a rank saved that is not a tensor; raises as :func:`read_verified` does."""
    name = f"state-{rank}.json"
    try:
        body = json.loads(read_verified(source, files, name))
        return SavedObjects(body["objects"], frozenset(body["private"]), rank)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
