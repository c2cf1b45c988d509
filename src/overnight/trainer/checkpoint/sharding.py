"""DTensors (FSDP2 ``fully_shard``, tensor parallelism) as chunks of a whole, without asking another rank.

Each rank saves its chunk and its offset; at a resume each asks for the chunk that it has now, under whatever mesh. So
a checkpoint fits every sharding, and neither way needs a collective.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from overnight.core.errors import SaveFailedError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Chunk:
    """A box inside a whole tensor.

    Attributes:
        at: Offset of its first element in each dimension.
        shape: Its lengths; a rank that has nothing has a length of 0.
    """

    at: tuple[int, ...]
    shape: tuple[int, ...]


def is_sharded(value: Any) -> "TypeGuard[DTensor]":
    """Whether a value is a DTensor; torch's module for them takes a second to import, so only who made one pays."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def chunk_of(tensor: "DTensor") -> Chunk:
    """The chunk that this rank has of a DTensor.

    Raises:
        SaveFailedError: It is not one box of final values: a pending sum, an interleaved shard of uneven length, or a
            mesh without this rank.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise SaveFailedError(
            f"a DTensor {tuple(tensor.shape)} is a sum that is still spread over the ranks ({tensor.placements})",
            hint="Redistribute it (Replicate or Shard) before it is kept in tracked state.",
        )
    if tensor.device_mesh.get_coordinate() is None:
        raise SaveFailedError(
            f"a DTensor {tuple(tensor.shape)} is on a mesh without this rank",
            hint="Track it under other names on the ranks that have it.",
        )
    _require_boxes(tensor)
    shape, at = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Chunk(tuple(at), tuple(shape))


def _require_boxes(tensor: "DTensor") -> None:
    """Interleaved shards (FSDP over tensor parallelism) are contiguous only if they divide evenly."""
    strided = {place.dim for place in tensor.placements if hasattr(place, "split_factor")}  # type: ignore[attr-defined]
    for dim in strided:
        num_shards = math.prod(
            tensor.device_mesh.size(mesh_dim)
            for mesh_dim, place in enumerate(tensor.placements)
            if getattr(place, "dim", None) == dim
        )
        if tensor.shape[dim] % num_shards:
            raise SaveFailedError(
                f"a DTensor {tuple(tensor.shape)} is sharded {num_shards} ways along dimension {dim}, unevenly and "
                "interleaved",
                hint="Pad that dimension to a multiple, or shard another one.",
            )


def assemble(local: torch.Tensor, like: "DTensor", placements: Sequence[Any] | None = None) -> "DTensor":
    """A DTensor from this rank's chunk, on the mesh of another.

    Args:
        local: The chunk.
        like: Gives mesh, whole shape and placements.
        placements: Instead of those of ``like``.
    """
    from torch.distributed.tensor import DTensor

    whole = tuple(like.shape)
    strides = tuple(math.prod(whole[dim + 1 :]) for dim in range(len(whole)))
    return DTensor.from_local(
        local, like.device_mesh, placements or like.placements, run_check=False, shape=torch.Size(whole), stride=strides
    )
