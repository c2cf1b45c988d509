"""Sizes of a mesh, and which samples are a rank's under one."""

import math
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.errors import BadInputError, IndivisibleBatchError
from overnight.trainer.data.audit import Audit, audit
from overnight.trainer.data.entries import read_record
from overnight.trainer.data.loader import DataLoader
from overnight.trainer.data.record import SampleRecord
from overnight.trainer.data.shares import Share, data_dims, share_at, share_of
from overnight.trainer.meshes import Arrangement, fit


def mesh_at(coordinate: list[int] | None, **sizes: int) -> Any:
    """What a loader asks a device mesh for; a real one needs as many processes."""
    shape, names = tuple(sizes.values()), tuple(sizes)
    return SimpleNamespace(mesh_dim_names=names, shape=shape, ndim=len(shape), get_coordinate=lambda: coordinate)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_sizes_multiply_to_the_number_of_ranks(sizes: list[int], data: st.DataObject) -> None:
    names = ("dp_replicate", "dp_shard", "cp", "tp")[: len(sizes)]
    whole = dict(zip(names, sizes, strict=True))
    assert fit(whole, math.prod(sizes)) == whole
    left = data.draw(st.sampled_from(names))
    found = fit(whole | {left: -1}, math.prod(sizes))
    assert (found, list(found)) == (whole, list(whole))


@given(st.integers(1, 24), st.lists(st.integers(1, 9) | st.just(-1), min_size=2, max_size=2))
def test_sizes_that_do_not_fit_name_some_that_do(world_size: int, sizes: list[int]) -> None:
    wanted = dict(zip(("dp", "tp"), sizes, strict=True))
    try:
        assert math.prod(fit(wanted, world_size).values()) == world_size
    except BadInputError as error:
        if sizes == [-1, -1]:
            assert "only one" in error.message
            return
        named = re.findall(r"dp=(\d+), tp=(\d+)", error.hint or "")
        assert named and all(int(dp) * int(tp) == world_size for dp, tp in named)
        for dp, tp in named:
            assert fit({"dp": int(dp), "tp": int(tp)}, world_size) == {"dp": int(dp), "tp": int(tp)}


def test_the_nearest_sizes_come_first() -> None:
    with pytest.raises(BadInputError, match="a mesh of dp=3, tp=2 needs 6 rank") as caught:
        fit({"dp": 3, "tp": 2}, 8)
    assert caught.value.hint == "Sizes that fit 8 rank(s): dp=4, tp=2; dp=2, tp=4; dp=8, tp=1; dp=1, tp=8."
    with pytest.raises(BadInputError, match="dp=-1, tp=3 needs a multiple of 3 ranks, this run has 8") as caught:
        fit({"dp": -1, "tp": 3}, 8)
    assert caught.value.hint == "Sizes that fit 8 rank(s): dp=2, tp=4; dp=4, tp=2; dp=1, tp=8; dp=8, tp=1."


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "needs a dimension"),
        ({"dp": 0}, "dp=0 is no size"),
        ({"dp": -2}, "dp=-2 is no size"),
        ({"dp": True}, "dp=True is no size"),
        ({"dp": 2.0}, "dp=2.0 is no size"),
        ({"dp": -1, "tp": -1}, "dp and tp are -1"),
        ({"dp": 2, "model": 2}, "along model get the same samples"),
    ],
)
def test_sizes_that_mean_nothing(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        fit(sizes, 4)


def test_a_mesh_of_another_size_is_refused_before_any_group_is_made() -> None:
    with pytest.raises(BadInputError, match="needs 4 rank"):
        Arrangement(0, 2).mesh({"dp": 2, "tp": 2}, torch.device("cpu"))


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp"), ("dp_replicate", "dp_shard", "tp"), ("pp", "fsdp")])
def test_each_share_has_as_many_peers(names: tuple[str, ...]) -> None:
    sizes = (2, 3, 2)[: len(names)]
    shares = [share_at(names, sizes, at) for at in product(*map(range, sizes))]
    num_ranks = math.prod(size for name, size in zip(names, sizes, strict=True) if name in data_dims(names))
    assert {share.num_ranks for share in shares} == {num_ranks}
    assert sorted(share.rank for share in shares) == [
        rank for rank in range(num_ranks) for _ in range(len(shares) // num_ranks)
    ]
    assert shares[0].num_peers(len(shares)) == len(shares) // num_ranks


def test_without_peers_a_share_is_the_rank() -> None:
    shares = [share_at(("dp_replicate", "dp_shard"), (2, 3), at) for at in product(range(2), range(3))]
    assert shares == [Share(rank, 6) for rank in range(6)]


def test_one_dimension_of_another_name_divides_the_samples_and_one_of_peers_does_not() -> None:
    assert share_of(mesh_at([2], replicate=4)) == Share(2, 4)
    assert share_of(mesh_at([2], tp=4)) == Share(0, 1)
    with pytest.raises(BadInputError, match=r"mesh \(replicate, shard\).* along replicate, shard get the same"):
        share_of(mesh_at([0, 0], replicate=2, shard=2))
    with pytest.raises(BadInputError, match="does not contain this rank"):
        share_of(mesh_at(None, dp=2, tp=2))
    with pytest.raises(BadInputError, match="not a tuple"):
        share_of((2, 2))  # type: ignore[arg-type]


def loader_at(coordinate: list[int], dp: int, tp: int, **options: Any) -> DataLoader:
    sizes = {"global_batch_size": 12, "micro_batch_size": 2, "shuffle": True}
    loader = DataLoader(range(50), mesh=mesh_at(coordinate, dp=dp, tp=tp), **(sizes | options))
    loader.bind(rank=coordinate[0] * tp + coordinate[1], world_size=dp * tp, seed=1)
    return loader


def test_a_loader_divides_by_data_ranks_alone() -> None:
    loader = loader_at([1, 1], 3, 2)
    assert (loader.rank, loader.world_size, loader.num_peers) == (1, 3, 2)
    assert (loader.accumulate, loader.global_batch) == (2, 12)
    plain = DataLoader(range(50), global_batch_size=12, micro_batch_size=2, shuffle=True)
    plain.bind(rank=1, world_size=3, seed=1)
    assert plain.num_peers == 1
    batches = [batch.indices.tolist() for batch in plain.micro_batches(0, 0)]
    assert [batch.indices.tolist() for batch in loader.micro_batches(0, 0)] == batches
    assert [batch.indices.tolist() for batch in loader_at([1, 0], 3, 2).micro_batches(0, 0)] == batches
    with pytest.raises(IndivisibleBatchError, match=r"by 4 data-parallel rank\(s\) x micro batch 2") as caught:
        loader_at([0, 0], 4, 2)
    assert caught.value.details["fitting_world_sizes"] == [1, 2, 3, 6]


def test_one_data_rank_with_peers_keeps_the_short_batch_as_one_rank_does() -> None:
    sizes = {"global_batch_size": None, "micro_batch_size": None, "batch_size": 8}
    batches = [list(loader_at([0, tp], 1, 2, **sizes)) for tp in range(2)]
    assert [len(batch) for batch in batches[0]] == [8] * 6 + [2]
    assert [one.tolist() for one in batches[0]] == [other.tolist() for other in batches[1]]


def test_a_mesh_of_other_ranks_is_refused() -> None:
    loader = DataLoader(range(50), batch_size=1, mesh=mesh_at([0], dp=4))
    with pytest.raises(BadInputError, match=r"4 data-parallel rank\(s\), by which 6 rank\(s\) do not divide"):
        loader.bind(rank=0, world_size=6)


def record(trial: Path, **changes: Any) -> None:
    """The records of an attempt of 2 x 2; ``changes`` are those of rank 3."""
    for rank, (dp, tp) in enumerate(product(range(2), range(2))):
        wrong = changes if rank == 3 else {}
        loader = loader_at([dp, tp], 2, 2, seed=wrong.get("seed", 1), micro_batch_size=3)
        book = SampleRecord(trial / "attempts" / "0001", rank=rank, world_size=4, attempt=1)
        book.declare(epochs=2, samples_per_epoch=48, data_rank=wrong.get("data_rank", loader.rank))
        for step in range(wrong.get("num_updates", 8)):
            for batch in loader.micro_batches(loader.epoch, loader.position):
                for _ in range(wrong.get("times", 1) if step == 3 else 1):
                    book.append(step, batch)
                if batch.last_of_update:
                    break
            loader.advance()
        book.close()


WHOLE = Audit(expected=96, recorded=96, repeated=0, skipped=0, updates=8)


def test_what_peers_consumed_counts_once(tmp_path: Path) -> None:
    record(tmp_path)
    ranks = [read_record(tmp_path / f"attempts/0001/samples/rank-{rank}.1.bin") for rank in range(4)]
    assert [{entry.data_rank for entry in one.entries} for one in ranks] == [{0}, {0}, {1}, {1}]
    assert audit(tmp_path) == WHOLE


def test_a_peer_that_recorded_less_takes_nothing_away(tmp_path: Path) -> None:
    record(tmp_path, num_updates=5)
    assert audit(tmp_path) == WHOLE


def test_peers_that_were_given_different_samples_are_found_out(tmp_path: Path) -> None:
    record(tmp_path, seed=2)
    found = audit(tmp_path)
    assert found.recorded == 96 + 48 and found.repeated == 48


def test_a_peer_that_consumed_a_batch_twice_is_found_out(tmp_path: Path) -> None:
    record(tmp_path, times=2)
    assert audit(tmp_path) == Audit(expected=96, recorded=102, repeated=6, skipped=0, updates=8)


def test_ranks_that_are_no_peers_and_repeat_each_other_are_found_out(tmp_path: Path) -> None:
    record(tmp_path, data_rank=7)
    assert audit(tmp_path) == Audit(expected=96, recorded=144, repeated=48, skipped=0, updates=8)
