"""Warm starts: from another trial, a checkpoint, or a file of whatever script wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_lab import lay

from overnight.core.errors import BadInputError, CheckpointError, CorruptCheckpointError, NotFoundError
from overnight.trainer.checkpoint.pins import read_pins
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.reading.finding import ALONE
from overnight.trainer.checkpoint.safetensors import write_safetensors
from overnight.trainer.checkpoint.tracked import state_of
from overnight.trainer.warm import WarmStart
from overnight.trainer.warm_source import trial_place

Parts = tuple[torch.nn.Module, torch.optim.Optimizer]


def build(value: float, width: int = 4) -> Parts:
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def warm(tmp_path: Path, parts: Parts, **more: Any) -> WarmStart:
    tracked = {"model": parts[0], "optimizer": parts[1], "state": {"best": 0}, **more}
    return WarmStart(tracked, torch.device("cpu"), ALONE, tmp_path / "trials" / "mine", "warm start of mine")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two trials that ran; the first saved at 10 and 20."""
    for trial, name, values in (("id-1", "digits-1", {10: 0.1, 20: 0.2}), ("id-2", "digits-2", {5: 0.5})):
        folder = tmp_path / "trials" / trial
        (folder / "attempts" / "0001").mkdir(parents=True)
        order = {"trial_id": trial, "trial_name": name, "checkpoints": str(folder / "checkpoints")}
        (folder / "attempts" / "0001" / "order.json").write_text(json.dumps(order))
        for step, value in values.items():
            model, optimizer = build(value)
            states = {"model": state_of(model), "optimizer": optimizer.state_dict(), "state": {"best": step}}
            lay(LocalPlace(folder / "checkpoints"), step, [{**states, "$run": {"step": step}}])
    (tmp_path / "trials" / "mine").mkdir()
    return tmp_path


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("trial", ["digits-1", "id-1"])
def test_weights_of_another_trial(home: Path, trial: str) -> None:
    parts = build(9.0)
    assert warm(home, parts).begin(from_trial=trial) == ["model"]
    assert equal(parts[0], build(0.2)[0]) and parts[1].param_groups[0]["lr"] == 9.0


def test_everything_of_an_earlier_step(home: Path) -> None:
    parts = build(9.0)
    start = warm(home, parts)
    assert start.begin(from_trial="digits-1", step=10, what="all") == ["model", "optimizer", "state"]
    assert equal(parts[0], build(0.1)[0]) and parts[1].param_groups[0]["lr"] == 0.1
    assert start.tracked["state"] == {"best": 10}
    moments = [value for state in parts[1].state.values() for value in state.values()]
    expected = [value for state in build(0.1)[1].state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))


def test_what_is_read_is_pinned_and_let_go(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = LocalPlace(home / "trials" / "id-1" / "checkpoints")
    seen: list[tuple[str, str]] = []
    real = torch.nn.Module.load_state_dict

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend((str(pin.checkpoint), pin.holder) for pin in read_pins(place))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", load)
    warm(home, build(9.0)).begin(path=place.root)
    assert seen == [("step-20.attempt-1.1", "warm start of mine")] and not read_pins(place)


@pytest.mark.parametrize(
    "content",
    [
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: {"model": model.state_dict(), "epoch": 3},
        lambda model, optimizer: {"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}},
        lambda model, optimizer: {"model_state_dict": {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}},
    ],
)
def test_files_of_whatever_script(home: Path, content: Any) -> None:
    torch.save(content(*build(0.7)), home / "ü.pt")
    parts = build(9.0)
    assert warm(home, parts).begin(path=home / "ü.pt") == ["model"]
    assert equal(parts[0], build(0.7)[0])


def test_a_file_with_everything(home: Path) -> None:
    model, optimizer = build(0.7)
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, home / "x.pt")
    parts = build(9.0)
    assert warm(home, parts).begin(path=home / "x.pt", what="all") == ["model", "optimizer"]
    assert parts[1].param_groups[0]["lr"] == 0.7


def test_safetensors(home: Path) -> None:
    write_safetensors(home / "m.safetensors", build(0.7)[0].state_dict(), {})
    parts = build(9.0)
    warm(home, parts).begin(path=str(home / "m.safetensors"))
    assert equal(parts[0], build(0.7)[0])


def test_only_what_fits(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = build(9.0, width=5)
    with pytest.raises(CheckpointError, match=r"(?s)'model' does not fit.*strict=False"):
        warm(home, wide).begin(from_trial="digits-2")
    wide = build(9.0, width=5)
    assert warm(home, wide).begin(from_trial="digits-2", strict=False) == ["model"]
    assert torch.equal(wide[0][1].bias, build(0.5)[0][1].bias), "the same shape"
    assert torch.equal(wide[0][0].weight, build(9.0, width=5)[0][0].weight), "another shape"
    said = capsys.readouterr().err
    assert "0.weight stays as it is" in said and "checkpoints/step-5.attempt-1.1: model" in said


def test_a_file_that_would_execute_something_is_refused(home: Path) -> None:
    torch.save({"model": build(0.7)[0]}, home / "pickled.pt")
    with pytest.raises(CorruptCheckpointError, match=r"(?s)pickled\.pt cannot be read.*weights_only"):
        warm(home, build(9.0)).begin(path=home / "pickled.pt")


def test_damage_leaves_the_live_weights_alone(home: Path) -> None:
    folder = home / "trials" / "id-2" / "checkpoints" / "step-5.attempt-1.1"
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    index = json.loads((folder / "index.json").read_bytes())["tensors"]
    data[index["model.1.bias"]["chunks"][0]["offset"]] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    parts = build(9.0)
    with pytest.raises(CorruptCheckpointError, match="__0_0"):
        warm(home, parts).begin(path=folder)
    assert equal(parts[0], build(9.0)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, BadInputError, "needs from_trial= or path="),
        ({"from_trial": "a", "path": "b"}, BadInputError, "needs from_trial= or path="),
        ({"from_trial": "digits-1", "what": "half"}, BadInputError, "neither 'weights' nor 'all'"),
        ({"from_trial": "digits-9"}, NotFoundError, "no trial digits-9"),
        ({"from_trial": "digits-1", "step": 15}, NotFoundError, r"no checkpoint of step 15.*\n.*\[10, 20\]"),
        ({"path": "/nowhere"}, NotFoundError, "cannot begin from /nowhere: there is nothing"),
    ],
)
def test_what_cannot_be_says_what_can(home: Path, arguments: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        warm(home, build(9.0)).begin(**arguments)


def test_names_that_do_not_match_are_told(home: Path) -> None:
    start = WarmStart({"net": build(9.0)[0]}, torch.device("cpu"), ALONE, home / "trials" / "mine", "")
    with pytest.raises(BadInputError, match="it holds model, optimizer, state; the run tracks net"):
        start.begin(from_trial="digits-1")
    with pytest.raises(BadInputError, match="nothing is"):
        WarmStart({}, torch.device("cpu"), ALONE, home, "").begin(path=home)


def test_a_trial_whose_checkpoints_are_elsewhere(home: Path) -> None:
    order = home / "trials" / "id-2" / "attempts" / "0001" / "order.json"
    order.write_text(json.dumps({"trial_id": "id-2", "trial_name": "digits-2", "checkpoints": "memory://bucket/2"}))
    assert trial_place(home / "trials" / "mine", "digits-2") == "memory://bucket/2"
