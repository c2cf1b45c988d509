"""Random blocks of what is copied while training goes on: proof that nothing but an optimizer's step changes it.

Version counters alone prove nothing: fused optimizers, BatchNorm and writes through ``.data`` do not move them. So
blocks are taken from every tensor at the boundary, before training goes on, and compared with the copy once it is
complete, and with the source. A difference in the copy means that it mixes two moments. One in the source alone means
luck.
"""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.staging.gather import Gather, write_pieces

BLOCK_BYTES = 64
STRIDE_BYTES = 16 << 20
"""A tensor gives one block, and one more for each of these."""


class Probe:
    """Takes blocks of one save and compares them.

    Args:
        random: For the positions; never a generator that training uses.
        scratch: Memory of its own, for as many blocks as there are.
        group: The pieces; none is smaller than a block.
    """

    def __init__(
        self, random: np.random.Generator, scratch: Arena, group: Gather, addresses: Sequence[int] | NDArray[np.uint64]
    ) -> None:
        counts = 1 + group.lengths // STRIDE_BYTES
        self._owner = np.repeat(np.arange(len(group)), counts)
        lengths = group.lengths[self._owner]
        within = random.integers(0, lengths - BLOCK_BYTES + 1)
        self._rows = np.empty((len(within), 2), dtype=np.uint64)
        self._rows[:, 0] = np.asarray(addresses, dtype=np.uint64)[self._owner] + within.astype(np.uint64)
        self._rows[:, 1] = BLOCK_BYTES
        self._offsets = group.offsets[self._owner] + within
        self._scratch = scratch
        self._before = self._take()

    def _take(self) -> NDArray[np.uint8]:
        write_pieces(self._scratch.fileno(), 0, self._rows.copy())
        data = os.pread(self._scratch.fileno(), BLOCK_BYTES * len(self._rows), 0)
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, BLOCK_BYTES)

    def changed_source(self) -> list[int]:
        """Which pieces are not now what they were at the boundary."""
        return self._owners(self._take())

    def wrong_copies(self, arena: Arena) -> list[int]:
        """Which pieces of the arena are not what they were at the boundary."""
        return self._owners(arena.array()[self._offsets[:, None] + np.arange(BLOCK_BYTES)])

    def _owners(self, now: NDArray[np.uint8]) -> list[int]:
        differs = (now != self._before).any(axis=1)
        return sorted({int(index) for index in self._owner[differs]})


def scratch_bytes(group: Gather) -> int:
    """Bytes that the blocks of a probe take."""
    return int((1 + group.lengths // STRIDE_BYTES).sum()) * BLOCK_BYTES
