"""Random state as data: saved, restored loudly, derived, isolated."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import PCG64

from overnight.core.errors import CheckpointError
from overnight.trainer import rng


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), *torch.randn(3).tolist()]


@pytest.fixture(autouse=True)
def untouched_process() -> Any:
    with rng.isolated():
        yield


@pytest.mark.parametrize("num_gauss", [0, 1, 2])
def test_a_restored_state_continues_bit_for_bit(num_gauss: int) -> None:
    rng.seed_all(3)
    for _ in range(num_gauss):
        random.gauss(0, 1), np.random.normal(), torch.randn(1)
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    rng.seed_all(99)
    rng.restore(state)
    assert [draw() for _ in range(3)] == expected


def test_a_state_is_stored_without_pickle() -> None:
    rng.seed_all(4)
    random.gauss(0, 1)
    file = io.BytesIO()
    torch.save(rng.capture(), file)
    expected = draw()
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert draw() == expected


def drop(state: dict[str, Any], *path: str) -> None:
    for key in path[:-1]:
        state = state[key]
    del state[path[-1]]


@pytest.mark.parametrize(
    "path",
    [("version",), ("python",), ("numpy",), ("torch",), ("cuda",), ("python", "words"), ("numpy", "words"),
     ("numpy", "position"), ("python", "gauss")],
)  # fmt: skip
def test_a_missing_part_is_loud_and_changes_nothing(path: tuple[str, ...]) -> None:
    state = rng.capture()
    drop(state, *path)
    rng.seed_all(5)
    expected = draw()
    rng.seed_all(5)
    with pytest.raises(CheckpointError, match="random state cannot be restored"):
        rng.restore(state)
    assert draw() == expected


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("python", "words", torch.zeros(10, dtype=torch.int64)),
        ("python", "words", torch.full((625,), -1, dtype=torch.int64)),
        ("python", "version", 2**40),
        ("numpy", "words", torch.zeros(623, dtype=torch.int64)),
        ("numpy", "words", torch.full((624,), 2**33, dtype=torch.int64)),
        ("numpy", "kind", "PCG64"),
        ("numpy", "gauss", "x"),
    ],
)
def test_a_malformed_part_is_loud(part: str, key: str, value: Any) -> None:
    state = rng.capture()
    state[part][key] = value
    with pytest.raises(CheckpointError):
        rng.restore(state)


def test_a_truncated_torch_state_is_loud() -> None:
    state = rng.capture()
    state["torch"] = state["torch"][:100]
    with pytest.raises(CheckpointError):
        rng.restore(state)


def test_more_cuda_states_than_devices_are_loud() -> None:
    state = rng.capture()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 64
    with pytest.raises(CheckpointError, match="64 CUDA device"):
        rng.restore(state)


def test_a_replaced_numpy_generator_is_refused_at_the_save() -> None:
    numpy_random: Any = np.random
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(PCG64(1))
    try:
        with pytest.raises(CheckpointError, match="PCG64"):
            rng.capture()
    finally:
        numpy_random.set_bit_generator(before)


@pytest.mark.parametrize("num_gauss", [0, 1])
def test_isolated_leaves_every_generator_alone(num_gauss: int) -> None:
    rng.seed_all(6)
    for _ in range(num_gauss):
        random.gauss(0, 1), np.random.normal()
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    with pytest.raises(KeyError), rng.isolated():
        draw()
        np.random.seed(3)
        torch.manual_seed(1)
        random.seed(1)
        raise KeyError
    assert draw() == expected


def test_isolated_nests() -> None:
    rng.seed_all(7)
    expected = draw()
    rng.seed_all(7)
    with rng.isolated():
        rng.seed_cpu(1)
        first = draw()
        rng.seed_cpu(1)
        with rng.isolated():
            rng.seed_cpu(2)
            assert draw() != first
        assert draw() == first
    assert draw() == expected


def test_another_world_size_gets_its_own_reproducible_states() -> None:
    def state_of(step: int, rank: int) -> list[Any]:
        rng.rederive(11, step, rank)
        return draw()

    assert state_of(5, 0) == state_of(5, 0)
    states = [state_of(step, rank) for step in (5, 6) for rank in range(3)]
    assert len({tuple(state) for state in states}) == 6


# A promise across versions: orders and augmentations of paused trials depend on it.
def test_derived_seeds_are_the_same_in_every_version() -> None:
    assert rng.derive(0) == 1112680348924161749
    assert rng.derive(1, "a", 2) == 2800309228081993163
    assert rng.derive(1, "a", "2") == 4671525984738917912
    assert rng.derive(-5, "permutation", 10**20) == 5012049336273324633


PATHS = st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4).map(tuple)


@given(st.integers(), PATHS, PATHS)
def test_different_paths_give_different_seeds(seed: int, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    first, second = rng.derive(seed, *one), rng.derive(seed, *other)
    assert 0 <= first < 2**63
    assert (first == second) == (one == other)
