"""Where a loader is and which samples come next: arithmetic on global positions, the same at every world size.

An epoch is a sequence of global positions ``0 .. length - 1``. One update consumes ``global_batch`` of them in a row.
They are cut into blocks of ``micro_batch`` positions; block ``j`` of an update is micro-batch ``j // world_size`` of
rank ``j % world_size``. So the blocks, and with them every micro-batch, are the same at any world size that fits; only
who computes them changes. Ranks here are data ranks: peers that hold parts of one model are one of them, see
:mod:`overnight.trainer.data.shares`.

The position of a loader counts the samples that all ranks together have consumed. Per-rank counters repeat or lose
samples when the number of ranks changes; a global one cannot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from overnight.core.errors import IndivisibleBatchError


class Tail(StrEnum):
    """What becomes of the samples at the end of an epoch that do not fill a global batch."""

    DROP = "drop"
    """They are left out."""
    KEEP = "keep"
    """They are one short batch; only where one rank does all of it in one micro-batch."""
    PAD = "pad"
    """They are filled up with samples from the epoch's start, whose weight is 0."""


@dataclass(frozen=True)
class Block:
    """One micro-batch of one rank.

    Attributes:
        position: Global position at which the update begins.
        end: Global position after the update.
        first: Global position of the block's first sample.
        size: Number of samples in the block, padding included.
        index_in_update: Which micro-batch of the update it is, from 0.
        last_of_update: Whether the update is complete after it.
    """

    position: int
    end: int
    first: int
    size: int
    index_in_update: int
    last_of_update: bool


@dataclass(frozen=True)
class Geometry:
    """How the positions of an epoch are divided among updates, ranks and micro-batches.

    Attributes:
        micro_batch: Samples per rank and micro-batch.
        accumulate: Micro-batches per rank and update.
        rank: This rank.
        world_size: Number of ranks.
        tail: The rule for the end of an epoch.
    """

    micro_batch: int
    accumulate: int
    rank: int
    world_size: int
    tail: Tail

    @property
    def global_batch(self) -> int:
        """Samples per update, all ranks together."""
        return self.micro_batch * self.accumulate * self.world_size

    def update_end(self, position: int, length: int) -> int | None:
        """The position after the update that begins at ``position``; None if the epoch has no further update."""
        end = position + self.global_batch
        if end <= length:
            return end
        if self.tail is Tail.DROP or position >= length:
            return None
        return length

    def num_updates(self, length: int, position: int = 0) -> int:
        """Updates from ``position`` to the end of an epoch of ``length`` samples."""
        rest = max(length - position, 0)
        return rest // self.global_batch if self.tail is Tail.DROP else -(-rest // self.global_batch)

    def num_samples(self, length: int) -> int:
        """Samples that one whole epoch consumes, padding not counted."""
        return self.num_updates(length) * self.global_batch if self.tail is Tail.DROP else length

    def blocks(self, position: int, length: int) -> Iterator[Block]:
        """This rank's micro-batches from ``position`` to the end of the epoch."""
        while (end := self.update_end(position, length)) is not None:
            for index in range(self.accumulate):
                first = position + (index * self.world_size + self.rank) * self.micro_batch
                size = min(self.micro_batch, end - first) if self.tail is Tail.KEEP else self.micro_batch
                yield Block(position, end, first, size, index, index == self.accumulate - 1)
            position = end


def weights_of(block: Block, length: int) -> NDArray[np.float32]:
    """1 for each sample of the block, 0 for padding; float32, shape ``[size]``."""
    return (np.arange(block.first, block.first + block.size) < length).astype(np.float32)


def divide(global_batch: int, micro_batch: int | None, world_size: int, noun: str = "rank") -> tuple[int, int]:
    """Divides a global batch among ranks.

    Args:
        global_batch: Samples per update, all ranks together.
        micro_batch: Samples per rank and backward pass; None takes the rank's whole share in one.
        world_size: Number of ranks.
        noun: What an error calls them.

    Returns:
        ``(micro_batch, accumulate)`` with ``micro_batch * accumulate * world_size == global_batch``.

    Raises:
        IndivisibleBatchError: It does not divide; the hint names numbers of ranks and batch sizes that do.
    """
    unit = micro_batch or 1
    if global_batch % (world_size * unit) == 0:
        micro = micro_batch or global_batch // world_size
        return micro, global_batch // (world_size * micro)
    fitting_ranks = world_sizes(global_batch, micro_batch)
    step = world_size * unit
    below = global_batch // step * step
    near = [size for size in (below, below + step) if size > 0]
    per_micro = f" x micro batch {micro_batch}" if micro_batch else ""
    raise IndivisibleBatchError(
        f"global batch {global_batch} does not divide by {world_size} {noun}(s){per_micro}",
        hint=(
            f"Numbers of {noun}s that fit: {_listed(fitting_ranks)}. "
            f"Global batches that fit {world_size} {noun}(s): {_listed(near)} (multiples of {step})."
        ),
        global_batch=global_batch,
        micro_batch=micro_batch,
        world_size=world_size,
        fitting_world_sizes=fitting_ranks,
        fitting_global_batches=near,
    )


def world_sizes(global_batch: int, micro_batch: int | None) -> list[int]:
    """Every number of ranks by which a global batch divides, ascending; empty if the micro batch does not fit."""
    num_blocks, rest = divmod(global_batch, micro_batch or 1)
    return [] if rest else [size for size in range(1, num_blocks + 1) if num_blocks % size == 0]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "none"
