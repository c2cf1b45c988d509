"""Reading what is in a good checkpoint: every kind of tensor, once, to where it belongs, under any sharding."""

import gc
import itertools
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_lab import Shard, lay
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.index import Chunk as StoredChunk
from overnight.trainer.checkpoint.index import TensorEntry
from overnight.trainer.checkpoint.manifest import read_manifest
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace
from overnight.trainer.checkpoint.reading import memory
from overnight.trainer.checkpoint.reading.assembly import Assembly
from overnight.trainer.checkpoint.reading.finding import open_newest
from overnight.trainer.checkpoint.reading.inspection import inspect
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.reading.source import FolderSource
from overnight.trainer.checkpoint.sharding import Chunk


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "Prüfpunkte ☂")


def restored_from(place: LocalPlace, name: CheckpointName, rank: int = 0) -> Restored:
    folder = place.path(name)
    return Restored(folder, read_manifest(folder), rank)


def held_from(place: LocalPlace) -> Restored:
    found = open_newest(place)
    assert found is not None
    return found


class Counting(FolderSource):
    """Counts the bytes that are read of each file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bytes: dict[str, int] = {}

    def read(self, file: str, start: int, end: int, wants: Any) -> str:
        self.bytes[file] = self.bytes.get(file, 0) + end - start
        return super().read(file, start, end, wants)


SLABS = memory.Slabs()

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.numel() == 0 or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("hold", [True, False])
def test_every_type_comes_back_bit_by_bit(place: LocalPlace, hold: bool) -> None:
    state = {str(dtype): random_tensor(dtype, 5, 3) for dtype in DTYPES}
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "big": random_tensor(torch.float32, 3 << 20),
        "at a block's border": random_tensor(torch.uint8, 1 << 20),
        "a byte more": random_tensor(torch.uint8, (1 << 20) + 1),
    }
    lay(place, 1, [{"it": state}])
    found = held_from(place) if hold else restored_from(place, place.checkpoints()[0])
    back = found.state("it")
    assert list(back) == list(state)
    assert all(same(back[key], state[key]) for key in state)


def test_what_is_no_tensor_comes_back_too(place: LocalPlace) -> None:
    state = {"array": np.arange(6.0).reshape(2, 3), "keys": {1: "a", (2, 3): b"b"}, "list": [1, None, 2.5]}
    lay(place, 1, [{"it": state}])
    back = held_from(place).state("it")
    assert np.array_equal(back["array"], state["array"]) and back["keys"] == state["keys"]
    assert back["list"] == state["list"]


def test_a_start_reads_every_byte_once(place: LocalPlace) -> None:
    """Verified and placed in one pass; handing out reads nothing."""
    big = random_tensor(torch.float32, 9 << 20)
    name = lay(place, 1, [{"it": {"big": big, "small": torch.ones(3)}, "other": {"n": 1}}])
    source = Counting(place.path(name))
    manifest = read_manifest(place.path(name))
    found = Restored(source, manifest)
    found.hold()
    read_once = dict(source.bytes)
    data = {file: count for file, count in read_once.items() if file.endswith(".distcp")}
    assert data == {file: entry.size for file, entry in manifest.files.items() if file.endswith(".distcp")}
    assert set(read_once) == set(manifest.files)
    assert same(found.state("it")["big"], big)
    assert source.bytes == read_once


def test_what_was_handed_over_is_the_callers_alone(place: LocalPlace) -> None:
    shared = torch.ones(1 << 20)
    lay(place, 1, [{"model": {"w": shared, "tied": shared}, "ema": {"w": shared}}])
    found = held_from(place)
    model = found.state("model")
    assert model["w"] is model["tied"], "tied inside an object"
    model["w"].zero_()
    assert found.state("ema")["w"].sum() == 1 << 20, "but not between objects"
    assert found.state("model")["w"].sum() == 1 << 20, "and whoever asks again gets the checkpoint's values"


def test_memory_is_let_go_of(place: LocalPlace) -> None:
    lay(place, 1, [{"it": {"w": torch.ones(1 << 20)}, "never asked for": {"w": torch.zeros(1 << 20)}}])
    found = held_from(place)
    found.state("it")
    assert len(found._held) == 1
    found.release()
    gc.collect()
    assert not found._held
    assert found.state("never asked for")["w"].sum() == 0


def test_ranks_see_their_own_and_new_ranks_what_rank_0_saved(place: LocalPlace) -> None:
    ranks = [{"it": {"same": torch.ones(9), "own": torch.full((3,), float(rank)), "n": rank}} for rank in range(3)]
    name = lay(place, 1, ranks, private=["it.own"])
    for rank, expected in ((0, 0), (2, 2), (7, 0)):
        state = restored_from(place, name, rank).state("it")
        assert state["n"] == expected and torch.equal(state["own"], torch.full((3,), float(expected)))
        assert torch.equal(state["same"], torch.ones(9))


def test_holes_in_a_file_are_read_as_what_was_written(place: LocalPlace) -> None:
    """A tensor of zeros whose file was made sparse by a copy."""
    name = lay(place, 1, [{"it": {"zeros": torch.zeros(4 << 20), "after": torch.arange(99)}}])
    path = place.path(name) / "__0_0.distcp"
    data = path.read_bytes()
    with path.open("wb") as file:
        for start in range(0, len(data), 4096):
            if any(block := data[start : start + 4096]):
                file.seek(start)
                file.write(block)
        file.truncate(len(data))
    assert path.stat().st_blocks * 512 < len(data) // 4
    back = held_from(place).state("it")
    assert back["zeros"].count_nonzero() == 0 and torch.equal(back["after"], torch.arange(99))


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, memory.SLAB_BYTES - 1, memory.SLAB_BYTES + 17])
def test_each_tensor_has_a_storage_of_its_own(num_bytes: int) -> None:
    """Copies and ``torch.save`` take whole storages."""
    slabs = memory.Slabs()
    tensors = [memory.shaped(slabs.take(num_bytes), torch.uint8, (num_bytes,)) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        assert tensor.untyped_storage().nbytes() == num_bytes and tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert [int(tensor.max()) for tensor in tensors if num_bytes] == ([1, 2, 3] if num_bytes else [])


def test_a_slab_goes_with_the_last_of_its_tensors() -> None:
    slabs = memory.Slabs()
    tensor = memory.shaped(slabs.take(8), torch.float64, ())
    slab = weakref.ref(slabs.take(1).obj)
    del slabs
    assert slab() is not None and tensor.fill_(2.5) == 2.5
    del tensor
    gc.collect()
    assert slab() is None


# -- sharding ----------------------------------------------------------------------------------------------------------


def boxes(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> Iterator[Chunk]:
    """All boxes between cuts along each dimension."""
    at: list[list[tuple[int, int]]] = []
    for length, inner in zip(shape, cuts, strict=True):
        borders = sorted({0, length, *(cut for cut in inner if cut < length)})
        at.append(list(itertools.pairwise(borders)))
    grid: list[list[tuple[int, int]]] = [[]]
    for spans in at:
        grid = [[*row, span] for row in grid for span in spans]
    for row in grid:
        yield Chunk(tuple(start for start, _ in row), tuple(end - start for start, end in row))


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], Chunk]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    cuts = [draw(st.lists(st.integers(1, 5), max_size=3)) for _ in shape]
    starts = tuple(draw(st.integers(0, length - 1)) for length in shape)
    lengths = tuple(draw(st.integers(0, length - start)) for length, start in zip(shape, starts, strict=True))
    return shape, cuts, Chunk(starts, lengths)


@settings(max_examples=150, deadline=None)
@given(reshardings())
def test_any_part_is_put_together_from_any_chunks(case: tuple[tuple[int, ...], list[list[int]], Chunk]) -> None:
    shape, cuts, wanted = case
    whole = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    data = bytearray(b"\xff" * 64)
    chunks = []
    for box in boxes(shape, cuts):
        part = whole[tuple(slice(a, a + n) for a, n in zip(box.at, box.shape, strict=True))].contiguous()
        chunks.append(StoredChunk("f", len(data), part.numel() * 2, box.at, box.shape, (0, 0), ""))
        data += memory.bytes_of(part)
    assembly = Assembly({"w": TensorEntry("int16", shape, tuple(chunks))})
    target = assembly.tensor("w", wanted, memory.Slabs())
    for want in assembly.wants.get("f", []):
        want.into[:] = data[want.offset : want.end]
    assembly.finish()
    expected = whole[tuple(slice(a, a + n) for a, n in zip(wanted.at, wanted.shape, strict=True))]
    assert torch.equal(target, expected)


def test_chunks_that_do_not_cover_a_tensor_are_damage() -> None:
    half = StoredChunk("f", 0, 8, (0, 0), (2, 1), (0, 0), "")
    index = {"w": TensorEntry("float32", (2, 2), (half,))}
    with pytest.raises(CorruptCheckpointError, match="do not make up"):
        Assembly(index).tensor("w", None, SLABS)
    assert Assembly(index).tensor("w", Chunk((0, 0), (2, 1)), SLABS).shape == (2, 1)
    with pytest.raises(CorruptCheckpointError, match="no part of it"):
        Assembly(index).tensor("w", Chunk((1, 0), (2, 1)), SLABS)
    with pytest.raises(CorruptCheckpointError, match="no type float3"):
        Assembly({"w": TensorEntry("float3", (1,), ())}).tensor("w", None, SLABS)
    with pytest.raises(CorruptCheckpointError, match="nothing is not in the index"):
        Assembly(index).tensor("nothing", None, SLABS)


WHOLE = torch.arange(64.0).view(16, 4)


def sharded(place: LocalPlace, world_size: int) -> CheckpointName:
    rows = 16 // world_size
    ranks = [
        {"it": {"w": Shard(WHOLE[rank * rows : (rank + 1) * rows], (16, 4), (rank * rows, 0)), "n": rank}}
        for rank in range(world_size)
    ]
    return lay(place, 1, ranks)


def test_shards_make_a_whole_for_who_has_no_mesh(place: LocalPlace) -> None:
    """What ``fully_shard`` saved on four ranks, read by one that trains without it."""
    sharded(place, 4)
    assert torch.equal(held_from(place).state("it")["w"], WHOLE)
    facts = inspect(place.root)
    assert facts["tensors"] == {"it.w": "float32[16, 4]"} and facts["objects"] == {"it": WHOLE.numel() * 4}


def test_a_rank_of_the_same_gang_holds_its_own_chunk_and_verifies_its_share(place: LocalPlace) -> None:
    name = sharded(place, 4)
    manifest = read_manifest(place.path(name))
    seen: dict[str, int] = {}
    for rank in range(4):
        source = Counting(place.path(name))
        found = Restored(source, manifest, rank)
        found.hold(rank, 4)
        assert [chunk.at for _, chunk in found._held] == [(4 * rank, 0)]
        for file, count in source.bytes.items():
            seen[file] = seen.get(file, 0) + count
    assert all(seen[file] >= entry.size for file, entry in manifest.files.items()), "together they saw every byte"


def test_few_threads_share_a_machine_with_other_ranks(place: LocalPlace) -> None:
    name = lay(place, 1, [{"it": {"n": 1}}])
    manifest = read_manifest(place.path(name))
    assert Restored(place.path(name), manifest, local_world_size=4 * (os.cpu_count() or 1))._threads == 1
