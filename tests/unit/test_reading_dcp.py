"""torch's own ``dcp.load`` over our reader: from any place, whatever the sharding, and nothing that is not verified."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_lab import Shard, lay
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from overnight import trainer
from overnight.core.errors import NotFoundError
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WHOLE = torch.arange(700_000.0).view(1000, 700)


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "größe" / "checkpoints")


def sharded(place: LocalPlace, step: int = 10) -> CheckpointName:
    """Two ranks: half of the rows each, and what both have."""
    common = {"bias": torch.arange(5).to(torch.bfloat16), "n": torch.tensor(step), "label": "x"}
    halves = [Shard(WHOLE[rank * 500 : (rank + 1) * 500] + step, (1000, 700), (rank * 500, 0)) for rank in range(2)]
    return lay(place, step, [{"model": {**common, "weight": half}} for half in halves])


def targets() -> dict[str, torch.Tensor]:
    return {
        "model.weight": torch.full((1000, 700), -1.0),
        "model.bias": torch.full((5,), -1, dtype=torch.bfloat16),
        "model.n": torch.tensor(-1),
    }


def require(found: dict[str, Any], step: int) -> None:
    assert torch.equal(found["model.weight"], WHOLE + step)
    assert torch.equal(found["model.bias"], torch.arange(5).to(torch.bfloat16)) and found["model.n"] == step


def test_the_newest_of_a_place_and_the_one_that_is_named(place: LocalPlace) -> None:
    older, newest = sharded(place, 10), sharded(place, 20)
    found = targets()
    dcp.load(found, storage_reader=trainer.StagedReader(place.root), no_dist=True)
    require(found, newest.step)
    dcp.load(found, storage_reader=trainer.StagedReader(place.path(older)), no_dist=True)
    require(found, older.step)
    reader = trainer.StagedReader(place.root)
    dcp.load(found, checkpoint_id=place.path(older), storage_reader=reader, no_dist=True)
    require(found, older.step)


def test_from_a_store(place: LocalPlace) -> None:
    name = sharded(place, 30)
    files = fsspec.filesystem("memory")
    files.put(str(place.root), "/reader/", recursive=True)
    try:
        for url in ("memory://reader/checkpoints", f"memory://reader/checkpoints/{name}"):
            found = targets()
            dcp.load(found, storage_reader=trainer.StagedReader(url), no_dist=True)
            require(found, 30)
    finally:
        files.rm("/reader", recursive=True)


def test_its_metadata_is_that_of_torchs_own_reader(place: LocalPlace) -> None:
    folder = place.path(sharded(place))
    ours = trainer.StagedReader(folder).read_metadata()
    theirs = dcp.FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, tensor in theirs.state_dict_metadata.items():
        one: Any = ours.state_dict_metadata[key]
        assert (one.size, one.chunks, one.properties.dtype) == (tensor.size, tensor.chunks, tensor.properties.dtype)
    assert ours.storage_data is not None and theirs.storage_data is not None
    assert set(ours.storage_data) == set(theirs.storage_data)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_nothing_is_given_of_a_damaged_file(place: LocalPlace, file: str) -> None:
    path = place.path(sharded(place)) / file
    reader = trainer.StagedReader(place.root)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = targets()
    with pytest.raises(CheckpointException, match=rf"{file} does not match its hash"):
        dcp.load(found, storage_reader=reader, no_dist=True)
    assert all((tensor == -1).all() for tensor in found.values())


class Planner:
    """As much of a planner as reading needs."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        self.committed: list[ReadItem] = []

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(item)


def test_a_part_of_a_stored_chunk(place: LocalPlace) -> None:
    sharded(place)
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("model.weight"),
        dest_offsets=torch.Size((0, 0)),
        storage_index=MetadataIndex("model.weight", torch.Size((500, 0)), 1),
        storage_offsets=torch.Size((7, 3)),
        lengths=torch.Size((20, 10)),
    )
    planner: Any = Planner(torch.zeros(20, 10))
    trainer.StagedReader(place.root).read_data(LoadPlan([item]), planner).wait()
    assert planner.committed == [item] and torch.equal(planner.target, WHOLE[507:527, 3:13] + 10)


@pytest.fixture
def alone() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_not_there_is_said(place: LocalPlace, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        trainer.StagedReader(tmp_path / "nothing")
    sharded(place)
    with pytest.raises(CheckpointException, match=r"model\.other"):
        dcp.load({"model.other": torch.zeros(2)}, storage_reader=trainer.StagedReader(place.root), no_dist=True)


def test_in_a_process_group(place: LocalPlace, alone: None) -> None:
    sharded(place)
    found = targets()
    dcp.load(found, storage_reader=trainer.StagedReader(place.root))
    require(found, 10)
