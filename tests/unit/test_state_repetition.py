"""A state that is taken apart for the second time comes out as if it were for the first."""

import gc
import json
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint import repetition
from overnight.trainer.checkpoint.repetition import Encoder
from overnight.trainer.checkpoint.state import Encoded, Encoding, encode
from overnight.trainer.checkpoint.tracked import state_of

NUM_SLOTS = 14


def require_as_new(encoded: Encoded, states: dict[str, Any]) -> None:
    new = encode(states)
    assert encoded.text() == new.text() == json.dumps(encoded.objects, separators=(",", ":"))
    assert list(encoded.leaves) == list(new.leaves)
    parts = zip(encoded.leaves.values(), new.leaves.values(), encoded.tensors, encoded.addresses.tolist(), strict=True)
    for one, other, tensor, address in parts:
        assert (one.key, one.on, one.whole, one.at) == (other.key, other.on, other.whole, other.at)
        assert tensor.data_ptr() == one.tensor.data_ptr() and (address == tensor.data_ptr() or not tensor.numel())
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            other.tensor.dtype,
            other.tensor.shape,
            other.tensor.stride(),
        )
        assert (tensor.is_conj(), tensor.is_neg()) == (other.tensor.is_conj(), other.tensor.is_neg())
        assert torch.equal(one.tensor, other.tensor)


class Pool:
    """What a state may hold, some of it in shared memory."""

    def __init__(self) -> None:
        base = torch.arange(48.0)
        complexes = torch.view_as_complex(torch.arange(12.0).reshape(6, 2)).clone()
        self.items: list[Any] = [
            *(torch.randn(4, 6), torch.randn(6, 4), nn.Parameter(torch.randn(2, 12)), torch.zeros(()), torch.ones(1)),
            *(base, base[:24].view(4, 6), base.view(6, 8).t(), base[8:], base),
            *(complexes, complexes.conj(), complexes.conj().imag, complexes[:1].imag, complexes[:1].conj().imag),
            *(torch.empty(0), torch.empty(0, 3), torch.arange(4), torch.arange(4) > 1, torch.arange(4.0).half()),
            *(1, True, 1.0, 0, False, 0.0, -0.0, float("nan"), None, "1", "", b"1", b"", -1),
            *(np.arange(4), np.arange(6).reshape(2, 3).T, np.float64(1), np.int64(1), np.arange(0), np.arange(4) > 2),
            *([1, 2], [1, True], (1, 2), [torch.ones(2)], {"a": 1}, {1: 1}, {True: 1}, {"$": 1}, {}, [], ()),
            *({1, 2}, torch.ones(2, 2).to_sparse(), OrderedDict(a=1), OrderedDict(), {(1, 2): 3}, {1.5: 2}),
        ]


def build(pool: Pool, slots: list[int]) -> dict[str, Any]:
    values = [pool.items[index % len(pool.items)] for index in slots]
    module: OrderedDict[str, Any] = OrderedDict({"0.weight": values[0], "0.bias": values[1], "1.weight": values[2]})
    module._metadata = OrderedDict({"": {"version": 1}, "0": {"version": values[3]}})  # type: ignore[attr-defined]
    return {
        "model": module,
        "optimizer": {
            "state": {0: {"exp": values[4], "step": values[5]}, 1: {"exp": values[6], "step": values[7]}},
            "param_groups": [{"lr": values[8], "params": [0, 1]}],
        },
        "mixed": {"a": values[9], "b": [values[10], {"c": values[11]}], "d": (values[12],)},
        "alone": values[13],
    }


def edits_in_place() -> list[Callable[[Pool], object]]:
    return [
        lambda pool: pool.items[0].transpose_(-1, -2),
        lambda pool: pool.items[0].unsqueeze_(0),
        lambda pool: pool.items[1].resize_(3, 4),
        lambda pool: pool.items[1].resize_(6, 4),
        lambda pool: setattr(pool.items[2], "data", pool.items[2].data.view(-1, 4)),
        lambda pool: setattr(pool.items[2], "data", pool.items[2].data.clone()),
        lambda pool: setattr(pool.items[6], "data", pool.items[0].data),
        lambda pool: pool.items[4].set_(torch.ones(1).double().float()),
        lambda pool: [item.append(3) for item in pool.items if type(item) is list],
    ]


EDITS = st.one_of(
    st.tuples(st.just("slot"), st.integers(0, NUM_SLOTS - 1), st.integers(0, 60)),
    st.tuples(st.just("form"), st.integers(0, 8), st.just(0)),
    st.tuples(st.just("nothing"), st.just(0), st.just(0)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=NUM_SLOTS, max_size=NUM_SLOTS), st.lists(EDITS, max_size=8))
def test_the_second_time_is_as_the_first(slots: list[int], edits: list[tuple[str, int, int]]) -> None:
    pool, encoder = Pool(), Encoder()
    for what, index, value in [("nothing", 0, 0), *edits, ("nothing", 0, 0)]:
        if what == "slot":
            slots[index] = value
        elif what == "form":
            edits_in_place()[index](pool)
        states = build(pool, slots)
        encoded = encoder.encode(states)
        require_as_new(encoded, states)


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()

    update()
    return model, optimizer, update


def test_what_training_changes_is_repeated() -> None:
    model, optimizer, update = training()
    encoder, forms = Encoder(), []
    for step in range(5):
        update()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        states = {"model": state_of(model), "optimizer": state_of(optimizer), "step": {"step": step}}
        encoded = encoder.encode(states)
        require_as_new(encoded, states)
        forms.append(encoded.form)
    assert forms[0] is not None and all(form is forms[0] for form in forms)


def test_numbers_that_equal_each_other_are_not_the_same() -> None:
    encoder = Encoder()
    for value in (0.0, -0.0, 0, False, 1, True, 1.0, float("nan"), float("nan"), "1", None, 10**30):
        states = {"it": {"a": value, "t": torch.ones(2)}, "keys": {value: 1}, "list": [value, value]}
        encoded = encoder.encode(states)
        require_as_new(encoded, states)


@pytest.mark.filterwarnings("ignore")
def test_content_that_is_part_of_the_json_is_of_each_save() -> None:
    for extra in ({}, {"s": {0.5, 1}}):
        encoder = Encoder()
        for scale in (0.5, 0.5, 0.25):
            odd = torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.qint8)
            states = {"it": {"w": torch.ones(2), "q": odd, "v": torch.zeros(2), "n": scale, **extra}}
            encoded = encoder.encode(states)
            require_as_new(encoded, states)


def test_notes_of_torch_that_change_in_place_are_seen() -> None:
    encoder, state = Encoder(), OrderedDict(weight=torch.ones(2))
    notes: OrderedDict[str, Any] = OrderedDict({"": {"version": 1}})
    state._metadata = notes  # type: ignore[attr-defined]
    for version in (1, 1, 2, 2, True, True, torch.ones(2), torch.ones(2)):
        notes[""]["version"] = version
        encoded = encoder.encode({"it": state})
        require_as_new(encoded, {"it": state})
        assert isinstance(version, torch.Tensor) or f'"version":{json.dumps(version)}' in encoded.text()


def test_an_earlier_text_stays_as_it_was() -> None:
    encoder, state = Encoder(), {"lr": 0.5, "w": torch.ones(2)}
    encoder.encode({"it": state})
    one = encoder.encode({"it": state})
    state["lr"] = 0.25
    other = encoder.encode({"it": state})
    assert '"lr":0.5' in one.text() and '"lr":0.25' in other.text()


def test_tensors_that_begin_to_share_memory_become_one_and_part_again() -> None:
    encoder = Encoder()
    state = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.zeros(3)}
    for change in (None, ("b", "a"), None, ("c", "a"), ("b", None), ("c", None)):
        if change is not None:
            state[change[0]] = state[change[1]] if change[1] else torch.zeros(3)
        encoded = encoder.encode({"it": state})
        require_as_new(encoded, {"it": state})


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=5, max_size=5), min_size=2, max_size=6))
def test_tensors_that_change_places_are_told_apart(places: list[list[int]]) -> None:
    pool = [torch.full((2,), float(number)) for number in range(7)]
    encoder = Encoder()
    for chosen in places:
        state = {str(slot): pool[number] for slot, number in enumerate(chosen)}
        require_as_new(encoder.encode({"it": state}), {"it": state})


def test_a_change_of_form_in_the_same_memory_is_seen() -> None:
    base = torch.arange(24.0)
    weight, other = base[:6].view(2, 3), base.view(4, 6).t()
    encoder, states = Encoder(), {"it": {"w": weight, "o": other, "e": torch.empty(0), "f": torch.empty(0)}}
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: weight.t_(),
        lambda: weight.resize_(3),
        lambda: weight.unsqueeze_(0),
        lambda: other.as_strided_((6, 4), (1, 5)),
        lambda: other.as_strided_((6, 4), (0, 1)),
        lambda: states["it"].update(f=states["it"]["e"]),
        lambda: states["it"].update(f=torch.empty(0)),
        lambda: setattr(weight, "data", base[:3].view(torch.int32)),
    ]
    for change in changes:
        change()
        for _ in range(2):
            require_as_new(encoder.encode(states), states)


def test_a_tensor_that_has_given_its_memory_away_is_refused_the_second_time_too() -> None:
    encoder, weight = Encoder(), torch.ones(8)
    states = {"it": {"w": weight, "e": torch.empty(0)}}
    for _ in range(2):
        encoded = encoder.encode(states)
        assert encoded.addresses.tolist() == [weight.data_ptr(), 0]
        weight.untyped_storage().resize_(0)
        with pytest.raises(SaveFailedError, match=r"it\.w has no memory"):
            encoder.encode(states)
        weight.untyped_storage().resize_(32)


def test_two_views_whose_strides_do_not_matter_are_one_the_second_time_too() -> None:
    base = torch.arange(6.0)
    states = {"it": {"a": base.as_strided((1, 6), (6, 1)), "b": base.as_strided((1, 6), (99, 1))}}
    encoder = Encoder()
    for _ in range(3):
        encoded = encoder.encode(states)
        require_as_new(encoded, states)
        assert list(encoded.leaves) == ["it.a"]
        states = {"it": {"a": base.as_strided((1, 6), (99, 1)), "b": base.as_strided((1, 6), (6, 1))}}


def test_the_memory_of_tensors_with_one_address_and_other_strides_is_not_mixed_up() -> None:
    base = torch.arange(40.0)
    encoder, state = Encoder(), {"a": base.as_strided((3, 4), (4, 1)), "b": base.as_strided((3, 4), (8, 2))}
    for strides in ((8, 2), (4, 1), (8, 2), (2, 8), (8, 2)):
        state["a"] = base.as_strided((3, 4), strides)
        require_as_new(encoder.encode({"it": state}), {"it": state})


def changes_at(call: int, state: dict[str, Any]) -> Callable[[Encoding, Any, str], Any]:
    """A walk during which a number changes, as by a thread of the script."""
    walk, calls = Encoding.encode, iter(range(1000))

    def encode_meanwhile(self: Encoding, value: Any, path: str) -> Any:
        if next(calls) == call:
            state["n"] = 2
        return walk(self, value, path)

    return encode_meanwhile


@pytest.mark.parametrize("call", range(6))
def test_what_changes_while_it_is_taken_apart_spoils_no_later_save(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, state = Encoder(), {"n": 1, "w": torch.ones(2)}
    states = {"it": state, "more": {"a": [1], "t": torch.zeros(1)}}
    with monkeypatch.context() as patch:
        patch.setattr(Encoding, "encode", changes_at(call, state))
        encoder.encode(states)
    for value in (1, 2, 1, 2):
        state["n"] = value
        require_as_new(encoder.encode(states), states)


def test_an_exception_in_the_middle_leaves_no_half_of_it_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise TimeoutError

    encoder, state = Encoder(), {"n": 1, "w": torch.ones(2)}
    encoder.encode({"it": state})
    for value in range(2, 6):
        state["n"] = value
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(repetition._Again, "encode", interrupted)
            encoder.encode({"it": state})
        require_as_new(encoder.encode({"it": state}), {"it": state})
        require_as_new(encoder.encode({"it": state}), {"it": state})


def test_what_cannot_be_saved_is_refused_the_second_time_too() -> None:
    encoder, state = Encoder(), {"w": torch.ones(2)}
    for _ in range(2):
        encoder.encode({"it": state})
    for bad in (torch.ones(2, device="meta"), nn.UninitializedParameter(), object()):
        with pytest.raises(SaveFailedError, match=r"it\.w"):
            encoder.encode({"it": {"w": bad}})
    require_as_new(encoder.encode({"it": state}), {"it": state})


def test_nothing_is_kept_alive_between_saves() -> None:
    encoder, state = Encoder(), {"w": torch.ones(1000), "o": {"a": nn.Parameter(torch.ones(5))}, "n": np.ones(9)}
    for _ in range(3):
        encoder.encode({"it": state})
    alive = [weakref.ref(state["w"]), weakref.ref(state["w"].untyped_storage()), weakref.ref(state["o"]["a"])]
    alive.append(weakref.ref(state["n"]))
    state.clear()
    gc.collect()
    assert [one() for one in alive] == [None] * 4


class Hooked(nn.Module):
    """A module whose hooks expect detached tensors, leave out what asks for gradients, and count how often they run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.num_calls = 0
        self.register_state_dict_post_hook(self.add)

    @staticmethod
    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        assert isinstance(module, Hooked)
        module.num_calls += 1
        state[f"{prefix}sum"] = torch.from_numpy(state[f"{prefix}linear.weight"].numpy().sum(0))
        for key in [key for key, value in state.items() if value.requires_grad]:
            del state[key]


class OwnSignature(nn.Module):
    """A module whose ``state_dict`` takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"weight": self.weight.detach(), "more": 5}


@pytest.mark.parametrize("kind", [Hooked, OwnSignature, lambda: nn.BatchNorm1d(3), lambda: nn.LSTM(2, 3)])
def test_a_module_has_the_state_that_it_says(kind: Callable[[], nn.Module]) -> None:
    module, encoder = kind(), Encoder()
    for number in range(3):
        said = module.state_dict()
        require_as_new(encoder.encode({"it": state_of(module)}), {"it": said})
        assert not isinstance(module, Hooked) or module.num_calls == 2 * (number + 1)
