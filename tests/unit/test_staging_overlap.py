"""A save holds the values of its own moment, whatever kind of step comes next and however it changes things."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overnight.trainer.checkpoint.staging.stager import Staged, Stager
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.tracked import state_of
from overnight.trainer.checkpoint.writing.order import LARGE_BYTES, PAGE_BYTES, Piece

DEADLINE_SECONDS = 20.0
WIDTH = 64


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(np.random.default_rng(0))
    stager.watch()
    yield stager
    stager.close()


@contextmanager
def held(stager: Stager) -> Iterator[Callable[[], None]]:
    """Keeps the background copy from beginning until the function that it gives is called."""
    gate = threading.Event()
    stager._worker.do(lambda: bool(gate.wait(DEADLINE_SECONDS)))
    try:
        yield gate.set
    finally:
        gate.set()


class Waiting:
    """Takes in what a stager says in the background."""

    def __init__(self) -> None:
        self._said = threading.Event()
        self._staged: Staged | None = None

    def __call__(self, staged: Staged) -> None:
        self._staged = staged
        self._said.set()

    def get(self) -> Staged:
        assert self._said.wait(DEADLINE_SECONDS)
        assert self._staged is not None
        return self._staged


def begin(stager: Stager, objects: Mapping[str, Any]) -> Waiting:
    waiting = Waiting()
    stager.stage(encode({name: state_of(obj) for name, obj in objects.items()}), list(objects.values()), waiting)
    return waiting


def read(staged: Staged) -> dict[str, torch.Tensor]:
    return {piece.key: tensor_of(staged, piece) for piece in staged.pieces}


def tensor_of(staged: Staged, piece: Piece) -> torch.Tensor:
    data = bytearray(os.pread(staged.arena.fileno(), piece.num_bytes, piece.offset))
    dtype = getattr(torch, piece.dtype)
    return torch.frombuffer(data, dtype=dtype).view(piece.shape) if data else torch.empty(piece.shape, dtype=dtype)


def values(objects: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    encoded = encode({name: state_of(obj) for name, obj in objects.items()})
    return {key: leaf.tensor.clone() for key, leaf in encoded.leaves.items()}


def require_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, WIDTH)).square().mean()
    loss.backward()
    return loss


class OwnStep(torch.optim.Optimizer):
    """An optimizer from nobody's library: its state is lazy, and a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state = self.state[param]
                    state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    state["count"] = state.get("count", 0) + 1
                    param.sub_(state["sum"], alpha=0.1)


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "own step": OwnStep,
}


class Script:
    """A model, its optimizer, and a step of it that the stager must hold up."""

    def __init__(self, kind: str) -> None:
        self.model = net()
        self.optimizer = KINDS[kind](self.model.parameters())
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def update(self) -> None:
        backward(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def require_step_waits(stager: Stager, objects: Mapping[str, Any], step: Callable[[], Any], watched: Any) -> Staged:
    """Stages, lets the step begin, and sees that nothing moves before the copy, which is that of the boundary."""
    before = values(objects)
    with held(stager) as release:
        waiting = begin(stager, objects)
        watched_before = watched.detach().clone()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and torch.equal(watched.detach(), watched_before)
        release()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive() and not torch.equal(watched.detach(), watched_before)
    staged = waiting.get()
    assert staged.good
    require_equal(read(staged), before)
    return staged


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_copy(stager: Stager, kind: str) -> None:
    script = Script(kind)
    script.update()
    require_step_waits(stager, script.objects, script.update, script.model[0].weight)
    assert not stager.restless


@pytest.mark.parametrize("kind", KINDS)
def test_many_saves_behind_each_other(stager: Stager, kind: str) -> None:
    """C15. State that comes with the first step, too: the first save has none of it."""
    script = Script(kind)
    for _ in range(5):
        before = values(script.objects)
        waiting = begin(stager, script.objects)
        script.update()
        script.update()
        require_equal(read(waiting.get()), before)


def test_lbfgs_whose_state_is_nested_lists(stager: Stager) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model)

    def step() -> None:
        optimizer.step(closure)  # type: ignore[no-untyped-call]

    step()
    objects = {"model": model, "optimizer": optimizer}
    staged = require_step_waits(stager, objects, step, model[0].weight)
    assert any("old_dirs" in piece.key for piece in staged.pieces)


def test_a_scaler_that_skips_the_step(stager: Stager) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    objects = {"model": model, "optimizer": optimizer, "scaler": scaler}

    def update(scale: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, WIDTH)).square().mean() * scale).backward()
        scaler.step(optimizer)
        scaler.update()

    update(1.0)
    require_step_waits(stager, objects, lambda: update(1.0), model[0].weight)
    before = values(objects)
    stager.stepped.clear()
    waiting = begin(stager, objects)
    weight = model[0].weight.clone()
    update(float("inf"))
    assert torch.equal(model[0].weight, weight) and not stager.stepped
    require_equal(read(waiting.get()), before)


def test_an_optimizer_in_backward(stager: Stager) -> None:
    model = net()
    optimizers = {param: torch.optim.AdamW([param]) for param in model.parameters()}

    def act(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(act)
    objects = {"model": model, **{f"optimizer{n}": one for n, one in enumerate(optimizers.values())}}
    backward(model)
    require_step_waits(stager, objects, lambda: backward(model), model[3].weight)


def test_two_optimizers_of_which_the_second_steps_first(stager: Stager) -> None:
    one, two = net(), net()
    first = torch.optim.AdamW(one.parameters())
    second = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    objects = {"one": one, "two": two, "first": first, "second": second}

    def update() -> None:
        backward(two)
        second.step()
        backward(one)
        first.step()

    update()
    require_step_waits(stager, objects, update, two[0].weight)
    assert stager.stepped == {id(first), id(second)}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step(stager: Stager) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")

    def update() -> None:
        backward(model)
        step()
        optimizer.zero_grad()

    update()
    update()
    require_step_waits(stager, {"model": model, "optimizer": optimizer}, update, model[0].weight)


def test_what_no_optimizer_owns_is_copied_at_once(stager: Stager) -> None:
    """BatchNorm's buffers and an average of the weights change before any step."""
    script = Script("adamw")
    average = torch.optim.swa_utils.AveragedModel(
        script.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
    )
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    objects = {**script.objects, "average": average, "frozen": frozen, "sums": {"big": torch.ones(5000)}}
    script.update()
    before = values(objects)
    with held(stager) as release:
        waiting = begin(stager, objects)
        script.model(torch.randn(8, WIDTH))
        average.update_parameters(net())
        frozen.weight.data.zero_()
        objects["sums"]["big"].zero_()
        release()
        staged = waiting.get()
    assert staged.good
    require_equal(read(staged), before)
    flags = {piece.key: piece.frozen for piece in staged.pieces}
    assert flags["frozen.weight"] and not flags["model.0.weight"] and not flags["sums.big"]


WRITES: dict[str, Callable[[Script], object]] = {
    "weights, by data": lambda script: script.model[0].weight.data.mul_(2),
    "weights, by numpy": lambda script: script.model[0].weight.detach().numpy().__imul__(2),
    "moments": lambda script: script.optimizer.state[script.model[0].weight]["exp_avg"].add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_change_before_the_copy_discards_the_save_and_makes_its_object_eager(stager: Stager, write: str) -> None:
    script = Script("adamw fused")
    script.update()
    guilty = "optimizer" if write == "moments" else "model"
    with held(stager) as release:
        waiting = begin(stager, script.objects)
        WRITES[write](script)
        release()
        assert waiting.get().changed == [guilty]
    before = values(script.objects)
    with held(stager) as release:
        waiting = begin(stager, script.objects)
        WRITES[write](script)
        release()
        staged = waiting.get()
    assert staged.good and stager.restless == {guilty}
    require_equal(read(staged), before)


@pytest.mark.parametrize("write", WRITES)
def test_a_change_behind_the_copy_spares_the_save_and_makes_its_object_eager(stager: Stager, write: str) -> None:
    script = Script("adamw fused")
    script.update()
    before = values(script.objects)
    waiting = begin(stager, script.objects)
    staged = waiting.get()
    WRITES[write](script)
    script.update()
    assert staged.good and stager.restless == {"optimizer" if write == "moments" else "model"}
    require_equal(read(staged), before)


def test_weights_that_are_swapped_and_swapped_back_meanwhile(stager: Stager) -> None:
    """As an evaluation of averaged weights does: at the step, all is as it was at the boundary."""
    script = Script("sgd")
    script.update()
    kept = script.model[0].weight.detach().clone()
    with held(stager) as release:
        waiting = begin(stager, script.objects)
        script.model[0].weight.data.zero_()
        release()
        staged = waiting.get()
        script.model[0].weight.data.copy_(kept)
    assert staged.changed == ["model"]


def test_memory_that_is_replaced_is_still_that_of_the_boundary(stager: Stager) -> None:
    script = Script("adamw")
    script.update()
    before = values(script.objects)
    with held(stager) as release:
        waiting = begin(stager, script.objects)
        for param in script.model.parameters():
            param.data = torch.randn_like(param)
            script.optimizer.state[param]["exp_avg"] = torch.randn_like(param)
        release()
        staged = waiting.get()
    assert staged.good
    require_equal(read(staged), before)


def test_memory_that_is_freed_fails_the_save_and_not_the_process(stager: Stager) -> None:
    model = nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with held(stager) as release:
        waiting = begin(stager, {"model": model, "optimizer": optimizer})
        model.weight.untyped_storage().resize_(0)  # the allocator may keep the memory, and what was in most of it
        release()
        staged = waiting.get()
    assert not staged.good
    assert isinstance(staged.error, OSError) or staged.changed == ["model"]


def test_tensors_of_every_kind(stager: Stager) -> None:
    tied = torch.arange(3000.0)
    state: dict[str, Any] = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "half": torch.arange(3001).to(torch.bfloat16),
        "eighth": torch.arange(5).to(torch.float8_e4m3fn).view(torch.uint8),
        "transposed": torch.arange(6000.0).view(60, 100).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(7, dtype=torch.complex64).conj(),
        "negative": torch.randn(7, dtype=torch.complex64).conj().imag,
        "strided": torch.arange(100)[::3],
        "one": tied,
        "same": tied,
        "part": tied[5:],
        "bool": torch.tensor([True, False, True]),
    }
    before = values({"it": state})
    staged = begin(stager, {"it": state}).get()
    require_equal(read(staged), before)
    assert sum(piece.key.endswith(("one", "same")) for piece in staged.pieces) == 1


def test_large_tensors_begin_at_a_page_whichever_way_they_go(stager: Stager) -> None:
    model = nn.Sequential(*(nn.Linear(257, size) for size in (3, 257, 5, 263)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(layer(torch.randn(2, 257)).sum() for layer in model).backward()
    optimizer.step()
    now = {f"{number}": torch.randn(length) for number, length in enumerate((9, 80_000, 7, 70_001))}
    strided = {"a": torch.randn(1000, 80).t(), "b": torch.randn(9, 9).t(), "c": torch.randn(80, 1000).t()}
    objects = {"model": model, "optimizer": optimizer, "now": now, "strided": strided}
    before = values(objects)
    staged = begin(stager, objects).get()
    require_equal(read(staged), before)
    large = [piece for piece in staged.pieces if piece.num_bytes >= LARGE_BYTES]
    assert len(large) == 4 + 4 and all(piece.offset % PAGE_BYTES == 0 for piece in large)


def test_a_state_that_grows_gets_another_arena(stager: Stager) -> None:
    state = {"a": torch.randn(1000)}
    small = begin(stager, {"it": state}).get().arena
    state["b"] = torch.randn(3_000_000)
    waiting = begin(stager, {"it": state})
    large = waiting.get()
    assert large.arena.number != small.number
    require_equal(read(large), values({"it": state}))


def test_a_step_in_a_forked_process_does_not_wait(stager: Stager) -> None:
    script = Script("sgd")
    script.update()
    with held(stager):
        begin(stager, script.objects)
        child = os.fork()
        if child == 0:
            try:
                script.optimizer.step()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_a_thousand_saves_take_no_more_memory_than_the_first(stager: Stager) -> None:
    """C18."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    objects = {"model": model, "optimizer": optimizer}
    for param in model.parameters():
        param.grad = torch.randn_like(param)

    def save_and_step() -> None:
        waiting = begin(stager, objects)
        optimizer.step()
        waiting.get()

    for _ in range(50):
        save_and_step()
    files, memory = len(list(Path("/proc/self/fd").iterdir())), resident_bytes()
    for _ in range(1000):
        save_and_step()
    state_bytes = sum(tensor.nbytes for tensor in values(objects).values())
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert resident_bytes() - memory < 1 << 20
    assert stager.num_bytes <= 1.05 * state_bytes + (16 << 10)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_closing_gives_the_hook_and_the_thread_back() -> None:
    stager = Stager(np.random.default_rng(0))
    stager.watch()
    script = Script("sgd")
    begin(stager, script.objects)
    stager.close()
    stager.close()
    script.update()
    assert not stager.stepped
    assert "overnight-staging" not in {thread.name for thread in threading.enumerate()}
