"""The manifest: written last, it says what a checkpoint consists of and where it comes from.

Nothing stock notices a flipped byte in a checkpoint (``torch.load``, DCP and safetensors all load it), so the manifest
holds the size and xxh3-128 of every file, and a hash of itself.
"""

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from overnight import __version__
from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.place import CheckpointName, Token, files_in

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint: its size in bytes and its xxh3-128 in hex."""

    size: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: Updates done.
        attempt, generation: The token that wrote it.
        save: 1 for the first save of the token at this step.
        parent: Name of the checkpoint from which the token forked, None at a fresh start.
        created_at: Aware UTC, ISO 8601; for people.
        world_size: Ranks that wrote it.
        versions: Of python, torch, numpy and overnight.
        threads: Compute threads of a rank; bits are promised for the same number only.
        seed: The trial's seed.
        position: ``loops``, the names of the open ones, and ``loaders`` with their epoch and position.
        content: Hash of the whole state, to prove that nothing changed.
        files: By name.
    """

    step: int
    attempt: int
    generation: int
    save: int
    parent: str | None
    created_at: str
    world_size: int
    versions: dict[str, str]
    threads: int
    seed: int
    position: dict[str, Any]
    content: str
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def name(self) -> CheckpointName:
        """The name under which it is published."""
        return CheckpointName(self.step, Token(self.attempt, self.generation), self.save)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content: a body and its hash."""
        body = dataclasses.asdict(self)
        return json.dumps({"body": body, "xxh3_128": _hash_body(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parses and verifies a manifest.

        Raises:
            CorruptCheckpointError: Not JSON, another hash than it says, or a format that this version cannot read.
        """
        try:
            outer = json.loads(data)
            body = outer["body"]
            if outer["xxh3_128"] != _hash_body(body):
                raise CorruptCheckpointError(f"{MANIFEST} does not match its own hash")
            if body["format"] != FORMAT:
                raise CorruptCheckpointError(
                    f"{MANIFEST} has format {body['format']}, this version reads {FORMAT}", hint="Update overnight."
                )
            files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
            return cls(**body, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None


def _hash_body(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def describe_file(path: Path) -> FileEntry:
    """Size and hash of a file as it can be read back now."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint; its files are not looked at.

    Raises:
        CorruptCheckpointError: Missing, unreadable, or under another name than it was written for.
    """
    try:
        manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    if (name := CheckpointName.parse(folder.name)) is not None and name != manifest.name:
        raise CorruptCheckpointError(f"{MANIFEST} belongs to {manifest.name}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Reads the manifest and compares every file with it.

    Raises:
        CorruptCheckpointError: The message names the first file that is missing, truncated or altered.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                raise CorruptCheckpointError(f"{name} has {size} bytes instead of {expected.size}")
            if describe_file(path) != expected:
                raise CorruptCheckpointError(f"{name} does not match its hash")
        except OSError as error:
            raise CorruptCheckpointError(f"{name} cannot be read: {error.strerror}") from None
    extra = {path.name for path in files_in(folder)} - set(manifest.files) - {MANIFEST}
    if ".metadata" in extra:
        raise CorruptCheckpointError(".metadata is not listed in the manifest")
    return manifest


def versions() -> dict[str, str]:
    """Versions on which the last bits of a computation may depend."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "overnight": __version__,
    }


def now_text() -> str:
    """Aware UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
