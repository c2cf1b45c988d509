"""The short way to a module's state gives what the module says, and is not taken where it might not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from overnight.trainer.checkpoint import modules
from overnight.trainer.checkpoint.modules import state_dict_of


class Odd(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.again = self.linear
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.linear.weight
        self.nothing = None
        self.register_parameter("missing", None)
        self.register_buffer("empty", None)
        self.register_buffer("fleeting", torch.ones(2), persistent=False)
        self.register_buffer("steady", torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.many = nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(2), nn.Identity()])})
        self.params = nn.ParameterList([torch.ones(1), torch.zeros(2)])


class Extra(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"n": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Takes it."""


class Own(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}sum"] = self.weight.detach().sum()


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), nn.ReLU())


ORDINARY = [Odd, weight_norm, lambda: nn.LSTM(2, 3, 2), lambda: nn.TransformerEncoderLayer(4, 2, 8), nn.Identity]
OTHER = [Extra, lambda: Own(2, 2), lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(Extra(), Own(2, 2)))]


def require_said(module: nn.Module) -> None:
    found, said = state_dict_of(module), module.state_dict()
    assert type(found) is type(said) and list(found) == list(said)
    assert getattr(found, "_metadata", None) == getattr(said, "_metadata", None)
    for key, value in said.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value) and found[key].shape == value.shape
        else:
            assert found[key] == value


def is_short(module: nn.Module) -> bool:
    return module in modules._compared and modules._state_of(module) is not None


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_modules(kind: Callable[[], nn.Module]) -> None:
    module = kind()
    for _ in range(3):
        require_said(module)
        assert is_short(module)


@pytest.mark.parametrize("kind", OTHER)
def test_other_modules(kind: Callable[[], nn.Module]) -> None:
    module = kind()
    for _ in range(3):
        require_said(module)
        assert not is_short(module)


def add_hook(module: nn.Module) -> None:
    module.register_state_dict_post_hook(lambda module, state, prefix, notes: state.update({f"{prefix}x": 1}))


def add_pre_hook(module: nn.Module) -> None:
    module.register_state_dict_pre_hook(lambda module, prefix, keep: None)


def set_method(module: nn.Module) -> None:
    module.state_dict = lambda *a, **k: {"mine": torch.ones(1)}  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [add_hook, add_pre_hook, set_method])
@pytest.mark.parametrize("place", ["root", "child"])
def test_what_becomes_extraordinary_later(change: Callable[[nn.Module], None], place: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    require_said(module)
    assert is_short(module)
    change(module if place == "root" else module[1])
    if change is set_method and place == "child":
        assert not is_short(module)
        return
    require_said(module)
    assert not is_short(module)


def test_a_class_that_is_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    require_said(module)
    monkeypatch.setattr(nn.Linear, "get_extra_state", lambda self: {"n": 1})
    require_said(module)
    assert not is_short(module)


def test_modules_that_change_their_parts() -> None:
    module = Odd()
    require_said(module)
    module.linear = nn.Linear(5, 5)
    module.steady = None
    module.frozen = nn.Parameter(torch.zeros(7))
    module.add_module("more", nn.Linear(1, 1))
    del module.tied
    module.half()
    require_said(module)
    assert is_short(module)


def test_a_torch_that_saves_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version may do more for each module than this one."""
    module = nn.Linear(2, 2)
    real = modules._state_of

    def less(module: nn.Module) -> Any:
        state = real(module)
        assert state is not None
        state.pop("bias")
        return state

    monkeypatch.setattr(modules, "_state_of", less)
    for _ in range(2):
        assert list(state_dict_of(module)) == ["weight", "bias"]
