"""Small trainings with all that a resume must get right, for tests in one process and for whole trials."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.tracked import state_of

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


class InBackward(Training):
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__("SGD", seed=seed)
        del self.optimizer, self.scheduler
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


class Compiled(Training):
    """Forward, backward and the optimizer's step are compiled; the same graphs with any compiler behind them."""

    def __init__(self) -> None:
        super().__init__("AdamW tensor lr")
        self._loss = torch.compile(super().loss, backend="aot_eager")
        self._step = torch.compile(self.optimizer.step, backend="aot_eager")

    def step(self) -> None:
        for _ in range(2):
            (self._loss(torch.randn(6, SIZE, generator=self.noise)) / 2).backward()
        self._step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def trainings() -> dict[str, Callable[[], Any]]:
    """Every training by name."""
    made: dict[str, Callable[[], Any]] = {name: lambda name=name: Training(name) for name in OPTIMIZERS}
    return made | {
        "bfloat16": lambda: Training("AdamW fused", dtype=torch.bfloat16),
        "scaler": lambda: Scaled("AdamW foreach"),
        "in backward": InBackward,
        "two optimizers": lambda: Rivals(0),
        "sparse": lambda: Sparse(0),
        "compiled": Compiled,
    }
