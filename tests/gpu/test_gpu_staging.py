"""On a GPU: a save holds the values of its boundary, whatever is queued behind it."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overnight.trainer.checkpoint.staging.stager import Staged, Stager
from overnight.trainer.checkpoint.state import encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
CUDA = torch.device("cuda", 0)
LONG_CYCLES = 1_000_000_000
"""The device is busy for about half a second, much longer than the host takes to queue a step."""


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(np.random.default_rng(0))
    stager.watch()
    yield stager
    stager.close()


class Script:
    def __init__(self, *, capturable: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512)).to(CUDA)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=not capturable, capturable=capturable)
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.points = torch.randn(64, 512, device=CUDA)

    def update(self) -> None:
        self.model(self.points).square().mean().backward()
        self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        return {key: leaf.tensor.cpu().clone() for key, leaf in self.encoded().leaves.items()}

    def encoded(self) -> Any:
        return encode({name: obj.state_dict() for name, obj in self.objects.items()})


def begin(stager: Stager, script: Script) -> Callable[[], Staged]:
    said: list[Staged] = []
    ready = threading.Event()

    def then(staged: Staged) -> None:
        said.append(staged)
        ready.set()

    stager.stage(script.encoded(), list(script.objects.values()), then)

    def get() -> Staged:
        assert ready.wait(60)
        return said[0]

    return get


def require_holds(staged: Staged, values: dict[str, torch.Tensor]) -> None:
    assert staged.good, (staged.changed, staged.error)
    assert {piece.key for piece in staged.pieces} == set(values)
    for piece in staged.pieces:
        data = os.pread(staged.arena.fileno(), piece.num_bytes, piece.offset)
        assert data == values[piece.key].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), piece.key


def test_steps_that_are_queued_behind_a_save(stager: Stager) -> None:
    script = Script()
    for number in range(3):
        script.update()
        values = script.values()
        torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
        get = begin(stager, script)
        script.update()
        script.update()
        assert number == 0 or not torch.cuda.current_stream().query(), "the host has not waited for the device"
        require_holds(get(), values)
    assert not stager.restless


def test_a_change_outside_a_step_discards_the_save(stager: Stager) -> None:
    script = Script()
    script.update()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    get = begin(stager, script)
    with torch.no_grad():
        script.model[0].bias.zero_()  # type: ignore[operator]
    assert get().changed == ["model"]
    values = script.values()
    get = begin(stager, script)
    with torch.no_grad():
        script.model[0].bias.add_(1)  # type: ignore[operator]
    require_holds(get(), values)


def test_replays_that_are_queued_behind_a_save(stager: Stager) -> None:
    script = Script(capturable=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            script.update()
            script.optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    require_holds(begin(stager, script)(), script.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        script.update()
    for _ in range(2):
        graph.replay()
        values = script.values()
        torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
        get = begin(stager, script)
        graph.replay()
        graph.replay()
        require_holds(get(), values)
