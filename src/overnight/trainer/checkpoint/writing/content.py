"""Hashes of what lies in the arena: they decide what is equal, what is frozen, and what the manifest will say.

Large tensors are hashed in blocks. The hashes of the blocks serve twice: the tensor's own hash is made of them, and
they are the hashes of the file's segments, since the blocks are written as they are. Every byte is hashed once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.manifest import SEGMENT_BYTES
from overnight.trainer.checkpoint.writing.order import LARGE_BYTES, Piece


@dataclass(frozen=True, slots=True)
class Hashed:
    """A piece and what its bytes are.

    Attributes:
        piece: The piece.
        digest: Of type, shape and bytes.
        blocks: Of each :data:`~overnight.trainer.checkpoint.manifest.SEGMENT_BYTES` of a large piece, else empty.
    """

    piece: Piece
    digest: str
    blocks: tuple[str, ...]


def hash_piece(piece: Piece, memory: memoryview, progress: Callable[[int], None]) -> Hashed:
    """Hashes a piece.

    Args:
        piece: Where it lies.
        memory: The arena.
        progress: Called with numbers of bytes.

    Raises:
        SaveFailedError: It does not lie in the arena.
    """
    if not 0 <= piece.offset <= piece.offset + piece.num_bytes <= len(memory):
        raise SaveFailedError(f"{piece.key} does not lie in the staging memory of {len(memory)} bytes")
    data = memory[piece.offset : piece.offset + piece.num_bytes]
    header = f"{piece.dtype}{list(piece.shape)}".encode()
    if piece.num_bytes < LARGE_BYTES:
        progress(piece.num_bytes)
        return Hashed(piece, digest_of(header, [xxhash.xxh3_128_hexdigest(data)]), ())
    blocks = []
    for start in range(0, len(data), SEGMENT_BYTES):
        block = data[start : start + SEGMENT_BYTES]
        blocks.append(xxhash.xxh3_128_hexdigest(block))
        progress(len(block))
    return Hashed(piece, digest_of(header, blocks), tuple(blocks))


def digest_of(header: bytes, blocks: list[str]) -> str:
    """Hash of a tensor: of type and shape (``float32[2, 3]``) and the hashes of its 16 MiB blocks, 16 bytes each."""
    return xxhash.xxh3_128_hexdigest(header + bytes.fromhex("".join(blocks)))
