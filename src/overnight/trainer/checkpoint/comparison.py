"""How two checkpoints differ: which tensors, by how much, and what else.

What is equal is known from the hashes in the index and is not read. Needs torch for the rest.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overnight.trainer.checkpoint.index import Index, TensorEntry
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.reading.assembly import Assembly
from overnight.trainer.checkpoint.reading.content import read_index, read_objects
from overnight.trainer.checkpoint.reading.inspection import locate
from overnight.trainer.checkpoint.reading.source import Source
from overnight.trainer.checkpoint.reading.transfer import transfer

MAX_TEXT = 80


@dataclass(frozen=True)
class TensorChange:
    """A tensor that is in both checkpoints and not the same.

    Attributes:
        key: Its name.
        before, after: Type and shape.
        max_change: Largest absolute difference of an element; None where types or shapes differ, NaN where one side has
            a NaN that the other has not.
        relative_change: Norm of the difference over the norm of the first; None as above.
        num_changed: Elements that are not equal; None as above.
        num_elements: Elements in all, of the first.
    """

    key: str
    before: str
    after: str
    max_change: float | None
    relative_change: float | None
    num_changed: int | None
    num_elements: int


@dataclass(frozen=True)
class ValueChange:
    """Something that is not a tensor and differs, as short texts; ``absent`` where one side has nothing."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """What differs.

    Attributes:
        first, second: Names of the checkpoints.
        tensors: Changed ones, by name.
        only_first, only_second: Tensors that the other has not.
        num_equal: Tensors that are the same in both.
        values: What else the first rank saved and is not the same.
    """

    first: str
    second: str
    tensors: tuple[TensorChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    num_equal: int
    values: tuple[ValueChange, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same state."""
        return not (self.tensors or self.only_first or self.only_second or self.values)

    def to_json(self) -> dict[str, Any]:
        """For programs; what is no finite number is text."""
        body = asdict(self) | {"equal": self.is_equal}
        for change in body["tensors"]:
            for name in ("max_change", "relative_change"):
                if change[name] is not None and not math.isfinite(change[name]):
                    change[name] = str(change[name])
        return body


def compare(first: str | Path, second: str | Path) -> Comparison:
    """Compares two checkpoints; of a checkpoint place, the newest good one counts.

    Raises:
        NotFoundError: There is no checkpoint at one of the paths.
        CorruptCheckpointError: What has to be read is damaged.
        UnavailableError: A remote place does not answer.
    """
    left, right = _open(first), _open(second)
    both = sorted(left.index.keys() & right.index.keys())
    changed = [key for key in both if not _is_known_equal(left.index[key], right.index[key])]
    changes = [change for key in changed if (change := _change(key, left, right)) is not None]
    return Comparison(
        first=str(left.manifest.name),
        second=str(right.manifest.name),
        tensors=tuple(changes),
        only_first=tuple(sorted(left.index.keys() - right.index.keys())),
        only_second=tuple(sorted(right.index.keys() - left.index.keys())),
        num_equal=len(both) - len(changes),
        values=tuple(_values(left.objects, right.objects, "")),
    )


@dataclass(frozen=True)
class _Side:
    source: Source
    manifest: Manifest
    index: Index
    objects: Any

    def tensor(self, key: str) -> torch.Tensor:
        assembly = Assembly(self.index)
        tensor = assembly.tensor(key)
        transfer(self.source, self.manifest.files, assembly.wants)
        assembly.finish()
        return tensor


def _open(path: str | Path) -> _Side:
    source, manifest = locate(path)
    index = read_index(source, manifest.files)
    return _Side(source, manifest, index, read_objects(source, manifest.files, 0).objects)


def _is_known_equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether the hashes say so. What is the same in other chunks, or has none, is not recognised, and read."""
    if (one.dtype, one.shape, len(one.chunks)) != (other.dtype, other.shape, len(other.chunks)):
        return False
    pairs = zip(one.chunks, other.chunks, strict=True)
    return all(bool(a.xxh3_128) and (a.at, a.xxh3_128) == (b.at, b.xxh3_128) for a, b in pairs)


def _describe(entry: TensorEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _change(key: str, left: _Side, right: _Side) -> TensorChange | None:
    """How a tensor has changed; None if it turns out that it has not."""
    one, other = left.index[key], right.index[key]
    before, after, size = _describe(one), _describe(other), math.prod(one.shape)
    if before != after:
        return TensorChange(key, before, after, None, None, None, size)
    was, now = left.tensor(key), right.tensor(key)
    if torch.equal(was.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8)):
        return None
    wide = torch.complex128 if was.is_complex() else torch.float64
    was, now = was.to(wide), now.to(wide)
    difference = (now - was).abs()
    difference[(was == now) | (was.isnan() & now.isnan())] = 0.0  # infinities that stay, and NaN that stays NaN
    norm, moved = was.abs().nan_to_num().norm().item(), difference.norm().item()
    return TensorChange(
        key=key,
        before=before,
        after=after,
        max_change=difference.max().item(),
        relative_change=moved / norm if norm else math.inf,
        num_changed=int((difference != 0).sum().item()),
        num_elements=size,
    )


def _values(before: Any, after: Any, path: str) -> Iterator[ValueChange]:
    """Leaves that differ, in two trees of JSON. References to tensors are left out: those have been compared."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.get("$") in ("tensor", "array") and after.get("$") == before["$"]:
            return
        for key in dict.fromkeys([*before, *after]):
            inside = f"{path}.{key}" if path else str(key)
            yield from _values(before.get(key, _ABSENT), after.get(key, _ABSENT), inside)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _values(one, other, f"{path}[{number}]")
    elif before != after or type(before) is not type(after):
        yield ValueChange(path, _text(before), _text(after))


_ABSENT = object()


def _text(value: Any) -> str:
    text = "absent" if value is _ABSENT else repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
