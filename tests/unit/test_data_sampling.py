"""Orders of an epoch: weighted, the user's own, and the refusals."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from chance import stats
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from overnight.core.errors import BadInputError, DataError
from overnight.trainer import rng
from overnight.trainer.data.sampling import SamplerOrder, ShuffledOrder, WeightedOrder


def drawn(order: Any, epoch: int) -> list[int]:
    return list(order.indices(epoch, np.arange(order.length(epoch))).tolist())


def test_weighted_draws_follow_the_weights() -> None:
    weights = [0.5, 0.0, 3.0, 1.5, 0.0]
    order = WeightedOrder(weights, 50_000, seed=1)
    counts = np.bincount(drawn(order, 0), minlength=5)
    assert counts[1] == counts[4] == 0
    expected = np.array([0.5, 3.0, 1.5]) / 5 * 50_000
    assert stats().chisquare(counts[[0, 2, 3]], expected).pvalue > 1e-4


def test_weighted_draws_are_a_function_of_the_position() -> None:
    order = WeightedOrder(range(1, 100), 1000, seed=2)
    whole = drawn(order, 3)
    assert order.indices(3, np.array([999, 0, 500])).tolist() == [whole[999], whole[0], whole[500]]
    assert drawn(order, 4) != whole
    assert drawn(WeightedOrder(range(1, 100), 1000, seed=3), 3) != whole


# A promise across versions, as the permutation is.
def test_weighted_draws_are_the_same_in_every_version() -> None:
    values = drawn(WeightedOrder([1, 0, 2, 5], 20, seed=3), 1)
    assert values == [2, 0, 2, 3, 2, 3, 3, 2, 3, 2, 0, 2, 2, 3, 3, 3, 3, 0, 3, 3]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf")], [[1.0], [2.0]]])
def test_weights_that_mean_nothing_are_refused(weights: Any) -> None:
    with pytest.raises(DataError, match="weights must be"):
        WeightedOrder(weights, 10, seed=0)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=50).filter(any), st.integers(0, 2**32))
def test_only_samples_with_weight_are_drawn(weights: list[float], seed: int) -> None:
    if not np.isfinite(np.cumsum(weights)[-1]):
        return
    assert all(weights[index] > 0 for index in drawn(WeightedOrder(weights, 200, seed), 0))


class EveryGenerator:
    """A sampler that draws from all default generators."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_samples):
            yield (random.randrange(100) + np.random.randint(100) + int(torch.randint(100, ()))) % self.num_samples


def make_generator_sampler() -> RandomSampler:
    return RandomSampler(range(40), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryGenerator(40),
        lambda: RandomSampler(range(40)),
        make_generator_sampler,
        lambda: WeightedRandomSampler([1.0] * 40, 40),
        lambda: torch.utils.data.SubsetRandomSampler(list(range(40))),
    ],
)
def test_a_sampler_is_a_function_of_seed_and_epoch(make: Any) -> None:
    sampler = make()
    order = SamplerOrder(sampler, 40, seed=1)
    epochs = [drawn(order, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [drawn(order, epoch) for epoch in range(3)] == epochs
    torch.rand(7), random.random()
    assert drawn(SamplerOrder(make(), 40, seed=1), 2) == epochs[2]
    assert drawn(SamplerOrder(make(), 40, seed=2), 2) != epochs[2]


def test_a_sampler_does_not_touch_the_process_generators() -> None:
    with rng.isolated():
        rng.seed_all(1)
        before = rng.capture()
        drawn(SamplerOrder(EveryGenerator(40), 40, seed=1), 0)
        after = rng.capture()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"]["words"], after["python"]["words"])
    assert torch.equal(before["numpy"]["words"], after["numpy"]["words"])
    assert before["numpy"]["position"] == after["numpy"]["position"]


def test_set_epoch_is_called() -> None:
    class Rotating(list[int]):
        def set_epoch(self, epoch: int) -> None:
            self[:] = [(index + epoch) % 4 for index in range(4)]

    order = SamplerOrder(Rotating(), 4, seed=0)
    assert drawn(order, 3) == [3, 0, 1, 2]
    assert order.fingerprint(1) != order.fingerprint(2)
    assert order.kind == "sampler:Rotating"


def test_samplers_that_cannot_be_continued_are_refused() -> None:
    dataset: Any = range(8)
    with pytest.raises(BadInputError, match="DistributedSampler splits") as caught:
        SamplerOrder(DistributedSampler(dataset, num_replicas=2, rank=0), 8, seed=0)
    assert "shuffle=True" in caught.value.hint
    with pytest.raises(BadInputError, match="exhausted after one epoch"):
        SamplerOrder(iter([1, 2]), 8, seed=0)
    with pytest.raises(BadInputError, match="Batch samplers are not supported"):
        SamplerOrder(BatchSampler(SequentialSampler(range(8)), 2, False), 8, seed=0).length(0)
    with pytest.raises(DataError, match="index 8, the data set has 8"):
        SamplerOrder([1, 8], 8, seed=0).length(0)
    with pytest.raises(DataError, match="index -1"):
        SamplerOrder([1, -1], 8, seed=0).length(0)


def test_numpy_and_torch_indices_are_taken() -> None:
    assert drawn(SamplerOrder([np.int32(2), torch.tensor(1), 0], 3, seed=0), 0) == [2, 1, 0]


def test_a_shuffled_order_changes_with_the_epoch_and_not_with_the_calls() -> None:
    order = ShuffledOrder(100, seed=3)
    first, second = drawn(order, 0), drawn(order, 1)
    assert first != second
    assert drawn(order, 0) == first
    assert sorted(second) == list(range(100))
