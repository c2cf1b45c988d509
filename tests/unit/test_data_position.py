"""The arithmetic of positions: every sample to exactly one rank, at every world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.errors import BadInputError, IndivisibleBatchError
from overnight.trainer.data.position import Geometry, Tail, divide, weights_of, world_sizes

SMALL = st.integers(1, 6)


def positions(geometry: Geometry, start: int, length: int) -> list[int]:
    ranks = [Geometry(geometry.micro_batch, geometry.accumulate, rank, geometry.world_size, geometry.tail)
             for rank in range(geometry.world_size)]  # fmt: skip
    return sorted(
        position
        for rank in ranks
        for block in rank.blocks(start, length)
        for position in range(block.first, block.first + block.size)
    )


@given(SMALL, SMALL, SMALL, st.integers(0, 200), st.integers(0, 220))
def test_dropping_covers_whole_updates_exactly_once(
    micro: int, accumulate: int, ranks: int, length: int, at: int
) -> None:
    geometry = Geometry(micro, accumulate, 0, ranks, Tail.DROP)
    start = min(at, length)
    end = start + geometry.num_updates(length, start) * geometry.global_batch
    assert positions(geometry, start, length) == list(range(start, end))
    assert length - geometry.global_batch < end <= max(length, start)
    assert geometry.num_samples(length) == length // geometry.global_batch * geometry.global_batch


@given(SMALL, SMALL, SMALL, st.integers(1, 200))
def test_padding_fills_the_last_update_with_weight_zero(micro: int, accumulate: int, ranks: int, length: int) -> None:
    geometry = Geometry(micro, accumulate, 0, ranks, Tail.PAD)
    covered = positions(geometry, 0, length)
    assert covered == list(range(geometry.num_updates(length) * geometry.global_batch))
    assert 0 <= len(covered) - length < geometry.global_batch
    total = sum(
        weights_of(block, length).sum()
        for rank in range(ranks)
        for block in Geometry(micro, accumulate, rank, ranks, Tail.PAD).blocks(0, length)
    )
    assert total == length


@given(st.integers(1, 9), st.integers(0, 100))
def test_keeping_makes_one_short_batch(micro: int, length: int) -> None:
    blocks = list(Geometry(micro, 1, 0, 1, Tail.KEEP).blocks(0, length))
    assert [block.size for block in blocks] == [micro] * (length // micro) + [length % micro] * bool(length % micro)
    assert all(block.last_of_update for block in blocks)
    assert [block.position for block in blocks[1:]] == [block.end for block in blocks[:-1]]


@given(st.integers(1, 4), st.integers(1, 24))
def test_the_micro_batches_are_the_same_at_every_world_size(micro: int, num_blocks: int) -> None:
    def firsts(ranks: int) -> set[int]:
        fitted, accumulate = divide(micro * num_blocks, micro, ranks)
        assert fitted == micro
        return {
            block.first
            for rank in range(ranks)
            for block in Geometry(micro, accumulate, rank, ranks, Tail.DROP).blocks(0, 3 * micro * num_blocks)
        }

    sizes = world_sizes(micro * num_blocks, micro)
    assert sizes[0] == 1
    assert sizes[-1] == num_blocks
    assert len({frozenset(firsts(ranks)) for ranks in sizes}) == 1


@given(st.integers(1, 300), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 20))
def test_a_global_batch_divides_or_the_fitting_sizes_are_named(total: int, micro: int | None, ranks: int) -> None:
    try:
        fitted, accumulate = divide(total, micro, ranks)
    except IndivisibleBatchError as error:
        assert total % (ranks * (micro or 1))
        assert ranks not in error.details["fitting_world_sizes"]
        for size in error.details["fitting_world_sizes"]:
            divide(total, micro, size)
        for size in error.details["fitting_global_batches"]:
            divide(size, micro, ranks)
    else:
        assert fitted * accumulate * ranks == total
        assert ranks in world_sizes(total, micro)


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(IndivisibleBatchError) as caught:
        divide(64, 8, 3)
    assert isinstance(caught.value, BadInputError)
    assert "64 does not divide by 3 rank(s) x micro batch 8" in str(caught.value)
    assert "ranks that fit: 1, 2, 4, 8" in str(caught.value)
    assert "48, 72" in str(caught.value)


def test_weights_mark_padding() -> None:
    block = next(Geometry(4, 1, 0, 1, Tail.PAD).blocks(4, 6))
    assert weights_of(block, 6).tolist() == [1, 1, 0, 0]
    assert weights_of(block, 6).dtype == np.float32
