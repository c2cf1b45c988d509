"""Training that was stopped, saved and restored in the middle ends with the bits of training that never was."""

import copy
from typing import Any

import pytest
import torch
from state_lab import Copy
from state_trainings import OPTIMIZERS, InBackward, Rivals, Scaled, Sparse, Training
from torch import nn

from overnight.trainer import rng
from overnight.trainer.checkpoint.state import encode
from overnight.trainer.checkpoint.tracked import state_of

NUM_BEFORE, NUM_AFTER = 5, 4


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


def test_optimizers_that_step_in_the_backward() -> None:
    first = InBackward()
    run(first, NUM_BEFORE)
    stop_and_go_on(first, InBackward(seed=1))


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
