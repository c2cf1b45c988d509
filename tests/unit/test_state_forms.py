"""Forms of tensors are told apart with torch's own check and without it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from overnight.trainer.checkpoint import forms
from overnight.trainer.checkpoint.forms import Form


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forms._tells_apart.cache_clear()
    yield
    forms._tells_apart.cache_clear()


def tensors() -> list[torch.Tensor]:
    base = torch.arange(12.0)
    wave = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    return [
        *(base, base.view(3, 4), base.view(4, 3), base.view(3, 4).t(), base[::2], base[:6], base.view(1, 12)),
        *(base.double(), base.half(), base.to(torch.int32), base.view(torch.int32), nn.Parameter(base.clone())),
        *(torch.zeros(()), torch.zeros(1), torch.zeros(0), torch.zeros(0, 3), torch._neg_view(base)),
        *(wave, wave.conj(), wave.conj().imag, wave[:1].conj(), wave[:1], wave[:1].imag, wave[:1].conj().imag),
        torch.empty(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.empty(2, 4, 3, 3),
        torch.empty(3, 4, device="meta"),
    ]


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    is_contiguous = tensor.is_contiguous()
    strides = () if is_contiguous else tensor.stride()
    return tensor.shape, is_contiguous, strides, tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj()


def check_pairs(found: Sequence[torch.Tensor]) -> None:
    for one in found:
        form = Form([one])
        for other in found:
            assert form.is_of([other]) == (facts(one) == facts(other)), (facts(one), facts(other))


def test_each_is_told_from_each_other() -> None:
    assert forms._tells_apart(), "this torch has another interface: saves of thousands of tensors take longer"
    check_pairs(tensors())


def test_without_torchs_check_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_tells_apart", lambda: False)
    check_pairs(tensors())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 24), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 24))
def test_one_among_several_is_seen(chosen: list[int], place: int, other: int) -> None:
    found = tensors()
    before = [found[index] for index in chosen]
    after = list(before)
    after[place % len(after)] = found[other]
    expected = [facts(one) for one in before] == [facts(one) for one in after]
    assert Form(before).is_of(after) == expected


def test_a_mode_of_the_thread_changes_no_answer() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    with torch.no_grad():
        form = Form([param])
    assert form._check is not None and form._check(param), "made without gradients, it is to be as fast with them"
    with torch.no_grad(), torch.autocast("cpu"):
        assert form.is_of([param])
        assert not form.is_of([torch.ones(3, 2)])
    with torch.inference_mode():
        assert form.is_of([torch.ones(2, 3)])


@pytest.mark.parametrize(
    "broken",
    [
        lambda tensors: lambda *others: True,
        lambda tensors: lambda *others: False,
        lambda tensors: lambda other: (other.shape, other.dtype) == (tensors[0].shape, tensors[0].dtype),
        lambda tensors: lambda other: facts(other)[1:] == facts(tensors[0])[1:],
        lambda tensors: lambda other: facts(other)[:-1] == facts(tensors[0])[:-1],
    ],
    ids=["yes", "no", "no strides", "no shape", "no conjugates"],
)
def test_a_check_that_does_not_know_a_difference_is_not_used(
    broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_check_for", broken)
    assert not forms._tells_apart()
    check_pairs(tensors())


def test_an_interface_that_has_gone_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = pytest.importorskip("torch._C._dynamo.guards")
    monkeypatch.delattr(guards, "TensorGuards")
    assert not forms._tells_apart()
    check_pairs(tensors())


def test_a_sparse_one_has_no_such_form_and_is_no_other_one() -> None:
    sparse = torch.eye(3).to_sparse()
    assert not Form([torch.eye(3)]).is_of([sparse])
