"""Fresh memory for what is read: first touches dominate a restore, so it comes in huge pages.

A page of 4 KiB costs a fault and its zeroing before the first byte lands in it; two MiB at once cost a fraction.
Tensors lie side by side in slabs, so that whole huge pages serve many of them, but each has a storage of its own: who
copies or saves one does not meet the others. A slab is freed with the last of its tensors.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch

SLAB_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT_BYTES = 64


class Slabs:
    """Hands out memory for tensors that live and die together, such as those of one object."""

    def __init__(self) -> None:
        self._slab = memoryview(bytearray())
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Zeroed memory, at a multiple of 64 bytes."""
        if num_bytes >= SLAB_BYTES:
            return _slab(num_bytes)[:num_bytes]
        start = -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start + num_bytes > len(self._slab):
            self._slab, start = _slab(SLAB_BYTES), 0
        self._used = start + num_bytes
        return self._slab[start : self._used]


def _slab(num_bytes: int) -> memoryview:
    """Anonymous memory that begins with a huge page; what is not touched costs nothing."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice: a kernel without huge pages costs time, not correctness
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + num_bytes]


def shaped(memory: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor in this very memory, which it keeps alive."""
    if math.prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
