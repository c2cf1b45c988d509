"""Shared memory that is allocated once, touched once and then reused by every save of a rank.

A memfd, not a file in ``/dev/shm``: that is often limited to 64 MB in containers, and can be left behind by a kill.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from overnight.core.errors import SaveFailedError

_PAGE_BYTES = mmap.PAGESIZE


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("overnight-arena", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="overnight-arena-")
    Path(path).unlink()
    return descriptor


class Arena:
    """Memory that this process fills and the writer process reads.

    Args:
        num_bytes: Size; rounded up to whole pages. Memory is taken when it is first written to.
        number: Tells arenas of one rank apart.

    Raises:
        SaveFailedError: The system gives no such memory.
    """

    def __init__(self, num_bytes: int, number: int) -> None:
        self.number = number
        self.size = max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES
        self._descriptor = _anonymous_file()
        self._release: Callable[[], None] | None = None
        try:
            os.ftruncate(self._descriptor, self.size)
            self._map: mmap.mmap | None = mmap.mmap(self._descriptor, self.size)
        except OSError as error:
            os.close(self._descriptor)
            raise no_memory(self.size, error) from error

    def fileno(self) -> int:
        """Descriptor of the memory; it stays this object's."""
        return self._descriptor

    @property
    def address(self) -> int:
        """Where the memory begins in this process."""
        return int(self.array().ctypes.data)

    def touch(self) -> None:
        """Takes all memory now, outside of any save: half a second per GiB, without the interpreter's lock.

        Raises:
            SaveFailedError: There is not enough.
        """
        try:
            os.posix_fallocate(self._descriptor, 0, self.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise no_memory(self.size, error) from error

    def array(self) -> NDArray[np.uint8]:
        """All bytes as an array that shares the memory."""
        if self._map is None:
            raise ValueError("the arena is closed")
        return np.frombuffer(self._map, dtype=np.uint8)

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in the arena; it must be gone before :meth:`close`.

        Args:
            offset: Of its first byte, a multiple of 64.
            dtype, shape: Of the tensor.
        """
        if self._map is None:
            raise ValueError("the arena is closed")
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def pin(self) -> bool:
        """Lets CUDA devices copy into it on their own; whether they can. Once per arena."""
        if self._release is not None:
            return True
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.address
        if int(cudart.cudaHostRegister(address, self.size, 0)) != 0:
            _forget_failure()
            return False
        self._release = lambda: cudart.cudaHostUnregister(address)
        return True

    def close(self) -> None:
        """Gives the memory back, once the writer process has closed it too. Safe to call twice."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        if self._release is not None:
            self._release()
        with suppress(BufferError):  # a view is still held: the mapping goes with it
            mapped.close()
        os.close(self._descriptor)


def _forget_failure() -> None:
    """CUDA remembers a failed call and tells it to whoever launches the next kernel: let that be nobody of training."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def no_memory(num_bytes: int, error: OSError) -> SaveFailedError:
    """The error for staging memory that cannot be had."""
    return SaveFailedError(
        f"no {num_bytes / 1e6:.0f} MB of shared memory to stage a save in: {error.strerror}",
        hint="A save needs as much free memory as the tracked state is large.",
    )
