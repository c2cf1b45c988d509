"""Where each tensor lies in the arena: computed once, kept as long as the state has the same form."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from overnight.trainer.checkpoint.staging.gather import ALIGNMENT, Gather
from overnight.trainer.checkpoint.staging.ownership import Memory
from overnight.trainer.checkpoint.state import Encoded, Leaf
from overnight.trainer.checkpoint.writing.order import LARGE_BYTES, PAGE_BYTES, Piece, Pieces

MIN_LATER_BYTES = 4096
"""Smaller tensors are copied at once: that costs less than watching them."""


class Way(IntEnum):
    """How a tensor gets into the arena; all of one way lie together."""

    NOW = 0
    """At the boundary, in one call for all."""

    STRIDED = 1
    """At the boundary, by torch, since its memory is not its content: not contiguous, or conjugated."""

    DEVICE = 2
    """By the device itself, in the order of its stream."""

    LATER = 3
    """While training goes on."""


Signature = list[tuple[str, Way, torch.dtype, torch.Size]]
"""What a layout depends on: name, way and form of every leaf."""


def choose_ways(encoded: Encoded, owned: Memory, restless: Collection[str]) -> list[Way]:
    """How each leaf gets into the arena. A microsecond for each: training waits.

    Args:
        encoded: The state.
        owned: Memory that only an optimizer's step changes.
        restless: Names of objects of which that is not true.
    """
    ways = []
    for leaf in encoded.leaves.values():
        tensor = leaf.tensor
        if not tensor.is_cpu:
            way = Way.DEVICE if tensor.is_cuda else Way.STRIDED
        elif not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            way = Way.STRIDED
        elif (size := tensor.nbytes) < MIN_LATER_BYTES or owned.get(tensor.data_ptr()) != size:
            way = Way.NOW
        else:
            way = Way.NOW if restless and object_of(leaf.key, encoded) in restless else Way.LATER
        ways.append(way)
    return ways


def signature_of(encoded: Encoded, ways: Sequence[Way]) -> Signature:
    """What the layout of a state depends on."""
    leaves = encoded.leaves.values()
    return [(leaf.key, way, leaf.tensor.dtype, leaf.tensor.shape) for leaf, way in zip(leaves, ways, strict=True)]


@dataclass(frozen=True)
class Layout:
    """A place in the arena for every leaf.

    Attributes:
        signature: See :func:`signature_of`.
        pieces: All tensors, as the writer wants them, in the order of the arena.
        sources: For each way the indices of its leaves, in the order of the arena.
        names: For each piece the tracked object that it was found in first.
        groups: For each way its pieces.
        size: Bytes.
    """

    signature: Signature
    pieces: Pieces
    sources: tuple[NDArray[np.intp], ...]
    names: tuple[str, ...]
    groups: tuple[Gather, ...]
    size: int

    def members(self, way: Way) -> range:
        """Indices of the pieces that go one way."""
        start = sum(len(group) for group in self.groups[:way])
        return range(start, start + len(self.groups[way]))

    @cached_property
    def watched(self) -> NDArray[np.intp]:
        """Indices of the leaves whose way depends on where they are: in memory that an optimizer owns."""
        return np.concatenate([self.sources[Way.LATER], self.sources[Way.DEVICE]])

    def pick(self, tensors: Sequence[torch.Tensor], way: Way) -> list[torch.Tensor]:
        """The tensors of the leaves that go one way, in the order of the arena."""
        return [tensors[index] for index in self.sources[way].tolist()]


def lay_out(encoded: Encoded, ways: Sequence[Way], signature: Signature, frozen: Container[int]) -> Layout:
    """Gives every leaf its place.

    Args:
        encoded: The state.
        ways: Of its leaves.
        signature: Of both.
        frozen: Addresses of parameters that no optimizer is expected to change.
    """
    leaves = list(encoded.leaves.values())
    sources: list[NDArray[np.intp]] = []
    groups: list[Gather] = []
    end = 0
    for way in Way:
        indices = [index for index, chosen in enumerate(ways) if chosen is way]
        indices.sort(key=lambda index: leaves[index].tensor.nbytes < LARGE_BYTES)  # large ones, at pages, come first
        lengths = [leaves[index].tensor.nbytes for index in indices]
        groups.append(Gather(end, lengths, alignment=1 if way is Way.NOW else ALIGNMENT))  # training waits for these
        end = -(-groups[-1].end // PAGE_BYTES) * PAGE_BYTES
        sources.append(np.array(indices, dtype=np.intp))
    order = [index for indices in sources for index in indices.tolist()]
    offsets = [int(offset) for group in groups for offset in group.offsets]
    pieces = Pieces(_piece(leaves[index], offset, frozen) for index, offset in zip(order, offsets, strict=True))
    names = tuple(object_of(piece.key, encoded) for piece in pieces)
    return Layout(signature, pieces, tuple(sources), names, tuple(groups), end)


def object_of(key: str, encoded: Encoded) -> str:
    """Name of the tracked object that a tensor was found in first: what its key begins with."""
    name = key.partition(".")[0].partition("~")[0]
    if name in encoded.objects:
        return name
    return max((name for name in encoded.objects if key.startswith(name)), key=len, default=key)


def _piece(leaf: Leaf, offset: int, frozen: Container[int]) -> Piece:
    tensor = leaf.tensor
    return Piece(
        key=leaf.key,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        offset=offset,
        num_bytes=tensor.nbytes,
        whole=leaf.whole,
        at=leaf.at,
        frozen=tensor.data_ptr() in frozen,
    )
