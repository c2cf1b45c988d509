"""A checkpoint place: a folder with fences and committed checkpoints, and the names that they carry.

A checkpoint is prepared in ``<name>.partial`` and published by one rename, so that ``step-N.attempt-K.G`` either is a
whole checkpoint or has been damaged since.
"""

import os
import re
import secrets
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path

from overnight.core.errors import BadInputError

PARTIAL = ".partial"
_CHECKPOINT = re.compile(r"step-(\d+)\.attempt-(\d+)\.(\d+)(?:\.again-(\d+))?")
_FENCE = re.compile(r"fence-(\d+)\.(\d+)\.json")


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


class Place:
    """A checkpoint place in a local (or shared) folder.

    Args:
        root: The folder; it is made when something is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: CheckpointName) -> Path:
        """Folder of a committed checkpoint."""
        return self.root / str(name)

    def partial(self, name: CheckpointName) -> Path:
        """Folder in which a checkpoint is prepared."""
        return self.root / f"{name}{PARTIAL}"

    def fence_path(self, token: Token) -> Path:
        """File of a token's fence."""
        return self.root / f"fence-{token}.json"

    def entries(self) -> list[str]:
        """Names of everything in the place, sorted; empty if it does not exist."""
        try:
            return sorted(entry.name for entry in os.scandir(self.root))
        except FileNotFoundError:
            return []

    def checkpoints(self) -> list[CheckpointName]:
        """Published checkpoints, whatever their condition, oldest token first."""
        return sorted(name for entry in self.entries() if (name := CheckpointName.parse(entry)))

    def tokens(self) -> list[Token]:
        """Tokens with a fence, oldest first."""
        matches = (_FENCE.fullmatch(entry) for entry in self.entries())
        return sorted(Token(int(m[1]), int(m[2])) for m in matches if m)

    def foreign(self) -> list[str]:
        """Names that are neither fence, checkpoint, nor a checkpoint being prepared."""
        return [entry for entry in self.entries() if not self._ours(entry)]

    @staticmethod
    def _ours(entry: str) -> bool:
        stem = entry.removesuffix(PARTIAL)
        return entry.startswith(".") or bool(_FENCE.fullmatch(entry) or _CHECKPOINT.fullmatch(stem))

    def __str__(self) -> str:
        return str(self.root)


def open_place(url: str | Path) -> Place:
    """The place at a path or ``file://`` URL.

    Raises:
        BadInputError: A URL of another scheme; this version writes checkpoints to mounted file systems only.
    """
    text = str(url)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return Place(Path(text).expanduser().absolute())
    if scheme == "file":
        return Place(Path(urllib.parse.unquote(urllib.parse.urlsplit(text).path)))
    raise BadInputError(
        f"checkpoints cannot be written to {text}: no support for {scheme}:// in this version",
        hint="Use a path on a local or mounted file system.",
    )


def sync_directory(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a whole, durable file or none: temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def files_in(folder: Path) -> Iterator[Path]:
    """Regular files directly in a folder, sorted by name."""
    return iter(sorted(path for path in folder.iterdir() if path.is_file()))
