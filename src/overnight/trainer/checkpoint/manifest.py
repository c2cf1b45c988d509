"""The manifest: written last, it says what a checkpoint consists of and where it comes from.

Nothing stock notices a flipped byte in a checkpoint (``torch.load``, DCP and safetensors all load it), so the manifest
holds the size and hashes of every file, and a hash of itself. Files are hashed in segments, so that a reader verifies
several at once and places what it reads in the same pass.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token, files_in

MANIFEST = "manifest.json"
FORMAT = 2
SEGMENT_BYTES = 16 << 20
"""No segment is longer."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a file and its xxh3-128 in hex."""

    offset: int
    length: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        size: Bytes.
        xxh3_128: Of the whole file if it is one segment; else of its segments' hashes (16 bytes each), in order.
        segments: They cover the file without a gap, in order.
    """

    size: int
    xxh3_128: str
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> "FileEntry":
        """The entry of a file that consists of these segments."""
        segments = tuple(segments)
        return cls(sum(segment.length for segment in segments), combine(s.xxh3_128 for s in segments), segments)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON; segments are rows of offset, length and hash."""
        rows = [[segment.offset, segment.length, segment.xxh3_128] for segment in self.segments]
        return {"size": self.size, "xxh3_128": self.xxh3_128, "segments": rows}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "FileEntry":
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: The segments have gaps, or do not add up to the size and hash.
        """
        entry = cls.of(Segment(*row) for row in body["segments"])
        end = 0
        for segment in entry.segments:
            if segment.offset != end or segment.length < 0:
                raise ValueError(f"a gap in the segments at byte {end}")
            end += segment.length
        if (entry.size, entry.xxh3_128) != (body["size"], body["xxh3_128"]):
            raise ValueError("the segments do not add up to the file")
        return entry


def combine(hashes: Iterable[str]) -> str:
    """One hash of a sequence of hashes: the only one itself, else the xxh3-128 of all, 16 bytes each."""
    found = list(hashes)
    return found[0] if len(found) == 1 else xxhash.xxh3_128_hexdigest(bytes.fromhex("".join(found)))


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
        envelope: Whatever else the last bits of a computation may depend on: flags, hash seed, devices.
        kind: Why it was saved: ``periodic``, ``yield``, ``final`` or ``asked``.
        metrics: Latest values by name at the save.
        position: ``loops``, the names of the open ones, and ``loaders`` with their epoch and position.
        content: Hash of the whole state, to prove that nothing changed.
        retention: Which checkpoints of the run stay, see :class:`overnight.trainer.checkpoint.retention.Retention`; for
            whoever tidies up when no attempt is left to do it.
        place: Identity of the place in which it was made, see :mod:`overnight.trainer.checkpoint.fence`; empty if not
            known.
        files: By path relative to the checkpoint's folder; frozen tensors lie in ``../base-<hash>/``, which several
            checkpoints share.
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
    envelope: dict[str, Any] = field(default_factory=dict)
    kind: str = "periodic"
    metrics: dict[str, float] = field(default_factory=dict)
    retention: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def name(self) -> CheckpointName:
        """The name under which it is published."""
        return CheckpointName(self.step, Token(self.attempt, self.generation), self.save)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, shared ones too."""
        return sum(entry.size for entry in self.files.values())

    @property
    def bases(self) -> list[str]:
        """Names of the base folders on which it depends."""
        return sorted({name.split("/")[1] for name in self.files if name.startswith("../")})

    def to_bytes(self) -> bytes:
        """The file's content: a body and its hash."""
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        body["files"] = {name: entry.to_json() for name, entry in self.files.items()}
        return json.dumps({"body": body, "xxh3_128": hash_of_body(body)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parses and verifies a manifest.

        Raises:
            CorruptCheckpointError: Not JSON, another hash than it says, or a format that this version cannot read.
        """
        try:
            outer = json.loads(data)
            body = outer["body"]
            if outer["xxh3_128"] != hash_of_body(body):
                raise CorruptCheckpointError(f"{MANIFEST} does not match its own hash")
            if body["format"] != FORMAT:
                raise CorruptCheckpointError(
                    f"{MANIFEST} has format {body['format']}, this version reads {FORMAT}", hint="Update overnight."
                )
            files = {name: FileEntry.from_json(entry) for name, entry in body.pop("files").items()}
            return cls(**body, files=files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None


def hash_of_body(body: Mapping[str, Any]) -> str:
    """The hash of itself that a manifest carries."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def describe(data: bytes | memoryview) -> FileEntry:
    """The entry of a file with that content."""
    view = memoryview(data)
    starts = range(0, max(1, len(view)), SEGMENT_BYTES)
    blocks = ((start, view[start : start + SEGMENT_BYTES]) for start in starts)
    return FileEntry.of(Segment(start, len(block), xxhash.xxh3_128_hexdigest(block)) for start, block in blocks)


def check_file(path: Path, expected: FileEntry, name: str) -> None:
    """Compares a file with its entry.

    Raises:
        CorruptCheckpointError: Another size, or a segment that does not match its hash.
        OSError: It cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        if size != expected.size:
            raise CorruptCheckpointError(f"{name} has {size} bytes instead of {expected.size}")
        for segment in expected.segments:
            block = file.read(segment.length)
            while len(block) < segment.length and (more := file.read(segment.length - len(block))):
                block += more
            if xxhash.xxh3_128_hexdigest(block) != segment.xxh3_128:
                raise CorruptCheckpointError(f"{name} does not match its hash at byte {segment.offset}")


def load_manifest(place: Place, name: CheckpointName) -> Manifest:
    """The manifest of a checkpoint in any place; its files are not looked at.

    Raises:
        CorruptCheckpointError: Missing, unreadable, or written for another name.
    """
    try:
        manifest = Manifest.from_bytes(place.read(f"{name}/{MANIFEST}"))
    except OSError as error:
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    if manifest.name != name:
        raise CorruptCheckpointError(f"{MANIFEST} belongs to {manifest.name}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint in a folder; its files are not looked at.

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
        try:
            check_file(folder / name, expected, name)
        except OSError as error:
            raise CorruptCheckpointError(f"{name} cannot be read: {error.strerror}") from None
    extra = {path.name for path in files_in(folder)} - set(manifest.files) - {MANIFEST}
    if ".metadata" in extra:
        raise CorruptCheckpointError(".metadata is not listed in the manifest")
    return manifest


def now_text() -> str:
    """Aware UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
