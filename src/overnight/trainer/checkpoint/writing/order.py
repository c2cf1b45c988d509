"""What the trainer asks of its writer process: data only, free of torch, as JSON on the wire."""

import json
import mmap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from overnight.trainer.checkpoint.place import CheckpointName, Token

Kind = Literal["periodic", "yield", "final", "asked"]

LARGE_BYTES = 256 << 10
"""Tensors from this size on have segments of their own in a file, and begin at a page of it and of the arena."""

PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""A multiple of the block size of every disk."""


@dataclass(frozen=True, kw_only=True)
class Author:
    """Who writes.

    Attributes:
        token: The fencing token.
        parent: The checkpoint from which the token forked.
        place: Identity of the place that the token has claimed; empty if it is not known.
        rank, world_size: Of this process.
        seed: The trial's seed.
        timeout_seconds: How long ranks wait for each other, and how long a save may make no progress.
        retry_seconds: How long a remote store may fail before a save does.
    """

    token: Token
    parent: CheckpointName | None
    place: str = ""
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    timeout_seconds: float = 300.0
    retry_seconds: float = 60.0

    def to_json(self) -> dict[str, Any]:
        """The author as JSON."""
        token = [self.token.attempt, self.token.generation]
        return {**asdict(self), "token": token, "parent": str(self.parent) if self.parent else None}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Author":
        """The inverse of :meth:`to_json`."""
        parent = CheckpointName.parse(body["parent"]) if body["parent"] is not None else None
        return cls(**{**body, "token": Token(*body["token"]), "parent": parent})


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, or one rank's chunk of one, as it lies in the arena: contiguous, in C order.

    Attributes:
        key: Its name, unique in the order together with ``at``.
        dtype: As torch names it, without ``torch.``: ``float32``, ``bfloat16``, ``float8_e4m3fn``.
        shape: Of the piece; ``()`` for a scalar.
        offset: Of its first byte in the arena.
        num_bytes: Its bytes.
        whole: Global shape of a distributed tensor, None for a tensor that is whole.
        at: Where the piece begins in ``whole``.
        frozen: Its owner does not expect it to change (``requires_grad`` is off): a hint to store it apart at once.
            Whether it has changed is always decided by its hash.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    whole: tuple[int, ...] | None = None
    at: tuple[int, ...] | None = None
    frozen: bool = False

    @property
    def unit(self) -> tuple[str, tuple[int, ...] | None]:
        """What is stored once: the tensor, or the chunk at one place of it."""
        return self.key, self.at


class Pieces(tuple[Piece, ...]):
    """Pieces of many saves; their text is made once."""

    @cached_property
    def text(self) -> str:
        """JSON; rows, since there may be 100,000 of them."""
        rows = [[p.key, p.dtype, p.shape, p.offset, p.num_bytes, p.whole, p.at, p.frozen] for p in self]
        return json.dumps(rows, separators=(",", ":"))


@dataclass(frozen=True)
class SaveOrder:
    """One rank's part of one checkpoint.

    Attributes:
        number: Counts the orders of this rank, from 1.
        step: Updates done.
        save: 1 for the token's first save at this step. All ranks give the same; a failed save has used its number up.
        objects: JSON text of what is not a tensor, by object name.
        position: For the manifest: which loops are open, and where each loader is.
        pieces: The tensors.
        kind: Why it is saved.
        metrics: Latest values by name, for keeping the best checkpoints.
        facts: ``versions`` (by name), ``threads`` (compute threads of a rank), ``envelope`` (whatever else the last
            bits of a computation may depend on) and ``retention``, for the manifest.
    """

    number: int
    step: int
    save: int
    objects: str
    position: dict[str, Any]
    pieces: tuple[Piece, ...]
    kind: Kind = "periodic"
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def name(self, token: Token) -> CheckpointName:
        """The name under which it will be published."""
        return CheckpointName(self.step, token, self.save)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.num_bytes for piece in self.pieces)

    def to_bytes(self) -> bytes:
        """The order as UTF-8 JSON."""
        pieces = self.pieces if isinstance(self.pieces, Pieces) else Pieces(self.pieces)
        body = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "pieces"}
        return f'{json.dumps(body, separators=(",", ":"))[:-1]},"pieces":{pieces.text}}}'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "SaveOrder":
        """The inverse of :meth:`to_bytes`."""
        body = json.loads(data)
        rows = body.pop("pieces")
        return cls(**body, pieces=tuple(_piece(*row) for row in rows))


def _piece(
    key: str,
    dtype: str,
    shape: list[int],
    offset: int,
    num_bytes: int,
    whole: list[int] | None,
    at: list[int] | None,
    frozen: bool,
) -> Piece:
    """A piece from its row in JSON."""
    return Piece(
        key,
        dtype,
        tuple(shape),
        offset,
        num_bytes,
        None if whole is None else tuple(whole),
        None if at is None else tuple(at),
        frozen,
    )
