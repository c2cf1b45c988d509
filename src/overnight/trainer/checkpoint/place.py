"""A checkpoint place: fences, committed checkpoints and bases, and the names that they carry.

A place is a local (or mounted) folder or anything that fsspec reaches. Locally a checkpoint is prepared in
``<name>.partial`` and published by one rename, so that ``step-N.attempt-K.G`` either is a whole checkpoint or has been
damaged since. Object stores cannot rename: there the manifest, written last, publishes.
"""

import contextlib
import os
import re
import shutil
import tempfile
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path

PARTIAL = ".partial"
BASE_PREFIX = "base-"
_CHECKPOINT = re.compile(r"step-(\d+)\.attempt-(\d+)\.(\d+)(?:\.again-(\d+))?")
_FENCE = re.compile(r"fence-(\d+)\.(\d+)\.json(\.claim-[0-9a-f]+)?")
_BASE = re.compile(r"base-[0-9a-f]{32}")

PASSING = ".tmp"
NOW_NAME = re.compile(rf"\.now-[0-9a-f]+{re.escape(PASSING)}")
"""A file that only tells what time it is for whoever keeps the place."""

CLAIM_SECONDS = 3600.0
"""Within so much time a start has made its fence or has given up: requests to a store are repeated for a minute, but a
process may be stopped, or its machine asleep."""


@dataclass(frozen=True, order=True)
class Token:
    """The fencing token: attempt number and generation, both from 1. A later start is greater."""

    attempt: int
    generation: int = 1

    def __str__(self) -> str:
        return f"{self.attempt}.{self.generation}"


@total_ordering
@dataclass(frozen=True)
class CheckpointName:
    """``step-N.attempt-K.G``; a further save at the same step by the same token is ``….again-2`` and so on."""

    step: int
    token: Token
    save: int = 1

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """The name in ``text``, or None if it is none."""
        if (match := _CHECKPOINT.fullmatch(text)) is None:
            return None
        step, attempt, generation, save = match.groups()
        return cls(int(step), Token(int(attempt), int(generation)), int(save or 1))

    def __str__(self) -> str:
        again = f".again-{self.save}" if self.save > 1 else ""
        return f"step-{self.step}.attempt-{self.token}{again}"

    def __lt__(self, other: "CheckpointName") -> bool:
        return (self.token, self.step, self.save) < (other.token, other.step, other.save)


class Place(ABC):
    """A checkpoint place.

    Paths are relative to the place, with ``/`` between their parts; a missing file is a ``FileNotFoundError``, anything
    else that goes wrong another ``OSError``. Its text is for people, and without the password that ``url`` may have.

    Attributes:
        url: Where it is: what :func:`open_place` takes.
    """

    url: str

    @abstractmethod
    def entries(self, folder: str = "") -> list[str]:
        """Names of everything in a folder, sorted; empty if there is no such folder."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files directly in a folder, by name; empty if there is no such folder."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A whole file."""

    @abstractmethod
    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """A part of a file; shorter at its end."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Writes a file, durably: readers see all of it or none. Makes folders that are missing."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """As :meth:`write`, unless the file exists; of several callers at most one gets True."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Deletes a file or folder if it exists; readers never meet half a checkpoint."""

    @abstractmethod
    def checkpoints(self) -> list[CheckpointName]:
        """Published checkpoints, whatever their condition, oldest token first."""

    def glance(self) -> "Place":
        """The place as it is now, for who looks at it several times in a row: a store lists each folder once.

        For looking alone. Who acts upon it looks at the place itself once more, right before, and tells :meth:`gone`.
        """
        return self

    def gone(self, entry: str) -> None:
        """Tells a :meth:`glance` that an entry was deleted."""
        return  # what is looked at anew each time sees it

    def exists(self, folder: str) -> bool:
        """Whether anything is stored of a folder, visible or not."""
        return bool(self.entries(folder))

    @abstractmethod
    def ages(self, entries: Iterable[str]) -> dict[str, float]:
        """Seconds since files directly in the place were written, by the clock that dates them; without unknown ones.

        Raises:
            OSError: The place does not answer.
        """

    def unfinished(self) -> dict[str, CheckpointName | None]:
        """Folders of saves that were not published (yet), and whose; None where the name does not tell."""
        return partials(self.entries())

    def tokens(self) -> list[Token]:
        """Tokens that have claimed the place, oldest first."""
        matches = (_FENCE.fullmatch(entry) for entry in self.entries())
        return sorted({Token(int(m[1]), int(m[2])) for m in matches if m})

    def bases(self) -> list[str]:
        """Names of the published folders with frozen tensors."""
        return [entry for entry in self.entries() if is_base(entry)]

    def foreign(self) -> list[str]:
        """Names that are neither fence, checkpoint, base, nor something being prepared."""
        return [entry for entry in self.entries() if not _is_ours(entry)]


def is_base(entry: str) -> bool:
    """Whether this is the name of a published folder with frozen tensors."""
    return _BASE.fullmatch(entry) is not None


def partials(entries: Iterable[str]) -> dict[str, CheckpointName | None]:
    """Those of some names that are of folders in which something is prepared, and whose; None for that of a base."""
    found = [entry for entry in entries if PARTIAL in entry and not entry.startswith(".")]
    return {entry: CheckpointName.parse(entry.partition(PARTIAL)[0]) for entry in found}


def _is_ours(entry: str) -> bool:
    stem, _, _ = entry.partition(PARTIAL)
    return entry.startswith(".") or any(pattern.fullmatch(stem) for pattern in (_FENCE, _CHECKPOINT, _BASE))


def is_claim(entry: str) -> bool:
    """Whether this is the name of a file by which a start announces a fence in a store."""
    return (match := _FENCE.fullmatch(entry)) is not None and match[3] is not None


def settled_claims(entries: Iterable[str]) -> list[str]:
    """Announcements of fences in a store that decide nothing any more, whether their owner lives or not.

    Once the fence of its token is there, whoever wants it sees that; once a newer one is there, no owner of the token
    can commit anything. Only what announces a fence newer than all may be of a start that is just under way.

    Args:
        entries: All names in a place at one moment.
    """
    found = [(entry, match) for entry in entries if (match := _FENCE.fullmatch(entry))]
    tokens = {entry: Token(int(match[1]), int(match[2])) for entry, match in found}
    newest = max((tokens[entry] for entry, match in found if not match[3]), default=Token(0, 0))
    return [entry for entry, match in found if match[3] and tokens[entry] <= newest]


def fence_name(token: Token) -> str:
    """File name of a token's fence."""
    return f"fence-{token}.json"


def partial_name(name: CheckpointName) -> str:
    """Folder in which a checkpoint is prepared, or in which its ranks meet."""
    return f"{name}{PARTIAL}"


def _open_at_once(path: str, flags: int) -> int:
    """Whoever opens a pipe would wait for ever; this way it is an empty file, hence a damaged one."""
    return os.open(path, flags | os.O_NONBLOCK)


class LocalPlace(Place):
    """A checkpoint place in a local or mounted folder.

    Args:
        root: The folder; it is made when something is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def path(self, name: CheckpointName) -> Path:
        """Folder of a committed checkpoint."""
        return self.root / str(name)

    def partial(self, name: CheckpointName) -> Path:
        """Folder in which a checkpoint is prepared."""
        return self.root / partial_name(name)

    def fence_path(self, token: Token) -> Path:
        """File of a token's fence."""
        return self.root / fence_name(token)

    def entries(self, folder: str = "") -> list[str]:
        """Names of everything in a folder, sorted; empty if there is no such folder."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files directly in a folder, by name; empty if there is no such folder."""
        try:
            return {entry.name: entry.stat().st_size for entry in os.scandir(self.root / folder) if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, path: str) -> bytes:
        """A whole file."""
        with open(self.root / path, "rb", opener=_open_at_once) as file:
            return file.read()

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on; fewer at the end of the file."""
        with (self.root / path).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def write(self, path: str, data: bytes) -> None:
        """Writes beside the file, renames, and syncs both file and folder. Makes folders that are missing."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, data)
        sync_directory(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        """Links a finished temporary file to the name, which fails if the name exists."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{_unique()}{PASSING}")
        try:
            temporary.write_bytes(data)
            sync_file(temporary)
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target.parent)
        return True

    def remove(self, path: str) -> None:
        """Deletes a file, or renames a folder to a hidden name first, so that readers see all of it or nothing."""
        target = self.root / path
        if not target.is_dir():
            target.unlink(missing_ok=True)
            return
        trash = target.with_name(f".trash-{target.name}-{_unique()}")
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            target.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)

    def ages(self, entries: Iterable[str]) -> dict[str, float]:
        """By the clock of the file system, which may be another machine's."""
        ages: dict[str, float] = {}
        with contextlib.suppress(FileNotFoundError, PermissionError), tempfile.TemporaryFile(dir=self.root) as file:
            now = os.fstat(file.fileno()).st_mtime
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    ages[entry] = now - (self.root / entry).stat().st_mtime
        return ages

    def checkpoints(self) -> list[CheckpointName]:
        """Published checkpoints, oldest token first: the rename that gives a folder its name publishes it."""
        return sorted(name for entry in self.entries() if (name := CheckpointName.parse(entry)))

    def __str__(self) -> str:
        return str(self.root)


def open_place(url: str | Path) -> Place:
    """The place at a path, a ``file://`` URL, or any other URL that fsspec knows.

    Raises:
        BadInputError: No such protocol, or a URL that its driver refuses.
        SetupError: The protocol's driver is not installed; the hint names the pip line.
    """
    text = str(url)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalPlace(Path(text).expanduser().absolute())
    if scheme == "file":
        return LocalPlace(Path(urllib.parse.unquote(urllib.parse.urlsplit(text).path)))
    from overnight.trainer.checkpoint.remote import open_remote  # fsspec is slow to import

    return open_remote(text)


def _unique() -> str:
    """For names that nobody else uses."""
    return os.urandom(6).hex()


def sync_file(path: Path) -> None:
    """Makes a file's bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes a whole file or none: temporary name, fsync, rename. What is not durable may be lost in a power cut."""
    temporary = path.with_name(f".{path.name}.{_unique()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def files_in(folder: Path) -> Iterator[Path]:
    """Regular files directly in a folder, sorted by name."""
    return iter(sorted(path for path in folder.iterdir() if path.is_file()))
