"""Every kind of state goes into a checkpoint and comes back as it was, or is refused before anything is written."""

import collections
import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from state_lab import Copy, round_trip
from torch import nn

from overnight.core.errors import CheckpointError, SaveFailedError
from overnight.trainer import rng
from overnight.trainer.checkpoint.state import decode, encode
from overnight.trainer.checkpoint.tracked import fit_of, put_back, require_trackable, state_of

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8,
    torch.complex32, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (4, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_tensors_of_every_type_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 256 if dtype is not torch.bool else 2, (num_bytes,), dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)
    back = round_trip(tensor)
    assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert bits(back) == bits(tensor)


def test_encoding_copies_nothing() -> None:
    net, array = nn.Linear(3, 3), np.arange(4.0)
    leaves = encode({"net": state_of(net), "array": array}).leaves
    assert leaves["net.weight"].tensor.data_ptr() == net.weight.data_ptr()
    assert leaves["array"].tensor.data_ptr() == array.ctypes.data
    assert not any(leaf.tensor.requires_grad for leaf in leaves.values())


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.t(),
        lambda base: base[::2, 1:3],
        lambda base: base[:1].expand(5, 6),
        lambda base: base.conj(),
        lambda base: base.imag,
        lambda base: torch._neg_view(base),
        lambda base: base.as_strided((3, 3), (1, 2)),
        lambda base: base[0, 0],
        lambda base: base.to(memory_format=torch.contiguous_format).unsqueeze(0).transpose(0, 2),
    ],
)
def test_views_come_back_with_their_values(view: Any) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    back = round_trip({"base": base, "view": view(base)})
    assert torch.equal(back["view"], view(base)) and torch.equal(back["base"], base)


def test_a_conjugated_or_negated_view_is_not_its_base() -> None:
    base = torch.randn(3, dtype=torch.complex64)
    back = round_trip([base, base.conj(), torch._neg_view(base), base])
    assert torch.equal(back[1], base.conj()) and torch.equal(back[2], -base)
    assert back[0] is back[3] and back[0] is not back[1]


def test_shared_memory_is_stored_once_however_it_is_reached() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    encoded = encode({"net": state_of(net), "again": state_of(net), "weights": {"w": net[0].weight}})
    assert sorted(encoded.leaves) == ["net.0.bias", "net.0.weight", "net.1.bias"]
    assert len(encode({"o": state_of(optimizer)}).leaves) == 0


def test_tied_weights_stay_tied() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        net[1].weight = net[0].weight
        return net

    first, second = build(), build()
    Copy({"net": first}).give(net=second)
    assert second[0].weight is second[1].weight and torch.equal(second[0].weight, first[0].weight)


def test_a_view_beside_its_base_is_stored_beside_it_and_put_back_into_it() -> None:
    """A fused weight and its parts: both are written, and both agree after they were read."""
    fused = torch.randn(6, 2)
    state = {"fused": fused, "first": fused[:3]}
    saved = Copy({"it": state})
    expected = fused.clone()
    fused.zero_()
    saved.give(it=state)
    assert torch.equal(fused, expected) and state["first"].data_ptr() == fused.data_ptr()


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "hybrid": lambda dense: dense.to_sparse(1),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
    "empty": lambda dense: (dense * 0).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_tensors(kind: str) -> None:
    dense = torch.randn(4, 6, dtype=torch.float64) * (torch.rand(4, 6) < 0.4)
    sparse = SPARSE[kind](dense)
    back = round_trip(sparse)
    assert back.layout is sparse.layout and back.dtype is sparse.dtype
    assert torch.equal(back.to_dense(), sparse.to_dense())


def test_an_uncoalesced_tensor_keeps_its_parts() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (3,))
    back = round_trip(sparse)
    assert not back.is_coalesced() and torch.equal(back._values(), sparse._values())
    assert round_trip(sparse.coalesce()).is_coalesced()


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors() -> None:
    tensor = torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 3, torch.qint8)
    back = round_trip(tensor)
    assert back.dtype is torch.qint8 and torch.equal(back.int_repr(), tensor.int_repr())


class Bag(dict):
    """A user's own kind of dict."""


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.zeros(3, dtype=[("x", "<i4"), ("pos", "<f8", (2,))]),
        np.arange(6).reshape(2, 3).T,
        np.array(5, dtype=np.int8),
        np.zeros((2, 0)),
        np.array("", dtype="<U0"),
        np.complex64(1 + 2j),
        np.bool_(True),
    ],
    ids=repr,
)
def test_numpy_values(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value) and back.dtype == value.dtype and np.array_equal(back, value)
    assert back.shape == value.shape


def test_read_only_arrays_are_no_trouble() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert np.array_equal(round_trip(array), array)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, "three", (4, 5)}, frozenset({1.5, None}), {3: "a", None: "b", (1, "x"): "c", 2.5: {b"k": 1}, True: 2},
        collections.OrderedDict([(2, torch.ones(1)), ("a", 1)]), collections.Counter("hello"), 2**100, 1e-320,
        "\ud800 lone surrogate", b"\x00\xff", range(3, 9, 2), slice(1, None), complex(1, 2),
    ],
    ids=lambda value: str(type(value).__name__),
)  # fmt: skip
def test_python_values(value: Any) -> None:
    try:
        back = round_trip(value)
    except SaveFailedError as refused:
        assert type(value) in (range, slice, complex), refused  # said, not lost
        return
    assert back == value and type(back) is type(value)
    if isinstance(value, dict):
        assert list(back) == list(value)


def test_random_state_of_python_and_numpy_comes_back() -> None:
    """C16: no pickle, so nothing that loading with weights_only could swallow."""
    with rng.isolated():
        random.seed(1), np.random.seed(2)
        state = round_trip({"own": rng.capture(), "python": random.getstate(), "numpy": np.random.get_state()})
        drawn = random.random(), np.random.rand()
        for restore in (
            lambda: rng.restore(state["own"]),
            lambda: (random.setstate(state["python"]), np.random.set_state(state["numpy"])),
        ):
            random.seed(9), np.random.seed(9)
            restore()
            assert (random.random(), np.random.rand()) == drawn


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: 0, "is a function"),
        (threading.Lock(), "is a lock"),
        (np.array([object()]), "is a ndarray"),
        (np.ma.masked_array([1.0], [True]), "is a MaskedArray"),
        (nn.Linear(2, 2), "is a Linear"),
        (torch.empty(2, device="meta"), "on the meta device"),
        (nn.LazyLinear(3).weight, "not initialised"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_refused_with_its_path_and_a_hint(bad: Any, reason: str) -> None:
    """C5."""
    with pytest.raises(SaveFailedError, match=r"^it\.value\.deep\.1 ") as caught:
        round_trip({"deep": [torch.ones(1), bad]})
    assert reason in caught.value.message and caught.value.hint


def test_a_module_on_the_meta_device_is_refused_when_it_is_tracked() -> None:
    """Loading into it would do nothing and say so in a warning at most."""
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"'weight' of 'net' is on the meta device"):
        require_trackable("net", net)


def test_lazy_modules_get_their_shape_from_the_checkpoint() -> None:
    first, second = nn.LazyLinear(2), nn.LazyLinear(2)
    first(torch.ones(1, 3))
    Copy({"net": first}).give(net=second)
    assert torch.equal(second.weight, first.weight)


def test_buffers_as_torch_does_and_extra_state() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2))
            self.register_buffer("left_out", torch.zeros(2), persistent=False)
            self.calls: dict[Any, Any] = {}

        def get_extra_state(self) -> Any:
            return self.calls

        def set_extra_state(self, state: Any) -> None:
            self.calls = state

    first, second = Net(), Net()
    first.kept += 1
    first.left_out += 1
    first.calls = {(1, 2): "x", "tensor": torch.ones(2)}
    Copy({"net": first}).give(net=second)
    assert second.kept.tolist() == [1, 1] and second.left_out.tolist() == [0, 0]
    assert second.calls[1, 2] == "x" and second.calls["tensor"].tolist() == [1, 1]


def test_what_does_not_fit_is_an_error_and_never_a_cast_or_a_broadcast() -> None:
    saved = Copy({"net": nn.Linear(2, 2), "tensor": torch.ones(1), "array": np.ones(1)})
    with pytest.raises(TypeError, match=r"weight was saved as torch\.float32 and is torch\.bfloat16 now"):
        saved.give(net=nn.Linear(2, 2).bfloat16())
    with pytest.raises(RuntimeError, match="size mismatch"):
        saved.give(net=nn.Linear(3, 2))
    for name, other in (
        ("tensor", torch.zeros(3)),
        ("tensor", torch.zeros(1, dtype=torch.int64)),
        ("array", np.ones(2)),
    ):
        with pytest.raises(ValueError, match="it was saved as"):
            saved.give(**{name: other})


def test_tensors_in_tracked_dicts_are_filled_in_place() -> None:
    """Whoever optimises them holds them too."""
    weight = torch.ones(2, requires_grad=True)
    array = np.zeros(2)
    state: dict[str, Any] = {"deep": {"weight": weight, "list": [torch.zeros(1), array]}, "best": 0.5}
    saved = Copy({"state": state})
    with torch.no_grad():
        weight.zero_()
    array += 3
    state["new"] = 1
    saved.give(state=state)
    assert state["deep"]["weight"] is weight and weight.tolist() == [1, 1] and weight.requires_grad
    assert state["deep"]["list"][1] is array and array.tolist() == [0, 0] and "new" not in state


def test_dicts_of_other_kinds_and_arrays_can_be_tracked() -> None:
    bag, array = Bag(a=1), np.arange(3.0)
    counts = collections.defaultdict(int, {"x": 2})
    saved = Copy({"bag": bag, "array": array, "counts": counts})
    array[:] = 0
    bag["a"], counts["x"] = 2, 3
    saved.give(bag=bag, array=array, counts=counts)
    assert bag == Bag(a=1) and array.tolist() == [0, 1, 2] and counts["x"] == 2 and counts["new"] == 0


def test_submodules_may_be_compiled_or_not() -> None:
    def build(compiled: bool) -> nn.Module:
        inner = nn.BatchNorm1d(3)
        return nn.Sequential(torch.compile(inner, backend="eager") if compiled else inner, nn.Linear(3, 3))

    for one, other in ((True, False), (False, True), (True, True)):
        first, second = build(one), build(other)
        nn.init.normal_(first[1].weight)
        Copy({"net": first}).give(net=torch.compile(second, backend="eager"))
        assert torch.equal(first[1].weight, second[1].weight)
    names = [key for key in encode({"net": state_of(build(True))}).leaves if "_orig_mod" in key]
    assert names == []


def test_data_parallel_and_compile_wrappers_do_not_matter() -> None:
    net = nn.Linear(2, 2)
    saved = Copy({"net": torch.compile(net, backend="eager")})
    other = nn.Linear(2, 2)
    saved.give(net=other)
    assert torch.equal(other.weight, net.weight)


def test_averaged_models() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for _ in range(3):
        net(torch.randn(4, 2))
        ema.update_parameters(net)
    other = torch.optim.swa_utils.AveragedModel(copy.deepcopy(net), use_buffers=True)
    Copy({"ema": ema}).give(ema=other)
    assert other.n_averaged == 3
    assert all(torch.equal(a, b) for a, b in zip(ema.parameters(), other.parameters(), strict=True))


class Accuracy:
    """A metric accumulator with a state of its own."""

    def __init__(self) -> None:
        self.right, self.seen, self.by_class = torch.zeros(()), 0, {}

    def state_dict(self) -> dict[str, Any]:
        return {"right": self.right, "seen": self.seen, "by_class": self.by_class}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.right, self.seen, self.by_class = state["right"], state["seen"], state["by_class"]


def test_metric_accumulators_go_on_from_the_values_of_the_save() -> None:
    first, second = Accuracy(), Accuracy()
    first.right += 3
    first.seen, first.by_class = 5, {0: [1, 2], 1: (torch.ones(2), np.float32(0.5))}
    saved = Copy({"metric": first})
    first.right += 1
    first.by_class[0].append(3)
    saved.give(metric=second)
    assert (second.right.item(), second.seen, second.by_class[0]) == (3, 5, [1, 2])
    second.right += 1
    assert saved.value("metric")["right"].item() == 3


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5, 5]),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 12),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=4),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers_go_on_as_if_never_stopped(name: str) -> None:
    """C14."""

    def make() -> tuple[torch.optim.Optimizer, Any]:
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.02)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def steps(parts: tuple[torch.optim.Optimizer, Any], numbers: range) -> list[Any]:
        optimizer, scheduler = parts
        rates = []
        for number in numbers:
            optimizer.step()
            scheduler.step(*([0.5 + number % 2] if name == "ReduceLROnPlateau" else []))
            rates.append([(group["lr"], group.get("momentum")) for group in optimizer.param_groups])
        return rates

    first, second = make(), make()
    steps(first, range(3))
    saved = Copy({"optimizer": first[0], "scheduler": first[1]})
    saved.give(optimizer=second[0], scheduler=second[1])
    assert steps(second, range(3, 8)) == steps(first, range(3, 8))


def test_unknown_or_foreign_data_is_not_trusted() -> None:
    saved = Copy({"net": nn.Linear(2, 2)})
    with pytest.raises(RuntimeError, match="Missing key"):
        put_back(nn.Conv1d(1, 1, 1), {"weight": torch.ones(1, 1, 1)})
    net = nn.Linear(2, 2)
    assert decode(saved.objects["net"], saved.read, None, fit_of(net)).keys() == net.state_dict().keys()
