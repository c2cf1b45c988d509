"""Fresh memory for what is read: first touches dominate a restore, so big tensors ask for huge pages.

A page of 4 KiB costs a fault and its zeroing before the first byte lands in it; two MiB at once cost a fraction. The
memory is that of torch's own allocator, only the advice to the kernel differs, and it lives as long as the tensor.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

HUGE_PAGE_BYTES = 2 << 20
_ADVISE_FROM_BYTES = 2 * HUGE_PAGE_BYTES


def fresh_bytes(num_bytes: int) -> torch.Tensor:
    """Uninitialised CPU memory as a flat uint8 tensor, in huge pages where the kernel has some to give."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= _ADVISE_FROM_BYTES and (madvise := _madvise()) is not None:
        start = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (memory.data_ptr() + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        madvise(start, end - start, mmap.MADV_HUGEPAGE)  # advice: a kernel that refuses it costs time, not correctness
    return memory


def shaped(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The same memory as a contiguous tensor of a type and shape."""
    if math.prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return memory.view(dtype).view(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).madvise
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        function.restype = ctypes.c_int
        result: Callable[[int, int, int], int] = function
        return result
    return None
