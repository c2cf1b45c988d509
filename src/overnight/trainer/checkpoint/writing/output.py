"""A new file, written from front to end; past the page cache where both sides are aligned and the file system can.

Bytes that lie page by page in shared memory and in the file go from one to the disk without a copy: a save then takes
a third of the processor time, which training may want, and leaves the page cache to the data that training reads.
What is not aligned (headers, small tensors, ends) takes the usual way; no page of the file is written both ways.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from overnight.trainer.checkpoint.writing.order import PAGE_BYTES

_NOT_ABLE = (errno.EINVAL, errno.EOPNOTSUPP)


class Output:
    """A file that is being written.

    Args:
        path: Where; an older file of that name is overwritten.
        direct: Whether to write past the page cache; not for what is read again soon.
        progress: Called with numbers of bytes.

    Attributes:
        position: Bytes written.
    """

    def __init__(self, path: Path, *, direct: bool, progress: Callable[[int], None]) -> None:
        self.position = 0
        self._progress = progress
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._direct = _open_directly(path) if direct else -1

    def append(self, data: memoryview) -> None:
        """Writes through the page cache.

        Raises:
            OSError: The file system refused.
        """
        while data:
            written = os.pwrite(self._descriptor, data, self.position)
            self._advance(written)
            data = data[written:]

    def append_pages(self, data: memoryview) -> None:
        """Writes data, whole pages of it directly; the memory should begin at a page.

        Raises:
            OSError: The file system refused.
        """
        num_whole = len(data) // PAGE_BYTES * PAGE_BYTES if self.position % PAGE_BYTES == 0 else 0
        pages, rest = data[:num_whole], data[num_whole:]
        while pages and self._direct >= 0:
            try:
                written = os.pwrite(self._direct, pages, self.position)
            except OSError as error:
                if error.errno not in _NOT_ABLE:
                    raise
                written = 0
            if written % PAGE_BYTES or not written:
                self._give_up_direct()
            self._advance(written)
            pages = pages[written:]
        self.append(pages)
        self.append(rest)

    def _advance(self, num_bytes: int) -> None:
        self.position += num_bytes
        self._progress(num_bytes)

    def sync(self) -> None:
        """Makes everything durable.

        Raises:
            OSError: The file system refused, or holds another number of bytes than were written.
        """
        os.fsync(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        if size != self.position:
            raise OSError(f"the file has {size} bytes after {self.position} were written")

    def _give_up_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def close(self) -> None:
        """Closes the file. May be called twice."""
        self._give_up_direct()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open_directly(path: Path) -> int:
    """A second descriptor that goes past the page cache; -1 if there is no such way."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        return os.open(path, os.O_WRONLY | flag | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NOT_ABLE:
            raise
        return -1
