"""Tensors that do not change are stored once, in ``base-<hash>/``, and named by every checkpoint that needs them.

That a tensor has not changed is proved by its hash, never assumed. What is expected to stay (``requires_grad`` is off)
goes to a base with the first save; anything else once it was found unchanged since the last commit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from overnight.trainer.checkpoint.index import Chunk, Index
from overnight.trainer.checkpoint.manifest import FileEntry
from overnight.trainer.checkpoint.writing.content import Hashed

MIN_BYTES = 1 << 20
MIN_SHARE = 0.05
"""A base of less than that, or of less than this share of what a rank stores, is not worth its files."""


@dataclass(frozen=True)
class Sorted:
    """What happens to the tensors of one save.

    Attributes:
        known: Chunk in a base, by stored key and digest.
        steady: To be written to a new base.
        moving: To be written to the checkpoint itself.
    """

    known: list[tuple[str, Hashed, Chunk]]
    steady: list[tuple[str, Hashed]]
    moving: list[tuple[str, Hashed]]


@dataclass
class Bases:
    """What this rank knows of the bases in its place.

    Attributes:
        chunks: Where content lies in a base, by its digest.
        files: Entries of the bases' files, by name as manifests list them.
        last: Digest by stored key and place, of the last commit.
    """

    chunks: dict[str, Chunk] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    last: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)

    def sort(self, tensors: Iterable[tuple[str, Hashed]]) -> Sorted:
        """Decides where each tensor goes."""
        known, steady, moving = [], [], []
        total = 0
        for key, hashed in tensors:
            total += hashed.piece.num_bytes
            if (chunk := self.chunks.get(hashed.digest)) is not None:
                known.append((key, hashed, chunk))
            elif hashed.piece.frozen or self.last.get((key, place_of(hashed))) == hashed.digest:
                steady.append((key, hashed))
            else:
                moving.append((key, hashed))
        if sum(hashed.piece.num_bytes for _, hashed in steady) < max(MIN_BYTES, MIN_SHARE * total):
            steady, moving = [], steady + moving
        return Sorted(known, steady, moving)

    def drop(self, file: str) -> None:
        """Forgets a base that is not in the place any more."""
        self.files.pop(file, None)
        self.chunks = {digest: chunk for digest, chunk in self.chunks.items() if chunk.file != file}

    def committed(self, index: Index, files: Mapping[str, FileEntry]) -> None:
        """Takes in what a commit consists of; only its bases will be there for sure when the next save needs them."""
        self.files = {file: entry for file, entry in files.items() if file.startswith("../")}
        chunks = (chunk for entry in index.values() for chunk in entry.chunks if chunk.file in self.files)
        self.chunks = {chunk.xxh3_128: chunk for chunk in chunks}
        self.last = {(key, chunk.at): chunk.xxh3_128 for key, entry in index.items() for chunk in entry.chunks}


def place_of(hashed: Hashed) -> tuple[int, ...]:
    """Where the piece begins in its tensor."""
    piece = hashed.piece
    return piece.at if piece.at is not None else (0,) * len(piece.shape)
