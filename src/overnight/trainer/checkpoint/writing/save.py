"""One rank's part of one save, from the bytes in the arena to the published checkpoint.

What is done can be done again: a process that takes over from a dead one finds what that one has finished, and redoes
the rest from the arena. A rank never rewrites files after it has told the others that they are complete.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from overnight.core.errors import CheckpointError, FencedError, OvernightError, SaveFailedError
from overnight.trainer.checkpoint.fence import refuse_stale, require_own
from overnight.trainer.checkpoint.index import (
    INDEX,
    Chunk,
    Index,
    TensorEntry,
    index_from_bytes,
    index_from_json,
    index_to_bytes,
    index_to_json,
    merge,
    private_key,
)
from overnight.trainer.checkpoint.manifest import FileEntry, Manifest, combine, describe, load_manifest, now_text
from overnight.trainer.checkpoint.place import LocalPlace, partial_name, sync_file, write_atomic
from overnight.trainer.checkpoint.writing.channel import Pulse
from overnight.trainer.checkpoint.writing.content import Hashed, hash_piece
from overnight.trainer.checkpoint.writing.datafile import write_tensors
from overnight.trainer.checkpoint.writing.dcp import METADATA, Metadata
from overnight.trainer.checkpoint.writing.destination import Destination
from overnight.trainer.checkpoint.writing.division import Held, divide
from overnight.trainer.checkpoint.writing.frozen import Bases, place_of
from overnight.trainer.checkpoint.writing.meeting import Meeting
from overnight.trainer.checkpoint.writing.order import Author, SaveOrder

_REMOTE_FILE_BYTES = 64 << 20
_MAX_REMOTE_FILES = 4


@dataclass
class History:
    """What the process remembers from save to save.

    Attributes:
        bases: What is frozen.
        newest: What was last committed by this process, and the content of this rank in it.
        learned: Whether the checkpoint from which the token forked has been looked at.
        claimed: Whether the token's fence was seen in the place.
        metadata: Makes the file that torch's tools read.
    """

    bases: Bases = field(default_factory=Bases)
    newest: tuple[Manifest, str] | None = None
    learned: bool = False
    claimed: bool = False
    metadata: Metadata = field(default_factory=Metadata)

    def committed(self, manifest: Manifest | None, part: "Part") -> None:
        """Takes in this rank's part of a commit."""
        self.bases.committed(part.index, part.files)
        self.newest = (manifest, part.content) if manifest is not None else None


class Stopwatch:
    """Where the time goes.

    Attributes:
        seconds: By stage that is over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._stage: tuple[str, float] | None = None

    def enter(self, stage: str | None) -> None:
        """The next stage begins, or the last one is over."""
        now = self._clock()
        if self._stage is not None:
            name, since = self._stage
            self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        self._stage = (stage, now) if stage is not None else None


@dataclass(frozen=True)
class Part:
    """What one rank has stored; ``rank-R.json`` is its JSON.

    Attributes:
        files: Entries of its own files, and of the bases' files on which it depends.
        index: Its tensors.
        content: Hash of its whole state.
        num_bytes: What it has written for this save.
    """

    files: dict[str, FileEntry]
    index: Index
    content: str
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The part as JSON."""
        files = {name: entry.to_json() for name, entry in self.files.items()}
        body = {"content": self.content, "num_bytes": self.num_bytes}
        return {"files": files, "tensors": index_to_json(self.index), **body}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Part":
        """The inverse of :meth:`to_json`."""
        files = {name: FileEntry.from_json(entry) for name, entry in body["files"].items()}
        return cls(files, index_from_json(body["tensors"]), body["content"], body["num_bytes"])


class Save:
    """One save of this rank.

    Args:
        order: What to save.
        memory: The arena; None if it was released before the process that used it died.
        author: Who saves.
        destination: Where to.
        history: Of earlier saves; updated by a commit.
        pulse: Told where the save is.
        released: Called once with the bytes written, when the arena is not needed any more.
    """

    def __init__(
        self,
        order: SaveOrder,
        memory: memoryview | None,
        author: Author,
        destination: Destination,
        history: History,
        pulse: Pulse,
        released: Callable[[int], None],
    ) -> None:
        self._order = order
        self._memory = memory
        self._author = author
        self._destination = destination
        self._history = history
        self._pulse = pulse
        self._released = released
        self.name = order.name(author.token)
        self.stopwatch = Stopwatch()
        self._meeting = Meeting(
            destination.place,
            partial_name(self.name),
            rank=author.rank,
            world_size=author.world_size,
            timeout_seconds=author.timeout_seconds,
            progress=pulse.step,
        )

    def run(self) -> Manifest | None:
        """Saves; returns when the checkpoint is published.

        Returns:
            The manifest on rank 0, None elsewhere. With one rank, what has the step and content of the last commit is
            not written again: then it is that one's manifest.

        Raises:
            FencedError: A newer token owns the place.
            SaveFailedError: Any rank failed, or did not finish in time; nothing was published.
        """
        try:
            manifest = self._run()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            if self._author.rank > 0 and self._is_published():
                return None  # rank 0 had all it needed, and took the folder away
            if not isinstance(error, FencedError) and (lost := self._lost()) is not None:
                raise lost from error  # the others see it too, and nothing is left where the place was
            failure = error if isinstance(error, CheckpointError) else self._failure(error)
            self._destination.forget(self.name, failed=True)
            self._meeting.abort(failure)
            raise failure from error
        self._destination.forget(self.name, failed=False)
        return manifest

    def _is_published(self) -> bool:
        with contextlib.suppress(Exception):  # a store that fails says nothing
            return self._destination.is_published(self.name)
        return False

    def _run(self) -> Manifest | None:
        if self._destination.is_published(self.name):
            self._released(0)
            return self._published()
        self._refuse()
        self._learn()
        part = self._noted()
        if part is None and self._is_published():  # and its notes taken away, a moment ago
            self._released(0)
            return self._published()
        part = part or self._make_part()
        if part is None:
            self._released(0)
            return self._history.newest[0] if self._history.newest else None
        self._released(part.num_bytes)
        self._enter("uploading")
        self._destination.deliver(self.name, part.files)
        if self._author.rank == 0:
            manifest: Manifest | None = self._publish(part)
        else:
            manifest = None
            self._await()
        self._history.committed(manifest, part)
        return manifest

    def _refuse(self) -> None:
        """Refuses when a higher token owns the place, or when the place is not the one that this token has claimed.

        Raises:
            FencedError: The former.
            SaveFailedError: The latter: its folder was deleted, or its file system is not mounted.
        """
        refuse_stale(self._destination.place, self._author.token)
        if self._has_claimed:
            require_own(self._destination.place, self._author.token, self._author.place)
        self._history.claimed |= self._author.token in self._destination.place.tokens()

    @property
    def _has_claimed(self) -> bool:
        return bool(self._author.place) or self._history.claimed

    def _lost(self) -> SaveFailedError | None:
        """The error that explains all others: the place that the token has claimed is not there any more."""
        try:
            if self._has_claimed:
                require_own(self._destination.place, self._author.token, self._author.place)
        except SaveFailedError as error:
            return error
        except Exception:  # a store that fails says nothing
            return None
        return None

    def _noted(self) -> Part | None:
        """What a process that died had completed; its files are not touched again."""
        with contextlib.suppress(FileNotFoundError):
            return Part.from_json(json.loads(self._destination.note(self.name).read_bytes()))
        return None

    def _failure(self, error: Exception) -> SaveFailedError:
        what = str(error)
        if isinstance(error, OSError) and error.strerror:
            what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        if isinstance(error, OvernightError):
            what = error.message
        return SaveFailedError(
            f"checkpoint {self.name} was not saved (rank {self._author.rank}): {type(error).__name__}: {what}",
            hint=f"Earlier checkpoints in {self._destination.place} are untouched and usable.",
        )

    def _enter(self, stage: str) -> None:
        self.stopwatch.enter(stage)
        self._pulse.enter(stage)

    def _learn(self) -> None:
        """Looks once at the checkpoint from which the token forked: what is frozen in it lies in its bases."""
        if self._history.learned or self._author.parent is None:
            return
        self._history.learned = True
        place = self._destination.place
        try:
            manifest = load_manifest(place, self._author.parent)
            index = index_from_bytes(place.read(f"{self._author.parent}/{INDEX}"))
        except (CheckpointError, OSError):
            return  # it costs bytes, not correctness: what is frozen is written again
        self._history.bases.committed(index, manifest.files)

    def _make_part(self) -> Part | None:
        """Writes this rank's files; None if they would be those of the last commit."""
        if self._memory is None:
            raise SaveFailedError(f"what was written of {self.name} before the writer process died is gone")
        self._enter("hashing")
        hashed = [hash_piece(piece, self._memory, self._pulse.step) for piece in self._order.pieces]
        content = self._content(hashed)
        newest = self._history.newest
        if self._author.world_size == 1 and newest and (newest[0].step, newest[1]) == (self._order.step, content):
            return None
        tensors, private = self._divide(hashed)
        self._enter("writing")
        part = self._write(tensors, private, content)
        data = json.dumps(part.to_json(), separators=(",", ":")).encode()
        write_atomic(self._destination.note(self.name), data, durable=False)
        return part

    def _content(self, hashed: list[Hashed]) -> str:
        digest = xxhash.xxh3_128(self._order.objects.encode())
        for one in sorted(hashed, key=lambda one: (one.piece.key, one.piece.at or ())):
            digest.update(f"{one.piece.key}={one.digest};".encode())
        return digest.hexdigest()

    def _divide(self, hashed: list[Hashed]) -> tuple[list[tuple[str, Hashed]], list[str]]:
        """What this rank stores, by stored key, and which keys are its own."""
        rank, world_size = self._author.rank, self._author.world_size
        if world_size == 1:
            return [(one.piece.key, one) for one in hashed], []
        self._destination.folder(self.name)
        rows = [[one.piece.key, one.piece.at, one.digest, one.piece.num_bytes] for one in hashed]
        self._meeting.tell("digests", {"units": rows})
        self._enter("waiting")
        holdings = [
            {(key, None if at is None else tuple(at)): Held(digest, size) for key, at, digest, size in body["units"]}
            for body in self._meeting.gather("digests")
        ]
        division = divide(holdings, rank)
        tensors = [(one.piece.key, one) for one in hashed if one.piece.unit in division.shared]
        own = [one for one in hashed if one.piece.at is None and one.piece.key in division.private]
        tensors += [(private_key(rank, one.piece.key), one) for one in own]
        return tensors, sorted(division.private)

    def _write(self, tensors: list[tuple[str, Hashed]], private: list[str], content: str) -> Part:
        folder = self._destination.folder(self.name)
        self._drop_lost_bases()
        sorted_out = self._history.bases.sort(tensors)
        index: dict[str, list[tuple[Hashed, Chunk]]] = {}
        files: dict[str, FileEntry] = {}
        for key, hashed, chunk in sorted_out.known:
            index.setdefault(key, []).append((hashed, replace(chunk, at=place_of(hashed))))
            files[chunk.file] = self._history.bases.files[chunk.file]
        num_bytes = 0
        if sorted_out.steady:
            file, entry, chunks = self._write_base(sorted_out.steady)
            files[file] = entry
            num_bytes += entry.size
            for (key, hashed), chunk in zip(sorted_out.steady, chunks, strict=True):
                index.setdefault(key, []).append((hashed, chunk))
        for number, group in enumerate(self._groups(sorted_out.moving)):
            name = f"__{self._author.rank}_{number}.distcp"
            entry, chunks = self._write_file(folder / name, group)
            files[name] = entry
            for (key, hashed), chunk in zip(group, chunks, strict=True):
                index.setdefault(key, []).append((hashed, chunk))
        name = f"state-{self._author.rank}.json"
        state = f'{{"objects": {self._order.objects}, "private": {json.dumps(private)}}}'.encode()
        (folder / name).write_bytes(state)
        sync_file(folder / name)
        files[name] = describe(state)
        num_bytes += sum(entry.size for name, entry in files.items() if not name.startswith("../"))
        return Part(files, {key: _entry(parts) for key, parts in index.items()}, content, num_bytes)

    @property
    def _view(self) -> memoryview:
        assert self._memory is not None
        return self._memory

    def _groups(self, tensors: list[tuple[str, Hashed]]) -> list[list[tuple[str, Hashed]]]:
        """One file locally; several for a store, which takes them in parallel."""
        if not tensors:
            return []
        total = sum(hashed.piece.num_bytes for _, hashed in tensors)
        is_local = isinstance(self._destination.place, LocalPlace)
        count = 1 if is_local else min(_MAX_REMOTE_FILES, 1 + total // _REMOTE_FILE_BYTES)
        groups: list[list[tuple[str, Hashed]]] = [[]]
        size = 0
        for key, hashed in tensors:
            if size >= total / count and len(groups) < count:
                groups.append([])
                size = 0
            groups[-1].append((key, hashed))
            size += hashed.piece.num_bytes
        return groups

    def _write_file(self, path: Path, tensors: list[tuple[str, Hashed]]) -> tuple[FileEntry, list[Chunk]]:
        direct = isinstance(self._destination.place, LocalPlace)  # what is uploaded is read again at once
        what = [hashed for _, hashed in tensors]
        return write_tensors(path, path.name, what, self._view, self._pulse.step, direct=direct)

    def _drop_lost_bases(self) -> None:
        bases = self._history.bases
        for file, entry in list(bases.files.items()):
            base, name = file.split("/")[1:]
            if self._destination.place.sizes(base).get(name) != entry.size:
                bases.drop(file)

    def _write_base(self, tensors: list[tuple[str, Hashed]]) -> tuple[str, FileEntry, list[Chunk]]:
        """Writes and publishes a base; it is named by the hash of its content."""
        folder = self._destination.base_folder(self.name)
        name = "__0_0.distcp"
        entry, found = self._write_file(folder / name, tensors)
        base = f"base-{entry.xxh3_128}"
        self._destination.deliver_base(folder, base, {name: entry})
        file = f"../{base}/{name}"
        return file, entry, [replace(chunk, file=file) for chunk in found]

    def _publish(self, own: Part) -> Manifest:
        parts = [own]
        if self._author.world_size > 1:
            self._enter("waiting")
            parts = [Part.from_json(body) for body in self._meeting.gather("rank")]
        self._enter("publishing")
        index = merge(part.index for part in parts)
        files = {name: entry for part in parts for name, entry in part.files.items()}
        for name, data in ((METADATA, self._history.metadata.of(index)), (INDEX, index_to_bytes(index))):
            self._destination.add(self.name, name, data)
            files[name] = describe(data)
        manifest = self._manifest(files, combine(part.content for part in parts))
        self._destination.publish(manifest, self._author.token)
        return manifest

    def _manifest(self, files: dict[str, FileEntry], content: str) -> Manifest:
        author, order = self._author, self._order
        return Manifest(
            step=order.step,
            attempt=author.token.attempt,
            generation=author.token.generation,
            save=order.save,
            parent=str(author.parent) if author.parent else None,
            created_at=now_text(),
            world_size=author.world_size,
            versions=order.facts.get("versions", {}),
            threads=order.facts.get("threads", 0),
            envelope=order.facts.get("envelope", {}),
            retention=order.facts.get("retention", {}),
            place=author.place,
            seed=author.seed,
            kind=order.kind,
            metrics=order.metrics,
            position=order.position,
            content=content,
            files=files,
        )

    def _await(self) -> None:
        self._enter("waiting")
        self._meeting.wait(lambda _: self._destination.is_published(self.name), f"rank 0 to publish {self.name}")

    def _published(self) -> Manifest | None:
        """The save of a process that died after it had published."""
        if self._author.rank > 0:
            return None
        manifest = load_manifest(self._destination.place, self.name)
        self._destination.clean(manifest)
        return manifest


def _entry(parts: list[tuple[Hashed, Chunk]]) -> TensorEntry:
    piece = parts[0][0].piece
    shape = piece.whole if piece.whole is not None else piece.shape
    return TensorEntry(piece.dtype, shape, tuple(sorted((chunk for _, chunk in parts), key=lambda chunk: chunk.at)))
