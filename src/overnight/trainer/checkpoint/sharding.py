"""DTensors (FSDP2 ``fully_shard``, tensor parallelism) as chunks of a whole, without asking another rank.

Each rank saves its chunk and its offset; at a resume each asks for the chunk that it has now, under whatever mesh. So
a checkpoint fits every sharding, and neither way needs a collective.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from overnight.core.errors import SaveFailedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
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


@dataclass(frozen=True)
class Layout:
    """How a whole tensor is spread over a mesh now.

    Attributes:
        mesh: The device mesh.
        placements: One for each dimension of the mesh.
        whole: Shape of the whole tensor.
    """

    mesh: "DeviceMesh"
    placements: tuple[Any, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, tensor: "DTensor") -> "Layout":
        """The layout of a live DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))

    def chunk(self) -> Chunk:
        """The chunk of this rank.

        Raises:
            SaveFailedError: As with :func:`chunk_of`.
        """
        return _chunk(self)

    def assemble(self, local: torch.Tensor) -> "DTensor":
        """The DTensor of which this rank has the chunk ``local``; asks no other rank."""
        from torch.distributed.tensor import DTensor

        strides = tuple(math.prod(self.whole[dim + 1 :]) for dim in range(len(self.whole)))
        return DTensor.from_local(
            local.to(self.mesh.device_type),
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.whole),
            stride=strides,
        )


Fit = Callable[[tuple[Any, ...], tuple[int, ...], list[str] | None], Layout | None]
"""Says for a saved tensor (its path inside the object's state, its whole shape, and its placements at the save, None if
it was no DTensor) how it is sharded now; None: not at all."""


def whole_only(path: tuple[Any, ...], shape: tuple[int, ...], placements: list[str] | None) -> Layout | None:
    """The :data:`Fit` without DTensors."""
    return None


def describe(placements: Sequence[Any]) -> list[str]:
    """Placements as text: ``S0``, ``R``, or ``I0/2`` for an interleaved shard."""
    return [
        f"I{place.dim}/{place.split_factor}" if hasattr(place, "split_factor")
        else f"S{place.dim}" if hasattr(place, "dim") else "R"
        for place in placements
    ]  # fmt: skip


def placed(mesh: "DeviceMesh", saved: Sequence[str], whole: tuple[int, ...]) -> Layout:
    """A layout on another mesh for what has no live counterpart: as it was saved if that fits, else replicated."""
    from torch.distributed.tensor import Replicate, Shard

    fits = len(saved) == mesh.ndim and all(text[0] in "RS" for text in saved)
    placements = [Shard(int(text[1:])) if fits and text[0] == "S" else Replicate() for text in saved]
    return Layout(mesh, tuple(placements) if fits else (Replicate(),) * mesh.ndim, whole)


def chunk_of(tensor: "DTensor") -> Chunk:
    """The chunk that this rank has of a DTensor.

    Raises:
        SaveFailedError: It is not one box of final values: a pending sum, an interleaved shard of uneven length, or a
            mesh without this rank.
    """
    return _chunk(Layout.of(tensor))


def _chunk(layout: Layout) -> Chunk:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(place.is_partial() for place in layout.placements):
        raise SaveFailedError(
            f"a DTensor {layout.whole} is a sum that is still spread over the ranks",
            hint="Redistribute it (Replicate or Shard) before it is kept in tracked state.",
        )
    if layout.mesh.get_coordinate() is None:
        raise SaveFailedError(
            f"a DTensor {layout.whole} is on a mesh without this rank",
            hint="Track it under another name, on the ranks that have it.",
        )
    _require_boxes(layout)
    shape, at = compute_local_shape_and_global_offset(layout.whole, layout.mesh, layout.placements)
    return Chunk(tuple(at), tuple(shape))


def _require_boxes(layout: Layout) -> None:
    """Interleaved shards (FSDP over tensor parallelism) are contiguous only if they divide evenly."""
    interleaved = {place.dim for place in layout.placements if hasattr(place, "split_factor")}
    for dim in interleaved:
        sizes = [
            layout.mesh.size(number)
            for number, place in enumerate(layout.placements)
            if getattr(place, "dim", None) == dim
        ]
        if layout.whole[dim] % math.prod(sizes):
            raise SaveFailedError(
                f"a DTensor {layout.whole} is sharded {math.prod(sizes)} ways along dimension {dim}, interleaved and "
                "unevenly",
                hint="Pad that dimension to a multiple, or shard another one.",
            )
