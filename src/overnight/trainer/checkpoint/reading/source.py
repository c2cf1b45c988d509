"""Where the bytes of a checkpoint come from: a folder, read with ``preadv`` straight to where they belong, or a store
behind fsspec, read with one range request per segment.

Both hash what they read in the same pass and say exactly which file is missing, truncated or altered. A store that does
not answer is no damage but an error of its own, so that nobody falls back to an older checkpoint for a cut cable.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import xxhash

from overnight.core.errors import CorruptCheckpointError, OvernightError, UnavailableError
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Place

BLOCK_BYTES = 256 << 10
"""Read and hashed at a time: small enough for a core's own cache, so that the hash finds the bytes there."""

DIRECT_BYTES = 64 << 10
"""Less than this is copied out of a block: a system call and a hash update of its own would cost more."""

T = TypeVar("T")


@dataclass(frozen=True)
class Want:
    """Bytes of a file and where they shall go.

    Attributes:
        offset: Of the first byte in the file.
        into: Writable memory; its length says how many bytes.
    """

    offset: int
    into: memoryview

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.offset + len(self.into)

    def within(self, start: int, end: int) -> "Want | None":
        """The part that lies in a range of the file, None if there is none."""
        first, last = max(self.offset, start), min(self.end, end)
        if first >= last:
            return None
        return Want(first, self.into[first - self.offset : last - self.offset])


class Source(Protocol):
    """A checkpoint's files by name."""

    num_requests: int
    """How many reads at a time serve it best."""

    url: str
    """Where it is; may hold a password, which its text does not."""

    def names(self) -> set[str]:
        """Names of the files directly in the checkpoint, and of whatever else is there."""

    def size(self, file: str) -> int:
        """Bytes of a file.

        Raises:
            CorruptCheckpointError: It is missing or no regular file.
        """

    def read(self, file: str, start: int, end: int, wants: Sequence[Want]) -> str:
        """Reads a range of a file once, places what is wanted, and returns the xxh3-128 of the range in hex.

        Args:
            file: Name.
            start, end: The range.
            wants: Disjoint, ascending, inside the range.

        Raises:
            CorruptCheckpointError: The file is missing, too short or cannot be read.
            UnavailableError: A remote store did not answer.
        """

    def read_all(self, file: str) -> bytes:
        """A whole, small file, not verified; raises as :meth:`read` does."""


class FolderSource:
    """A checkpoint in a local or mounted folder.

    Args:
        folder: The checkpoint.
    """

    num_requests = 0  # as many as there are cores

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> set[str]:
        """Names of everything in the folder.

        Raises:
            CorruptCheckpointError: It cannot be read.
        """
        with _naming(self.folder.name):
            return {entry.name for entry in os.scandir(self.folder)}

    def size(self, file: str) -> int:
        """Bytes of a file, which need not be in the folder itself: bases lie beside it.

        Raises:
            CorruptCheckpointError: It is missing or no regular file.
        """
        with _naming(file):
            found = (self.folder / file).stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise CorruptCheckpointError(f"{file} is no regular file")
        return found.st_size

    def read(self, file: str, start: int, end: int, wants: Sequence[Want]) -> str:
        """Reads a range once, big wants straight into their memory; returns the xxh3-128 of the range in hex.

        Raises:
            CorruptCheckpointError: The file is missing, too short or cannot be read.
        """
        digest = xxhash.xxh3_128()
        scratch = memoryview(bytearray(min(BLOCK_BYTES, end - start)))
        with _naming(file):
            descriptor = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                for offset, block, small in _blocks(start, end, wants, scratch):
                    _fill(descriptor, offset, block, file)
                    digest.update(block)
                    for want in small:
                        want.into[:] = block[want.offset - offset : want.end - offset]
            finally:
                os.close(descriptor)
        return digest.hexdigest()

    def read_all(self, file: str) -> bytes:
        """A whole, small file, not verified.

        Raises:
            CorruptCheckpointError: It is missing, no regular file or cannot be read.
        """
        self.size(file)
        with _naming(file):
            return (self.folder / file).read_bytes()


def _blocks(
    start: int, end: int, wants: Sequence[Want], scratch: memoryview
) -> Iterator[tuple[int, memoryview, Sequence[Want]]]:
    """Cuts a range into blocks to read in turn: offset, memory, and what to copy out of it afterwards.

    Big wants are their own memory; everything between them passes through ``scratch``.
    """
    position = start
    small: list[Want] = []
    for want in [*wants, None]:
        if want is not None and len(want.into) < DIRECT_BYTES:
            small.append(want)
            continue
        gap_end = end if want is None else want.offset
        yield from _gap_blocks(position, gap_end, small, scratch)
        small = []
        position = gap_end
        if want is not None:
            for at in range(0, len(want.into), BLOCK_BYTES):
                yield want.offset + at, want.into[at : at + BLOCK_BYTES], ()
            position = want.end


def _gap_blocks(
    start: int, end: int, wants: list[Want], scratch: memoryview
) -> Iterator[tuple[int, memoryview, Sequence[Want]]]:
    first = 0
    for offset in range(start, end, len(scratch) or 1):
        stop = min(offset + len(scratch), end)
        here: list[Want] = []
        while first < len(wants) and wants[first].offset < stop:
            if (part := wants[first].within(offset, stop)) is not None:
                here.append(part)
            if wants[first].end > stop:
                break
            first += 1
        yield offset, scratch[: stop - offset], here


def _fill(descriptor: int, offset: int, block: memoryview, file: str) -> None:
    done = 0
    while done < len(block):
        count = os.preadv(descriptor, [block[done:]], offset + done)
        if count == 0:
            raise CorruptCheckpointError(f"{file} ends at byte {offset + done}, before its end in the manifest")
        done += count


@contextmanager
def _naming(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(f"{file} cannot be read: {error.strerror or error}") from None


class PlaceSource:
    """A checkpoint in a place that is no folder of this machine.

    Requests are answered into memory of their own first, since no store reads into ours; what is in flight is bounded
    by ``num_requests`` segments.

    Args:
        place: The place.
        name: The checkpoint.
    """

    num_requests = 16

    def __init__(self, place: Place, name: CheckpointName) -> None:
        self.url = f"{place.url}/{name}"
        self._place = place
        self._name = name
        self._sizes: dict[str, dict[str, int]] = {}

    def __str__(self) -> str:
        return f"{self._place}/{self._name}"

    def names(self) -> set[str]:
        """Names of the files in the checkpoint, listed once.

        Raises:
            UnavailableError: The store did not answer.
        """
        return set(self._sizes_in(str(self._name)))

    def size(self, file: str) -> int:
        """Bytes of a file, as its folder was listed once.

        Raises:
            CorruptCheckpointError: It is missing.
            UnavailableError: The store did not answer.
        """
        folder, _, name = self._path(file).rpartition("/")
        if name not in (sizes := self._sizes_in(folder)):
            raise CorruptCheckpointError(f"{file} cannot be read: No such file or directory")
        return sizes[name]

    def read(self, file: str, start: int, end: int, wants: Sequence[Want]) -> str:
        """Reads a range with one request, copies what is wanted, and returns the xxh3-128 of the range in hex.

        Raises:
            CorruptCheckpointError: The file is missing or too short.
            UnavailableError: The store did not answer.
        """
        path = self._path(file)
        data = self._try(file, lambda: self._place.read_range(path, start, end - start)) if end > start else b""
        if len(data) != end - start:
            raise CorruptCheckpointError(f"{file} ends at byte {start + len(data)}, before its end in the manifest")
        view = memoryview(data)
        for want in wants:
            want.into[:] = view[want.offset - start : want.end - start]
        return xxhash.xxh3_128_hexdigest(data)

    def read_all(self, file: str) -> bytes:
        """A whole, small file, not verified; raises as :meth:`read` does."""
        return self._try(file, lambda: self._place.read(self._path(file)))

    def _path(self, file: str) -> str:
        return file.removeprefix("../") if file.startswith("../") else f"{self._name}/{file}"

    def _sizes_in(self, folder: str) -> dict[str, int]:
        if folder not in self._sizes:
            self._sizes[folder] = self._try(folder, lambda: self._place.sizes(folder))
        return self._sizes[folder]

    def _try(self, file: str, request: Callable[[], T]) -> T:
        try:
            return answered(f"{file} of {self}", request)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CorruptCheckpointError(f"{file} cannot be read: No such file or directory") from None


def answered(what: str, request: Callable[[], T]) -> T:
    """What a place answers; it has asked the store again and again by itself.

    Args:
        what: Is asked for, for the message.
        request: May raise whatever the store's driver does.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: It is not there.
        UnavailableError: Anything else went wrong.
    """
    try:
        return request()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, OvernightError):
        raise
    except Exception as error:  # each driver has errors of its own
        raise UnavailableError(
            f"{what} cannot be read: {type(error).__name__}: {error}",
            hint="The place does not answer; what is in it may well be good. Try again later.",
        ) from error


def open_source(place: Place, name: CheckpointName) -> Source:
    """The files of a checkpoint in a place."""
    return FolderSource(place.path(name)) if isinstance(place, LocalPlace) else PlaceSource(place, name)
