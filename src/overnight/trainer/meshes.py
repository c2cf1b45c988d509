"""Arranges the ranks of a run in a mesh of named dimensions, such as 2 copies of a model split in 4."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from overnight.core.errors import BadInputError
from overnight.trainer.data.shares import Share, data_dims, share_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MAX_SUGGESTIONS = 6


class Arrangement:
    """How the ranks of a run stand to each other: in a row, each with its own samples, until a mesh says otherwise.

    Args:
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        share: Which samples are this rank's.
        peers: Name and size of each dimension where ranks have samples in common; empty where none have.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.share = Share(rank, world_size)
        self.peers: list[list[str | int]] = []
        self._world_size = world_size
        self._sizes: dict[str, int] = {}
        self._mesh: DeviceMesh | None = None

    @property
    def num_peers(self) -> int:
        """Number of ranks that have this rank's samples, itself included."""
        return self.share.num_peers(self._world_size)

    def mesh(self, sizes: Mapping[str, int], device: torch.device) -> "DeviceMesh":
        """The mesh of all ranks, which all of them call for; the same one each time. The process group exists.

        Raises:
            BadInputError: The sizes do not fit the number of ranks, or are not those of the first call.
        """
        fitting = fit(sizes, self._world_size)
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(device.type, tuple(fitting.values()), mesh_dim_names=tuple(fitting))
            self._sizes, self.share = fitting, share_of(self._mesh)
            self.peers = [[name, size] for name, size in fitting.items()] if self.num_peers > 1 else []
        if list(fitting.items()) != list(self._sizes.items()):
            raise BadInputError(
                f"the ranks of this run are arranged as {_text(self._sizes)}, not as {_text(fitting)}",
                hint="A run has one mesh; make others with torch.distributed.device_mesh.init_device_mesh.",
            )
        return self._mesh


def fit(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The sizes of a mesh, with -1 replaced by what is left of the ranks.

    Args:
        sizes: By name of dimension, outermost first; one may be -1.
        world_size: Number of ranks.

    Raises:
        BadInputError: They do not multiply to the number of ranks; the hint names sizes that do.
    """
    _require_sizes(sizes)
    given = math.prod(size for size in sizes.values() if size != -1)
    is_open = -1 in sizes.values()
    if (is_open and world_size % given == 0) or given == world_size:
        return {name: world_size // given if size == -1 else size for name, size in sizes.items()}
    needs = f"a multiple of {given} ranks" if is_open else f"{given} rank(s)"
    raise BadInputError(
        f"a mesh of {_text(sizes)} needs {needs}, this run has {world_size}",
        hint=f"Sizes that fit {world_size} rank(s): {'; '.join(_suggestions(sizes, world_size))}.",
        world_size=world_size,
    )


def _require_sizes(sizes: Mapping[str, int]) -> None:
    if not sizes:
        raise BadInputError("a mesh needs a dimension", hint="Like run.mesh(dp=-1, tp=2).")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise BadInputError(
                f"{name}={size!r} is no size of a mesh", hint="Sizes count ranks, from 1; -1 takes what is left."
            )
    if sum(size == -1 for size in sizes.values()) > 1:
        names = " and ".join(name for name, size in sizes.items() if size == -1)
        raise BadInputError(f"{names} are -1, only one size can be what is left", hint="Give the others a number.")
    data_dims(tuple(sizes))


def _suggestions(sizes: Mapping[str, int], world_size: int) -> list[str]:
    """Sizes that fit, those nearest to what was asked first."""

    def distance(fitting: tuple[int, ...]) -> float:
        pairs = zip(sizes.values(), fitting, strict=True)
        return sum(abs(math.log(size / wanted)) for wanted, size in pairs if wanted != -1)

    found = sorted(_factorisations(world_size, len(sizes)), key=distance)[:MAX_SUGGESTIONS]
    return [_text(dict(zip(sizes, fitting, strict=True))) for fitting in found]


def _factorisations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    if num_factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorisations(number // first, num_factors - 1))


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def join_group_of_one(device: torch.device) -> bool:
    """Makes a process group of this process alone, unless there is a group; returns whether it did."""
    if dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True
