"""Which samples a rank gets when some ranks work on the same ones: its place along the data-parallel dimensions.

Ranks that split one model among them (tensor, context, pipeline parallelism) need the same samples. So the order of
data counts data ranks: positions along the dimensions of a device mesh that copy or shard the whole model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overnight.core.errors import BadInputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA_DIMS = ("dp", "dp_replicate", "dp_shard", "fsdp")
"""Names of dimensions along which ranks get different samples."""

PEER_DIMS = ("tp", "cp", "pp")
"""Names of dimensions along which ranks get the same samples."""


@dataclass(frozen=True)
class Share:
    """The part of the samples that a rank gets.

    Attributes:
        rank: Its place among the data ranks, from 0.
        num_ranks: Number of data ranks.
    """

    rank: int
    num_ranks: int

    def num_peers(self, world_size: int) -> int:
        """Number of ranks that get the same part.

        Raises:
            BadInputError: So many ranks cannot be divided evenly.
        """
        num_peers, rest = divmod(world_size, self.num_ranks)
        if rest or not num_peers:
            raise BadInputError(
                f"the mesh has {self.num_ranks} data-parallel rank(s), by which {world_size} rank(s) do not divide",
                hint="Make the mesh of all ranks, as run.mesh() does.",
            )
        return num_peers


def share_of(mesh: "DeviceMesh") -> Share:
    """This rank's share under a device mesh.

    Args:
        mesh: All of its dimensions are named in :data:`DATA_DIMS` or :data:`PEER_DIMS`; or it is one dimension of any
            other name, along which all ranks get different samples.

    Raises:
        BadInputError: It is no mesh, a dimension has another name, or this rank is not part of it.
    """
    if not all(hasattr(mesh, name) for name in ("mesh_dim_names", "shape", "get_coordinate")):
        raise BadInputError(
            f"mesh= takes a torch DeviceMesh, not a {type(mesh).__name__}",
            hint="Like mesh=run.mesh(dp=-1, tp=2), or mesh['dp'].",
        )
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise BadInputError("the mesh does not contain this rank", hint="Every rank reads data: use a mesh of all.")
    return share_at(names, tuple(mesh.shape), coordinate)


def share_at(names: Sequence[str], sizes: Sequence[int], coordinate: Sequence[int]) -> Share:
    """The share of the rank at a coordinate; the last data dimension counts fastest.

    Args:
        names: Of the dimensions, empty for one without a name.
        sizes: As many.
        coordinate: As many.

    Raises:
        BadInputError: A dimension is of no known kind.
    """
    chosen = set(data_dims(names))
    rank, num_ranks = 0, 1
    for name, size, place in zip(names, sizes, coordinate, strict=True):
        if name in chosen:
            rank, num_ranks = rank * size + place, num_ranks * size
    return Share(rank, num_ranks)


def data_dims(names: Sequence[str]) -> tuple[str, ...]:
    """Those of a mesh's dimensions along which ranks get different samples.

    Raises:
        BadInputError: It cannot be told, as a name is not known.
    """
    if len(names) == 1 and names[0] not in PEER_DIMS:
        return tuple(names)
    unknown = [name or "a dimension without a name" for name in names if name not in (*DATA_DIMS, *PEER_DIMS)]
    if unknown:
        raise BadInputError(
            f"of the mesh ({', '.join(name or '?' for name in names)}) it is not known whether ranks along "
            f"{', '.join(unknown)} get the same samples",
            hint=f"Ranks along {', '.join(DATA_DIMS)} get different samples, along {', '.join(PEER_DIMS)} the same. "
            "Use these names, or give the loader the one dimension along which samples differ, like mesh['replicate'].",
        )
    return tuple(name for name in names if name in DATA_DIMS)
