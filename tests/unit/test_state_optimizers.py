"""Training that was stopped, saved and restored in the middle ends with the bits of training that never was."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_lab import Copy
from torch import nn

from overnight.trainer import rng
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.tracked import state_of

NUM_BEFORE, NUM_AFTER = 5, 4
SIZE = 8


class Counting(torch.optim.Optimizer):
    """State of every awkward kind, changed in place: CPU tensors, python numbers, lists, created when first needed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "betas": (0.9, 0.99), "names": ["a"], "seen": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["seen"] = (group["seen"] or 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(count=0, sums=torch.zeros(2, dtype=torch.float64), history=[], deep={"m": None})
                state["count"] += 1
                state["sums"][0] += float(param.grad.abs().sum())
                state["history"].append(float(param.grad.mean()))
                if state["count"] == 3:
                    state["late"] = torch.zeros_like(param, dtype=torch.float64)
                if "late" in state:
                    state["late"].add_(param.grad, alpha=0.5)
                    param.sub_(state["late"].to(param.dtype), alpha=0.01)
                state["deep"]["m"] = (state["deep"]["m"] or 0.0) * 0.9 + state["history"][-1]
                param.sub_(param.grad, alpha=0.01 * (1 + state["deep"]["m"]) / math.sqrt(state["count"]))


class OwnStep(torch.optim.AdamW):
    """A subclass that does more in its step, with a number of its own in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["cycles"] = group.get("cycles", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - 0.001 * group["cycles"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05)),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
    "LBFGS wolfe": lambda p: torch.optim.LBFGS(p, max_iter=2, history_size=2, line_search_fn="strong_wolfe"),
    "own kind": Counting,
    "own step": OwnStep,
}  # fmt: skip


class Training:
    """A small training with all that a resume must get right; one step is two micro-batches."""

    def __init__(self, optimizer: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout(0.3), nn.ReLU(), nn.Linear(SIZE, SIZE)
        ).to(dtype)
        self.net[0].bias.requires_grad_(False)  # frozen: never gets optimizer state
        self.optimizer = OPTIMIZERS[optimizer](list(self.net.parameters()))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.noise = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    @property
    def objects(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "noise": self.noise}

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.net(inputs) - inputs.flip(1)).square().mean()

    def step(self) -> None:
        batches = [torch.randn(6, SIZE, generator=self.noise).to(self.dtype) for _ in range(2)]

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            losses = [self.loss(inputs) / 2 for inputs in batches]
            for loss in losses:
                loss.backward()
            return sum(losses[1:], losses[0])

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.scheduler.step()

    def bits(self) -> dict[str, bytes]:
        leaves = encode({name: state_of(obj) for name, obj in self.objects.items()}).leaves
        return {
            key: leaf.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, leaf in leaves.items()
        }


def run(training: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        training.step()


def stop_and_go_on(first: Any, second: Any) -> None:
    """Saves the first, goes on with it, and then with the second from there; both must have the same bits."""
    process = rng.capture()
    saved = Copy({**first.objects, "rng": process})
    run(first, NUM_AFTER)
    saved.give(**second.objects)
    rng.restore(saved.value("rng"))
    run(second, NUM_AFTER)
    assert second.bits() == first.bits()
    assert [group["lr"] for group in optimizer_of(second).param_groups] == [
        group["lr"] for group in optimizer_of(first).param_groups
    ]


def optimizer_of(training: Any) -> torch.optim.Optimizer:
    return next(obj for obj in training.objects.values() if isinstance(obj, torch.optim.Optimizer))


@pytest.fixture(autouse=True)
def untouched_process() -> Any:
    with rng.isolated():
        yield


@pytest.mark.parametrize("num_before", [0, NUM_BEFORE])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_never_stopped(name: str, num_before: int) -> None:
    """C14, C15: with dropout, BatchNorm, accumulation, frozen parameters, a scheduler, and state created late."""
    first = Training(name)
    run(first, num_before)
    stop_and_go_on(first, Training(name, seed=1))


@pytest.mark.parametrize("name", ["SGD nesterov", "AdamW fused", "own kind"])
def test_bfloat16_weights_with_their_state(name: str) -> None:
    first = Training(name, dtype=torch.bfloat16)
    run(first, NUM_BEFORE)
    stop_and_go_on(first, Training(name, seed=1, dtype=torch.bfloat16))


def test_a_save_holds_the_values_of_its_own_step() -> None:
    """C15: numbers are of the moment of encoding; tensors are the live ones, for staging to copy."""
    training = Training("own kind")
    run(training, 3)
    encoded = encode({"optimizer": state_of(training.optimizer)})
    before = copy.deepcopy(encoded.objects)
    run(training, 2)
    assert encoded.objects == before


class Scaled(Training):
    """Mixed precision whose first update overflows, so that the optimizer skips it and the scale shrinks."""

    def __init__(self, optimizer: str, *, seed: int = 0, first_scale: float = 2.0**16) -> None:
        super().__init__(optimizer, seed=seed)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=2)
        self.number = 0

    @property
    def objects(self) -> dict[str, Any]:
        return {**super().objects, "scaler": self.scaler, "counter": Number(self)}

    def step(self) -> None:
        self.number += 1
        inputs = torch.randn(6, SIZE, generator=self.noise)
        if self.number % 4 == 1:
            inputs[0, 0] = math.inf
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(inputs.nan_to_num(posinf=3e38))).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()


class Number:
    def __init__(self, training: Scaled) -> None:
        self._training = training

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._training.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._training.number = state["number"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("num_before", [0, 1, 2, 4, 5])
def test_a_scaler_that_skips_updates(num_before: int) -> None:
    first, second = Scaled("AdamW foreach"), Scaled("AdamW foreach", seed=1, first_scale=4.0)
    run(first, num_before)
    if num_before in (1, 5):
        assert first.scaler.get_scale() < 2.0**16
        assert num_before != 1 or not first.optimizer.state, "the first update was skipped"
    stop_and_go_on(first, second)
    assert first.scaler.state_dict() == second.scaler.state_dict()


class InBackward(Training):
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__("SGD", seed=seed)
        trained = {name: param for name, param in self.net.named_parameters() if param.requires_grad}
        self.optimizers = {name: torch.optim.AdamW([param], lr=0.05) for name, param in trained.items()}
        for name, param in trained.items():
            param.register_post_accumulate_grad_hook(lambda param, own=self.optimizers[name]: self.update(param, own))

    @staticmethod
    def update(param: torch.Tensor, own: torch.optim.Optimizer) -> None:
        own.step()
        param.grad = None

    @property
    def objects(self) -> dict[str, Any]:
        return {"net": self.net, "noise": self.noise, **{f"optimizer {k}": o for k, o in self.optimizers.items()}}

    def step(self) -> None:
        self.loss(torch.randn(6, SIZE, generator=self.noise)).backward()


def test_optimizers_that_step_in_the_backward() -> None:
    first = InBackward()
    run(first, NUM_BEFORE)
    stop_and_go_on(first, InBackward(seed=1))


class Rivals:
    """Two optimizers on two modules, one of them stepping every second time."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.fast, self.slow = torch.optim.Adam(self.one.parameters()), torch.optim.RMSprop(self.two.parameters())
        self.count = torch.zeros((), dtype=torch.int64)
        self.objects = {"1": self.one, "2": self.two, "fast": self.fast, "slow": self.slow, "count": self.count}

    def step(self) -> None:
        loss = self.two(torch.tanh(self.one(torch.randn(4, SIZE)))).square().mean()
        loss.backward()
        self.count += 1
        self.fast.step()
        self.fast.zero_grad()
        if self.count % 2 == 0:
            self.slow.step()
            self.slow.zero_grad()

    bits = Training.bits


@pytest.mark.parametrize("num_before", [2, 4])
def test_two_optimizers_of_different_pace(num_before: int) -> None:
    first = Rivals(0)
    run(first, num_before)
    stop_and_go_on(first, Rivals(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is first imported
def test_a_compiled_step() -> None:
    first, second = Training("AdamW tensor lr"), Training("AdamW tensor lr", seed=1)
    for training in (first, second):
        training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")  # type: ignore[method-assign]
        training.scheduler.optimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    run(first, 2)
    stop_and_go_on(first, second)


def test_sparse_gradients() -> None:
    class Sparse(Rivals):
        def __init__(self, seed: int) -> None:
            torch.manual_seed(seed)
            self.table = nn.Embedding(20, 4, sparse=True)
            self.optimizer = torch.optim.SparseAdam(self.table.parameters(), lr=0.1)
            self.objects = {"table": self.table, "optimizer": self.optimizer}

        def step(self) -> None:
            self.table(torch.randint(0, 20, (5,))).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    first = Sparse(0)
    run(first, 3)
    stop_and_go_on(first, Sparse(1))


def test_groups_keep_their_own_values_and_their_live_tensors() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    rate = torch.tensor(0.5)

    def make() -> torch.optim.Optimizer:
        groups = [{"params": params[:1], "lr": rate, "name": "first"}, {"params": params[1:], "betas": (0.5, 0.6)}]
        return torch.optim.AdamW(groups, lr=0.1, capturable=False)

    first, second = make(), make()
    first.param_groups[1]["weight_decay"], first.param_groups[0]["lr"] = 0.3, torch.tensor(0.25)
    first.param_groups[1]["extra"] = {"warmup": (1, 2)}
    Copy({"optimizer": first}).give(optimizer=second)
    assert second.param_groups[1]["betas"] == (0.5, 0.6) and second.param_groups[1]["weight_decay"] == 0.3
    assert second.param_groups[1]["extra"] == {"warmup": (1, 2)} and second.param_groups[0]["name"] == "first"
    assert second.param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_float32_moments_of_bfloat16_weights_are_not_rounded_however_deep() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    fine = torch.tensor([1.0001, 2.0003])
    first, second = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    first.state[weight] = {"momentum_buffer": fine, "deep": {"list": [fine, (fine.double(), 3)]}, "half": fine.half()}
    Copy({"optimizer": first}).give(optimizer=second)
    state = second.state[weight]
    assert torch.equal(state["momentum_buffer"], fine) and torch.equal(state["deep"]["list"][0], fine)
    assert state["deep"]["list"][1][0].dtype is torch.float64 and state["deep"]["list"][1][1] == 3
    assert state["half"].dtype is torch.float16


def test_a_restored_optimizer_shares_nothing_with_what_was_read() -> None:
    training = Training("AdamW foreach")
    run(training, 2)
    saved = Copy(training.objects)
    before = {key: tensor.clone() for key, tensor in saved.tensors.items()}
    other = Training("AdamW foreach", seed=1)
    saved.give(**other.objects)
    run(other, 2)
    assert all(torch.equal(saved.tensors[key], before[key]) for key in before)
