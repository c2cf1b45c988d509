"""The keyed permutation: a bijection, uniform, and the same in every version."""

import itertools

import numpy as np
import pytest
import xxhash
from chance import stats
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.trainer.data.permutation import SMALL_LENGTH, Permutation
from overnight.trainer.rng import derive, splitmix64

KEYS = st.integers(0, 2**64 - 1)
SIGNIFICANCE = 1e-4


def order(length: int, key: int) -> np.ndarray:
    return Permutation(length, key)(np.arange(length))


@given(st.one_of(st.integers(0, 300), st.integers(SMALL_LENGTH - 3, SMALL_LENGTH + 3), st.integers(4096, 70_000)), KEYS)
@settings(max_examples=80, deadline=None)
def test_every_element_comes_exactly_once(length: int, key: int) -> None:
    assert np.array_equal(np.sort(order(length, key)), np.arange(length))


@given(st.integers(1, 100_000), KEYS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_position_does_not_depend_on_what_else_is_asked(length: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(length, key)
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    together = permutation(positions)
    assert together.tolist() == [int(permutation(np.array([position]))[0]) for position in positions]


@pytest.mark.parametrize("length", [10**9, 2**40 + 1, 2**61])
def test_huge_lengths_need_no_memory_and_stay_injective(length: int) -> None:
    permutation = Permutation(length, 5)
    positions = np.concatenate([np.arange(3000), np.arange(length - 3000, length)])
    values = permutation(positions)
    assert len(np.unique(values)) == len(positions)
    assert values.min() >= 0
    assert values.max() < length
    assert abs(values.mean() / length - 0.5) < 0.03


def test_perfect_squares_and_powers_of_two_around_the_threshold() -> None:
    for length in (64**2, 64**2 + 1, 65 * 64, 65**2 - 1, 2**13, 2**16):
        assert np.array_equal(np.sort(order(length, 1)), np.arange(length))


# The promise across versions: a paused trial goes on with the same samples. Never change these values.
GOLDEN = [
    (1, 0, [0], "c77b3abb6f87acd9"),
    (10, 1, [9, 0, 5, 4, 8, 1], "b5dcd0d0de04c06a"),
    (1437, 2890577252857745701, [1250, 600, 974, 1117, 1120, 432], "ca51852501379d5a"),
    (4096, 3, [3082, 4017, 1037, 3894, 2057, 1646], "33f2eefed4561fa6"),
    (5000, 9223372036854775813, [2240, 2799, 4913, 3082, 2958, 2708], "59dba0152ab585c3"),
    (1_000_003, 9152388779196324912, [968294, 797555, 414941, 934167, 645273, 973258], "8daa279be84e6ddf"),
]


@pytest.mark.parametrize(("length", "key", "first", "digest"), GOLDEN)
def test_the_order_is_the_same_in_every_version(length: int, key: int, first: list[int], digest: str) -> None:
    values = order(length, key)
    assert values[:6].tolist() == first
    assert xxhash.xxh3_64_hexdigest(values.astype("<i8").tobytes()) == digest


def test_the_order_of_huge_lengths_is_the_same_in_every_version() -> None:
    values = Permutation(2**50 + 7, 9)(np.array([0, 1, 2**50]))
    assert values.tolist() == [638137891631173, 850202230183305, 1004803976508017]


def test_position_by_value_is_uniform_over_keys_for_tables() -> None:
    length, num_keys = 7, 10_000
    counts = np.zeros((length, length))
    for key in range(num_keys):
        counts[np.arange(length), order(length, key)] += 1
    assert stats().chisquare(counts.ravel(), ddof=2 * length - 2).pvalue > SIGNIFICANCE


def test_all_orders_of_four_are_equally_frequent() -> None:
    seen = {permutation: 0 for permutation in itertools.permutations(range(4))}
    for key in range(12_000):
        seen[tuple(order(4, derive(key, "permutation", 0)).tolist())] += 1
    assert stats().chisquare(list(seen.values())).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("length", [4096, 5000, 100_003])
def test_position_by_value_is_uniform_over_keys_for_feistel(length: int) -> None:
    num_cells, num_keys = 16, 3000
    positions = np.linspace(0, length - 1, 64).astype(np.int64)
    counts = np.zeros((64, num_cells))
    for key in range(num_keys):
        cells = Permutation(length, derive(key, "uniform"))(positions) * num_cells // length
        np.add.at(counts, (np.arange(64), cells), 1)
    expected = np.array([np.sum(np.arange(length) * num_cells // length == cell) for cell in range(num_cells)])
    expected = np.broadcast_to(expected / length * num_keys, counts.shape)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert stats().chi2.sf(statistic, 64 * (num_cells - 1)) > SIGNIFICANCE


@pytest.mark.parametrize("length", [4096, 6000, 65_536])
def test_pairs_of_neighbours_are_independent(length: int) -> None:
    num_cells, num_keys = 8, 4000
    counts = np.zeros((num_cells, num_cells))
    positions = np.array([0, 1, length // 2, length // 2 + 1, length - 2, length - 1])
    for key in range(num_keys):
        cells = Permutation(length, derive(key, "pairs"))(positions) * num_cells // length
        np.add.at(counts, (cells[0::2], cells[1::2]), 1)
    assert stats().chi2_contingency(counts).pvalue > SIGNIFICANCE
    assert stats().chisquare(counts.ravel()).pvalue > SIGNIFICANCE


def test_one_key_leaves_no_trace_of_the_original_order() -> None:
    values = order(100_000, 7)
    assert abs(np.corrcoef(values, np.arange(len(values)))[0, 1]) < 0.02
    steps = np.diff(values) % 97
    assert stats().chisquare(np.bincount(steps, minlength=97)).pvalue > SIGNIFICANCE
    assert abs(np.sum(values == np.arange(len(values))) - 1) < 8


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    orders = [order(5000, derive(seed, "permutation", epoch)) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.08


def test_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        Permutation(10, 1)(np.array([10]))
    with pytest.raises(IndexError):
        Permutation(5000, 1)(np.array([-1]))
    with pytest.raises(ValueError, match="length"):
        Permutation(-1, 1)
    with pytest.raises(ValueError, match="key"):
        Permutation(10, 2**64)


def test_splitmix64_is_the_published_stream() -> None:
    # First outputs for seed 1234567 of the reference implementation (Vigna, splitmix64.c).
    outputs = splitmix64(1234567, np.arange(1, 6, dtype=np.uint64)).tolist()
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
