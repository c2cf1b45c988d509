"""Generators of the user's own: saved, put back, and seeded anew where their state belongs to another rank."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from state_lab import Copy

from overnight.core.errors import CheckpointError
from overnight.trainer import generators
from overnight.trainer.checkpoint.handover import Handover
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.tracked import require_trackable, state_of

MAKERS: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "PCG64": np.random.default_rng,
    "PCG64DXSM": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "RandomState": np.random.RandomState,
    "bits": np.random.Philox,
    "python": random.Random,
}


def draw(generator: Any) -> list[Any]:
    if isinstance(generator, torch.Generator):
        return torch.randn(5, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.randrange(10)]
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()
    uint32 = generator.integers(0, 10, 3, dtype=np.uint32) if isinstance(generator, np.random.Generator) else []
    return [*generator.normal(size=3), *uint32]


@pytest.mark.parametrize("num_draws", [0, 1, 4])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_generator_goes_on_bit_for_bit(kind: str, num_draws: int) -> None:
    first, second = MAKERS[kind](3), MAKERS[kind](4)
    for _ in range(num_draws):
        draw(first)
    saved = Copy({"gen": first})
    expected = [draw(first) for _ in range(3)]
    draw(second)
    saved.give(gen=second)
    assert [draw(second) for _ in range(3)] == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_all_of_a_state_is_in_its_bytes(kind: str) -> None:
    """By them alone the writer tells whether all ranks have the same."""
    one, same, other = (encode({"gen": state_of(MAKERS[kind](seed))}) for seed in (3, 3, 4))
    assert one.objects == same.objects == other.objects
    bits = [next(iter(encoded.leaves.values())).tensor for encoded in (one, same, other)]
    assert torch.equal(bits[0], bits[1]) and not (bits[0].shape == bits[2].shape and torch.equal(bits[0], bits[2]))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_generator_of_another_kind_is_refused(kind: str) -> None:
    saved = Copy({"gen": MAKERS[kind](1)})
    other = random.Random(1) if kind != "python" else np.random.default_rng(1)
    with pytest.raises(ValueError, match="generator, the saved one was"):
        saved.give(gen=other)


def test_the_systems_own_randomness_cannot_be_tracked() -> None:
    with pytest.raises(CheckpointError, match="SystemRandom"):
        require_trackable("gen", random.SystemRandom())


class Restored:
    """A checkpoint of two ranks as rank ``rank`` sees it, in memory."""

    def __init__(self, ranks: list[dict[str, Any]], rank: int) -> None:
        copies = [Copy(objects) for objects in ranks]
        self._copy = copies[rank if rank < len(ranks) else 0]
        self._differing = {
            name
            for name in ranks[0]
            for key in copies[0].tensors
            if key.startswith(name) and not torch.equal(copies[0].tensors[key], copies[1].tensors[key])
        }
        self.names = list(ranks[0])
        self.manifest = SimpleNamespace(world_size=len(ranks), step=7, name="step-7.attempt-1.1")

    def differs(self, name: str) -> bool:
        return name in self._differing

    def state(self, name: str, device: Any, fit: Any) -> Any:
        return self._copy.value(name)


def hand_over(ranks: list[dict[str, Any]], objects: dict[str, Any], rank: int, world_size: int) -> list[str]:
    said: list[str] = []
    restored: Any = Restored(ranks, rank)
    handover = Handover(restored, torch.device("cpu"), rank=rank, world_size=world_size, seed=5, complain=said.append)
    for name, obj in objects.items():
        assert handover.give_back(name, obj)
    return said


@pytest.mark.parametrize("kind", MAKERS)
def test_at_another_number_of_ranks_no_two_draw_the_same_unless_they_did_before(kind: str) -> None:
    make = MAKERS[kind]
    for seeds, num_streams in (((1, 2), 3), ((1, 1), 1)):
        saved = [{"gen": make(seed)} for seed in seeds]
        resumed = [make(9) for _ in range(3)]
        for rank, generator in enumerate(resumed):
            hand_over(saved, {"gen": generator}, rank, 3)
        streams = [tuple(draw(generator)) for generator in resumed]
        assert len(set(streams)) == num_streams
        if num_streams == 1:
            assert streams[0] == tuple(draw(make(1)))
        again = make(8)
        hand_over(saved, {"gen": again}, 2, 3)
        assert tuple(draw(again)) == streams[2], "a second start draws the same"


def test_at_the_same_number_of_ranks_each_has_its_own_again() -> None:
    saved = [{"gen": np.random.default_rng(seed)} for seed in (1, 2)]
    generator = np.random.default_rng(9)
    assert hand_over(saved, {"gen": generator}, 1, 2) == []
    assert draw(generator) == draw(np.random.default_rng(2))


def test_other_state_that_differed_between_ranks_is_named_once() -> None:
    saved = [{"sums": {"x": torch.ones(1) * rank}, "same": {"x": torch.ones(1)}} for rank in range(2)]
    said = [hand_over(saved, {"sums": {}, "same": {}}, rank, 3) for rank in range(3)]
    assert [len(lines) for lines in said] == [1, 0, 0] and "'sums' differed between the 2 ranks" in said[0][0]


def test_describing_a_generator_does_not_advance_it() -> None:
    for kind, make in MAKERS.items():
        generator, other = make(3), make(3)
        generators.capture(generator)
        assert draw(generator) == draw(other), kind
