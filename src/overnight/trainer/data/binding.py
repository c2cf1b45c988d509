"""What a loader knows once it knows its rank, the number of ranks and the seed: the plan of every epoch."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from overnight.trainer.data.augment import Task
from overnight.trainer.data.position import Block, Geometry
from overnight.trainer.data.sampling import Order
from overnight.trainer.data.workers import BatchReader
from overnight.trainer.rng import derive

PLANNED_SAMPLES = 4096
"""Indices are computed for about so many samples at once: numpy's cost per call is then a few per cent."""


class Binding:
    """Who reads what: a geometry, an order, a seed, and the reader that was started for them.

    Args:
        geometry: How positions are divided among ranks and micro-batches.
        order: Which index is at which position.
        seed: Of order and augmentation.
    """

    def __init__(self, geometry: Geometry, order: Order, seed: int) -> None:
        self.geometry = geometry
        self.order = order
        self.seed = seed
        self.reader: BatchReader | None = None

    def plan(self, epoch: int, start: int, length: int, *, probe: bool) -> Iterator[tuple[Block, Task]]:
        """This rank's tasks of the rest of an epoch, their indices computed for many at a time."""
        key = derive(self.seed, "sample", epoch)
        blocks = self.geometry.blocks(start, length)
        num_blocks = max(1, PLANNED_SAMPLES // self.geometry.micro_batch)
        while chunk := list(islice(blocks, num_blocks)):
            positions = np.concatenate([np.arange(block.first, block.first + block.size) for block in chunk])
            indices = self.order.indices(epoch, positions % length)
            offset = 0
            for block in chunk:
                yield block, Task(key, block.first, indices[offset : offset + block.size], probe)
                offset += block.size
                probe = False
