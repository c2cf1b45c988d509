"""State is taken apart and comes back equal, or is refused before anything is written."""

import enum
import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_lab import Copy, round_trip
from torch import nn

from overnight.core.errors import CheckpointError, CorruptCheckpointError, SaveFailedError
from overnight.trainer.checkpoint.state import decode, encode
from overnight.trainer.checkpoint.tracked import put_back, require_trackable, state_of, unwrap

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none(), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_python_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)
    back = round_trip({"t": tensor})["t"]
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_views_transposed_and_conjugated_tensors() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    assert torch.equal(round_trip(base.t()), base.t())
    assert torch.equal(round_trip(base.conj()), base.conj())
    assert torch.equal(round_trip(base[::2, 1:3]), base[::2, 1:3])


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    shared = torch.randn(3)
    copy = Copy({"it": {"a": shared, "b": shared, "c": shared.clone()}})
    assert len(copy.tensors) == 2
    back = decode(copy.objects["it"], copy.tensors.__getitem__)
    assert back["a"] is back["b"] and back["c"] is not back["a"]


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.float32(0.1),
        np.array([], dtype=np.int8),
        np.array(["a", "bc"]),
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cpu"),
    ],
)
def test_numpy_and_torch_values(value: Any) -> None:
    back = round_trip({"v": value})["v"]
    assert type(back) is type(value)
    assert np.array_equal(back, value) if isinstance(value, np.ndarray) else back == value


def test_infinite_and_undefined_numbers() -> None:
    back = round_trip([float("inf"), float("-inf"), float("nan"), 2**200])
    assert back[:2] == [float("inf"), float("-inf")] and back[2] != back[2] and back[3] == 2**200


def test_keys_that_look_like_marks_are_data() -> None:
    value = {"$": "tensor", "key": "x", "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    back = round_trip(value)
    assert back["$"] == "tensor" and back["a.b"].item() == 1 and back["a"]["b"].item() == 0


def test_module_metadata_survives() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    back = round_trip(state)
    assert isinstance(back, OrderedDict) and back._metadata == state._metadata  # type: ignore[attr-defined]


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("bad", [lambda: 0, Colour.RED, object(), iter([1]), type("Local", (), {})()])
def test_what_cannot_be_saved_is_refused_by_path(bad: Any) -> None:
    with pytest.raises(SaveFailedError, match=r"it\.deep\.1 is a "):
        encode({"it": {"deep": [0, bad]}})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_path_unless_it_is_jagged() -> None:
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    for nested in (torch.nested.nested_tensor(parts), nn.Parameter(torch.nested.nested_tensor(parts))):
        with pytest.raises(SaveFailedError, match=r"it\.deep\.1 is a nested tensor"):
            encode({"it": {"deep": [0, nested]}})
    jagged = round_trip(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert [torch.equal(a, b) for a, b in zip(jagged.unbind(), parts, strict=True)] == [True, True]


def test_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SaveFailedError, match="contains itself"):
        encode({"it": loop})


def test_unknown_marks_are_corruption() -> None:
    with pytest.raises(CorruptCheckpointError):
        decode({"$": "surprise"}, {}.__getitem__)


def test_what_is_no_tensor_is_of_its_moment() -> None:
    """C15: numbers in optimizer state that the next step changes in place. Of tensors, see the tests of staging."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[weight]["python"] = [1, {"n": 2.0}]
    encoded = encode({"o": state_of(optimizer)})
    before = json.dumps(encoded.objects)
    optimizer.state[weight]["python"][1]["n"] = 3.0
    optimizer.step()
    assert json.dumps(encoded.objects) == before
    assert json.dumps(encode({"o": state_of(optimizer)}).objects) != before


def optimizers(params: list[nn.Parameter]) -> Iterator[torch.optim.Optimizer]:
    groups = [{"params": params[:1], "lr": 0.01}, {"params": params[1:], "weight_decay": 0.1}]
    yield torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    yield torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
    yield torch.optim.AdamW(groups, lr=0.1, fused=True)
    yield torch.optim.Adagrad(groups, lr=0.1)
    yield torch.optim.RMSprop(groups, lr=0.1, momentum=0.5)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("num_steps", [0, 3])
def test_optimizers_and_schedulers_go_on_as_if_never_stopped(index: int, num_steps: int) -> None:
    """C14, with optimizers whose state is created at the first step."""

    def make() -> tuple[list[nn.Parameter], torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        params = [nn.Parameter(torch.full((3,), 0.5 + i)) for i in range(3)]
        optimizer = list(optimizers(params))[index]
        return params, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(parts: Any, steps: range) -> None:
        params, optimizer, scheduler = parts
        for step in steps:
            for number, param in enumerate(params):
                param.grad = torch.linspace(-1, 1, 3) * (step + number + 1)
            optimizer.step()
            scheduler.step()

    first = make()
    train(first, range(num_steps))
    names = {"params": {str(i): p for i, p in enumerate(first[0])}, "optimizer": first[1], "scheduler": first[2]}
    saved = Copy(names)
    second = make()
    states = {name: saved.value(name) for name in saved.objects}
    for number, param in enumerate(second[0]):
        put_back(param, states["params"][str(number)])
    put_back(second[1], states["optimizer"])
    put_back(second[2], states["scheduler"])
    train(first, range(num_steps, num_steps + 4))
    train(second, range(num_steps, num_steps + 4))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[2].get_last_lr() == second[2].get_last_lr()


def test_float32_moments_of_bfloat16_weights_are_not_rounded() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([1.0001, 2.0003])
    saved = Copy({"o": optimizer})
    other = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    saved.give(o=other)
    assert torch.equal(other.state[weight]["momentum_buffer"], torch.tensor([1.0001, 2.0003]))


def test_scaler_generator_and_dict() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    generator = torch.Generator().manual_seed(3)
    things: dict[str, Any] = {"scaler": scaler, "generator": generator, "dict": {"best": 0.5, 3: torch.ones(2)}}
    saved = Copy(things)
    drawn = torch.rand(4, generator=generator)
    fresh = {"scaler": torch.amp.GradScaler("cpu"), "generator": torch.Generator(), "dict": {"old": 1}}
    saved.give(**fresh)
    assert fresh["scaler"].state_dict() == scaler.state_dict()
    assert torch.equal(torch.rand(4, generator=fresh["generator"]), drawn)
    assert fresh["dict"]["best"] == 0.5 and torch.equal(fresh["dict"][3], torch.ones(2)) and "old" not in fresh["dict"]


def test_objects_without_state_are_refused() -> None:
    with pytest.raises(CheckpointError, match="'x' is a list"):
        require_trackable("x", [1])


def test_compiled_modules_are_tracked_by_what_is_inside() -> None:
    net = nn.Linear(2, 2)
    assert unwrap(torch.compile(net, backend="eager")) is net
