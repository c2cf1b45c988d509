"""Real checkpoints for tests of whoever reads them, laid out by the parts of the writer, without its process.

A rank's state is encoded as a run does it. Sharded tensors are given as what each rank has of a whole, so that no
process group is needed to lay out the checkpoint of a gang.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overnight.trainer.checkpoint.fence import claim, read_fences
from overnight.trainer.checkpoint.index import INDEX, Index, TensorEntry, index_to_bytes, merge, private_key
from overnight.trainer.checkpoint.manifest import MANIFEST, FileEntry, Manifest, describe, now_text
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.writing import dcp
from overnight.trainer.checkpoint.writing.content import hash_piece
from overnight.trainer.checkpoint.writing.datafile import write_tensors
from overnight.trainer.checkpoint.writing.order import Piece


@dataclass(frozen=True)
class Shard:
    """What a rank has of a distributed tensor."""

    local: torch.Tensor
    whole: tuple[int, ...]
    at: tuple[int, ...]


def lay(
    place: LocalPlace,
    step: int,
    ranks: Sequence[Mapping[str, Any]],
    token: Token = Token(1),
    *,
    private: Sequence[str] = (),
    parent: CheckpointName | None = None,
) -> CheckpointName:
    """Publishes a checkpoint.

    Args:
        place: Where.
        step: Updates done.
        ranks: State by object name of each rank; a :class:`Shard` may stand directly in an object that is a dict.
        token: Whose; it claims the place if it has not yet.
        private: Keys that each rank stores for itself. Others are taken from rank 0, unless they are shards.
        parent: From which checkpoint the token forked.
    """
    if token not in place.tokens():
        claim(place, token, parent)
    name = CheckpointName(step, token)
    folder = place.path(name)
    folder.mkdir(parents=True)
    files: dict[str, FileEntry] = {}
    indexes = []
    for rank, states in enumerate(ranks):
        objects, leaves = _encode(states)
        _write(folder, f"state-{rank}.json", {"objects": objects, "private": sorted(private)}, files)
        stored = {
            private_key(rank, key) if key in private else key: leaf
            for key, leaf in leaves.items()
            if rank == 0 or key in private or leaf.whole != tuple(leaf.local.shape)
        }
        indexes.append(_write_tensors(folder, rank, stored, files))
        _write(folder, f"rank-{rank}.json", {"rank": rank}, files)
    index = merge(indexes)
    for file, data in ((INDEX, index_to_bytes(index)), (".metadata", dcp.metadata(index))):
        (folder / file).write_bytes(data)
        files[file] = describe(data)
    manifest = Manifest(
        step=step,
        attempt=token.attempt,
        generation=token.generation,
        save=1,
        parent=str(parent) if parent else None,
        created_at=now_text(),
        world_size=len(ranks),
        versions={},
        threads=1,
        seed=0,
        position={"loops": [], "loaders": {}},
        content="",
        place=read_fences(place)[token].place,
        files=files,
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return name


def _encode(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Shard]]:
    plain = {}
    shards: dict[str, tuple[str, str, Shard]] = {}
    for name, state in states.items():
        if isinstance(state, dict):
            shards |= {f"{name}.{key}": (name, key, value) for key, value in state.items() if isinstance(value, Shard)}
            state = {key: value for key, value in state.items() if not isinstance(value, Shard)}
        plain[name] = state
    encoded = encode(plain)
    leaves = {key: _whole(leaf.tensor) for key, leaf in encoded.leaves.items()}
    for path, (name, key, shard) in shards.items():
        shape = list(shard.whole)
        encoded.objects[name][key] = {"$": "tensor", "key": path, "on": "cpu", "shape": shape, "placements": ["S0"]}
        leaves[path] = shard
    return encoded.objects, leaves


def _whole(tensor: torch.Tensor) -> Shard:
    return Shard(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _write_tensors(folder: Path, rank: int, leaves: Mapping[str, Shard], files: dict[str, FileEntry]) -> Index:
    arena = bytearray()
    pieces = []
    for key, leaf in leaves.items():
        data = leaf.local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.local.numel() else b""
        dtype = str(leaf.local.dtype).removeprefix("torch.")
        shape = tuple(leaf.local.shape)
        pieces.append(Piece(key, dtype, shape, len(arena), len(data), leaf.whole, leaf.at))
        arena += data
    file = f"__{rank}_0.distcp"
    memory = memoryview(arena)
    hashed = [hash_piece(piece, memory, lambda _: None) for piece in pieces]
    files[file], chunks = write_tensors(folder / file, file, hashed, memory, lambda _: None)
    return {
        piece.key: TensorEntry(piece.dtype, piece.whole or (), (chunk,))
        for piece, chunk in zip(pieces, chunks, strict=True)
    }


def _write(folder: Path, file: str, body: Any, files: dict[str, FileEntry]) -> None:
    data = json.dumps(body).encode()
    (folder / file).write_bytes(data)
    files[file] = describe(data)
