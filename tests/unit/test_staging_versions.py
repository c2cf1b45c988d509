"""One row that is changed outside a step, in a tensor of which the compared blocks show next to nothing."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from overnight.trainer.checkpoint.staging.stager import Staged, Stager
from overnight.trainer.checkpoint.staging.versions import LastLook, Versions
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.tracked import state_of

DEADLINE_SECONDS = 20.0
NUM_ROWS = 20_000

Change = Callable[[nn.Embedding], object]


def look_up(embedding: nn.Embedding) -> None:
    embedding(torch.tensor([NUM_ROWS - 1]))


def add_to_row(embedding: nn.Embedding) -> None:
    with torch.no_grad():
        embedding.weight[NUM_ROWS - 1] += 1


def fill_row_of_detached(embedding: nn.Embedding) -> None:
    embedding.weight.detach()[NUM_ROWS - 1].zero_()


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(np.random.default_rng(0))
    stager.watch()
    yield stager
    stager.close()


def make() -> tuple[nn.Embedding, torch.optim.Optimizer]:
    embedding = nn.Embedding(NUM_ROWS, 32, max_norm=1.0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding.weight.grad = torch.ones_like(embedding.weight)
    return embedding, optimizer


def _wait(gate: threading.Event) -> None:
    assert gate.wait(DEADLINE_SECONDS)


def staged_while(stager: Stager, embedding: nn.Embedding, optimizer: torch.optim.Optimizer, change: Change) -> Staged:
    """Stages, changes before the copy begins, and steps."""
    gate, said = threading.Event(), threading.Event()
    results: list[Staged] = []

    def take(staged: Staged) -> None:
        results.append(staged)
        said.set()

    stager._worker.do(lambda: _wait(gate))
    objects = {"model": embedding, "optimizer": optimizer}
    stager.stage(encode({name: state_of(obj) for name, obj in objects.items()}), list(objects.values()), take)
    change(embedding)
    gate.set()
    optimizer.step()
    assert said.wait(DEADLINE_SECONDS)
    return results[0]


@pytest.mark.parametrize("change", [look_up, add_to_row, fill_row_of_detached])
def test_one_changed_row_discards_the_save(stager: Stager, change: Change) -> None:
    staged = staged_while(stager, *make(), change)
    assert staged.changed == ["model"]
    assert stager.restless == {"model"}


def test_a_step_is_no_such_change(stager: Stager) -> None:
    embedding, optimizer = make()
    for _ in range(3):
        assert staged_while(stager, embedding, optimizer, lambda model: model.weight.detach().sum()).good
    assert not stager.restless


def test_what_changes_behind_the_copy_is_copied_at_once_from_then_on(stager: Stager) -> None:
    embedding, optimizer = make()
    said = threading.Event()
    staged: list[Staged] = []

    def take(one: Staged) -> None:
        staged.append(one)
        said.set()

    stager.stage(encode({"model": state_of(embedding)}), [embedding, optimizer], take)
    assert said.wait(DEADLINE_SECONDS)
    look_up(embedding)
    optimizer.step()
    assert staged[0].good
    assert stager.restless == {"model"}


def test_tensors_without_a_counter_are_left_to_the_blocks() -> None:
    with torch.inference_mode():
        made = torch.zeros(4)
        versions = Versions([made, torch.zeros(2)])
        made.add_(1)
        assert versions.moved() == []


def test_the_last_look_is_that_of_whoever_comes_first() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    early, late = LastLook(Versions(tensors)), LastLook(Versions(tensors))
    assert early.take() == []
    tensors[1].add_(1)
    assert early.take() == []
    assert late.take() == [1]
