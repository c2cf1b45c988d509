"""Stop anywhere, go on at another size: the samples are those of a run that was never disturbed."""

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from overnight.core.errors import IndivisibleBatchError
from overnight.trainer.data.loader import DataLoader


class Augmented:
    """Samples that depend on every default generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.normal(), float(torch.rand(()))], dtype=torch.float64)


@dataclass(frozen=True)
class Segment:
    """One attempt: how many ranks and workers, and how many updates until it is stopped."""

    world_size: int
    num_updates: int
    num_workers: int = 0


def make(kind: str, length: int, **options: Any) -> DataLoader:
    dataset = Augmented(length)
    if kind == "weighted":
        return DataLoader(dataset, weights=np.arange(1, length + 1), **options)
    if kind == "sampler":
        return DataLoader(dataset, sampler=RandomSampler(range(length)), **options)
    return DataLoader(dataset, shuffle=kind == "shuffled", **options)


def train(segment: Segment, state: str | None, kind: str, length: int, **options: Any) -> tuple[str, list[list[float]]]:
    """One attempt of ``segment.world_size`` ranks; returns its state, through JSON, and its rows in global order."""
    rows: dict[tuple[int, int], list[list[float]]] = {}
    states = set()
    for rank in range(segment.world_size):
        loader = make(kind, length, num_workers=segment.num_workers, **options)
        loader.bind(rank=rank, world_size=segment.world_size, seed=3)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        left = segment.num_updates
        while left:
            for batch in loader.micro_batches(loader.epoch, loader.position):
                data = batch.data if batch.weights is None else batch.data[batch.weights > 0]
                rows[batch.epoch, batch.first] = data.tolist()
                if batch.last_of_update:
                    loader.advance()
                    left -= 1
                    if not left:
                        break
        states.add(json.dumps(loader.state_dict() | {"world_size": 0, "fingerprint": ""}))
        last = json.dumps(loader.state_dict())
    assert len(states) == 1, "ranks disagree about the place"
    return last, [row for key in sorted(rows) for row in rows[key]]


def undisturbed(num_updates: int, kind: str, length: int, **options: Any) -> list[list[float]]:
    return train(Segment(1, num_updates), None, kind, length, **options)[1]


SEGMENTS = st.lists(st.builds(Segment, st.sampled_from([1, 2, 3, 6]), st.integers(1, 6)), min_size=2, max_size=5)
KINDS = st.sampled_from(["shuffled", "sequential", "weighted", "sampler"])


@given(SEGMENTS, KINDS, st.integers(12, 60), st.sampled_from([None, 1, 2]), st.sampled_from(["drop", "pad"]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_stop_at_any_size_continues_exactly(
    segments: list[Segment], kind: str, length: int, micro: int | None, tail: str
) -> None:
    options: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": micro, "tail": tail}
    state, rows = None, []
    for segment in segments:
        state, part = train(segment, state, kind, length, **options)
        rows += part
    assert rows == undisturbed(sum(segment.num_updates for segment in segments), kind, length, **options)


@pytest.mark.parametrize("kind", ["shuffled", "sampler", "weighted"])
@pytest.mark.parametrize("micro", [2, None])
def test_one_two_one_three_ranks_with_workers(kind: str, micro: int | None) -> None:
    """C12, by its loaders."""
    options: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": micro}
    segments = [Segment(1, 3, 2), Segment(2, 4, 0), Segment(1, 1, 1), Segment(3, 7, 1), Segment(1, 5, 0)]
    state, rows = None, []
    for segment in segments:
        state, part = train(segment, state, kind, 65, **options)
        rows += part
    assert rows == undisturbed(20, kind, 65, **options)
    if kind == "shuffled":
        for epoch in range(4):
            assert len({row[0] for row in rows[epoch * 60 : (epoch + 1) * 60]}) == 60


def test_a_batch_per_rank_continues_in_the_middle_of_a_short_epoch() -> None:
    state, rows = None, []
    for num_updates in (1, 2, 1, 5):
        state, part = train(Segment(1, num_updates), state, "shuffled", 10, batch_size=4)
        rows += part
    assert rows == undisturbed(9, "shuffled", 10, batch_size=4)
    assert len(rows) == 30


def test_a_size_that_does_not_divide_is_refused_and_the_state_is_still_good() -> None:
    options: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 2}
    state, first = train(Segment(2, 3), None, "shuffled", 65, **options)
    with pytest.raises(IndivisibleBatchError, match="4 rank"):
        train(Segment(4, 1), state, "shuffled", 65, **options)
    _, second = train(Segment(3, 2), state, "shuffled", 65, **options)
    assert first + second == undisturbed(5, "shuffled", 65, **options)
