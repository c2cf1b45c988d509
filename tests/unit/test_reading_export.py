"""What leaves a checkpoint as one file is what was in it, under the names that others expect."""

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_lab import Shard, lay
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight import trainer
from overnight.core.errors import BadInputError, CorruptCheckpointError, NotFoundError
from overnight.trainer.checkpoint.export import export
from overnight.trainer.checkpoint.pins import read_pins
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.safetensors import TYPES, read_safetensors, write_safetensors
from overnight.trainer.checkpoint.tracked import state_of

SHAPES = st.lists(st.integers(0, 4), max_size=3)


def model() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    net.append(net[2])  # tied
    return net


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "Prüfung")


@pytest.fixture
def net(place: LocalPlace) -> torch.nn.Module:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    states = {"model": state_of(net), "optimizer": optimizer.state_dict()}
    lay(place, 7, [{**states, "state": {"best": 0.5}, "$run": {"step": 7}}])
    return net


def test_a_model_as_safetensors_is_read_by_its_library(place: LocalPlace, net: torch.nn.Module, tmp_path: Path) -> None:
    target = tmp_path / "ü.safetensors"
    facts = trainer.export(place.root, target)
    loaded = safetensors.torch.load_file(target)
    assert facts["objects"] == ["model"] and facts["step"] == 7 and facts["bytes"] == target.stat().st_size
    assert facts["tensors"] == len(loaded) == len(net.state_dict())
    other = model()
    other.load_state_dict(loaded)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    with safetensors.safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "checkpoint": "step-7.attempt-1.1", "step": "7", "object": "model"}


def test_everything_for_torch_load(place: LocalPlace, net: torch.nn.Module, tmp_path: Path) -> None:
    facts = export(place.path(place.checkpoints()[0]), tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert sorted(loaded) == sorted(facts["objects"]) == ["model", "optimizer", "state"], "the run's own stay out"
    net.load_state_dict(loaded["model"])
    torch.optim.AdamW(net.parameters()).load_state_dict(loaded["optimizer"])
    assert loaded["state"] == {"best": 0.5}
    export(place.root, tmp_path / "one.pt", name="model")
    net.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True))


def test_shards_are_whole_in_the_file(place: LocalPlace, tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    ranks = [{"net": {"w": Shard(whole[2 * r : 2 * r + 2], (4, 3), (2 * r, 0))}, "n": {"n": 1}} for r in range(2)]
    lay(place, 1, ranks)
    facts = export(place.root, tmp_path / "w.safetensors")
    assert facts["objects"] == ["net"], "the only one that consists of tensors"
    assert torch.equal(safetensors.torch.load_file(tmp_path / "w.safetensors")["w"], whole)


@pytest.mark.parametrize(
    ("target", "name", "error", "words"),
    [
        ("model.onnx", None, BadInputError, "no .safetensors or .pt"),
        ("there.pt", None, BadInputError, "exists already"),
        ("m.safetensors", "nothing", NotFoundError, "holds no 'nothing'"),
        ("m.safetensors", "optimizer", BadInputError, "more than tensors"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    place: LocalPlace, net: torch.nn.Module, tmp_path: Path, target: str, name: str | None, error: type, words: str
) -> None:
    (tmp_path / "there.pt").write_bytes(b"precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        export(place.root, tmp_path / target, name=name)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "there.pt").read_bytes() == b"precious"


def test_two_models_ask_which(place: LocalPlace, tmp_path: Path) -> None:
    lay(place, 1, [{"actor": {"w": torch.ones(2)}, "critic": {"w": torch.ones(2)}}])
    with pytest.raises(BadInputError, match="actor, critic: which of them"):
        export(place.root, tmp_path / "m.safetensors")
    assert export(place.root, tmp_path / "m.safetensors", name="critic")["objects"] == ["critic"]


def test_damage_is_not_exported(place: LocalPlace, net: torch.nn.Module, tmp_path: Path) -> None:
    name = place.checkpoints()[0]
    path = place.path(name) / "__0_0.distcp"
    index = json.loads((place.path(name) / "index.json").read_bytes())["tensors"]
    data = bytearray(path.read_bytes())
    data[index["model.0.weight"]["chunks"][0]["offset"]] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="__0_0"):
        export(place.path(name), tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_it_is_pinned_while_it_is_read(
    place: LocalPlace, net: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CheckpointName] = []

    def save(*args: object) -> None:
        seen.extend(pin.checkpoint for pin in read_pins(place))
        real(*args)

    real = torch.save
    monkeypatch.setattr(torch, "save", save)
    export(place.root, tmp_path / "m.pt")
    assert seen == [CheckpointName(7, Token(1))] and not read_pins(place)


def test_a_copy_elsewhere_is_exported_too(place: LocalPlace, net: torch.nn.Module, tmp_path: Path) -> None:
    copy = shutil.copytree(place.path(place.checkpoints()[0]), tmp_path / "best")
    assert export(copy, tmp_path / "m.pt")["step"] == 7


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8), st.tuples(st.sampled_from(sorted(TYPES)), st.lists(st.integers(0, 4), max_size=3))
    )
)
def test_the_format_both_ways(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    tensors = {}
    for key, (kind, shape) in layout.items():
        if key == "__metadata__":
            continue
        dtype = TYPES[kind]
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
        tensors[key] = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    write_safetensors(path, tensors, {"a": "b"})
    for loaded in (read_safetensors(path), safetensors.torch.load_file(path)):
        assert set(loaded) == set(tensors)
        for key, tensor in tensors.items():
            assert (loaded[key].dtype, loaded[key].shape) == (tensor.dtype, tensor.shape)
            assert bytes(loaded[key].reshape(-1).view(torch.uint8).numpy()) == bytes(
                tensor.reshape(-1).view(torch.uint8).numpy()
            )


@pytest.mark.parametrize("cut", [0, 4, 9, 40, -1])
def test_a_cut_file_is_no_safetensors_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, OrderedDict(w=torch.ones(100)), {})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CorruptCheckpointError, match="no whole safetensors"):
        read_safetensors(path)


def test_types_that_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="w is complex128"):
        write_safetensors(tmp_path / "x.safetensors", {"w": torch.ones(1, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())
