"""Warm starts from what people have lying about: bare weights beside an average, damaged files, another step's name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_lab import lay

from overnight.core.errors import BadInputError, CheckpointError, CorruptCheckpointError
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.reading.finding import ALONE
from overnight.trainer.warm import WarmStart


def warm(tmp_path: Path, **tracked: Any) -> WarmStart:
    return WarmStart(tracked, torch.device("cpu"), ALONE, tmp_path / "trials" / "mine", "warm start of mine")


def linear(value: float = 0.0) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def saved(tmp_path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, tmp_path / "weights.pt", **options)
    return tmp_path / "weights.pt"


@pytest.mark.parametrize("around", [lambda state: state, lambda state: {"state_dict": state, "epoch": 3}])
def test_bare_weights_are_those_of_the_model_and_not_of_its_average(tmp_path: Path, around: Any) -> None:
    model, ema = linear(), torch.optim.swa_utils.AveragedModel(linear())
    file = saved(tmp_path, around(linear(0.5).state_dict()))
    assert warm(tmp_path, ema=ema, model=model).begin(path=file) == ["model"]
    assert torch.equal(model.weight, linear(0.5).weight) and not ema.state_dict()["module.weight"].any()


def test_bare_weights_for_two_modules_of_which_none_is_the_model(tmp_path: Path) -> None:
    file = saved(tmp_path, linear(0.5).state_dict())
    with pytest.raises(BadInputError, match="holds no state of one of these objects; the run tracks one, other"):
        warm(tmp_path, one=linear(), other=linear()).begin(path=file)


def altered(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{key}_": value for key, value in state.items()}


@pytest.mark.parametrize("content", [{}, altered(linear().state_dict()), linear().half().state_dict()])
def test_to_take_what_fits_is_no_way_to_take_nothing(tmp_path: Path, content: Any) -> None:
    with pytest.raises(BadInputError, match=r"nothing that .*weights\.pt has for 'model' fits"):
        warm(tmp_path, model=linear()).begin(path=saved(tmp_path, {"model": content}), strict=False)


def test_names_that_are_numbers(tmp_path: Path) -> None:
    content = {"model": dict(enumerate(linear().state_dict().values()))}
    with pytest.raises(CheckpointError, match="'model' does not fit"):
        warm(tmp_path, model=linear()).begin(path=saved(tmp_path, content))


def test_every_flipped_byte_of_the_weights_is_seen(tmp_path: Path) -> None:
    file = saved(tmp_path, linear(0.5).state_dict())
    good = file.read_bytes()
    pattern = linear(0.5).weight.detach().numpy().tobytes()
    first = good.index(pattern)
    for at in range(first, first + len(pattern)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match=r"weights\.pt is damaged"):
            warm(tmp_path, model=linear()).begin(path=file)


def test_files_without_sums_are_taken(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        file = saved(tmp_path, linear(0.5).state_dict())
    finally:
        torch.serialization.set_crc32_options(True)
    assert warm(tmp_path, model=linear()).begin(path=file) == ["model"]
    file = saved(tmp_path, linear(0.5).state_dict(), _use_new_zipfile_serialization=False)
    assert warm(tmp_path, model=linear()).begin(path=file) == ["model"]


def test_a_step_is_never_passed_over(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "checkpoints")
    lay(place, 10, [{"model": linear(0.5).state_dict()}])
    one = tmp_path / "checkpoints" / "step-10.attempt-1.1"
    start = warm(tmp_path, model=linear())
    assert start.begin(path=one, step=10) == ["model"]
    with pytest.raises(BadInputError, match="not the checkpoint of step 3"):
        start.begin(path=one, step=3)
    with pytest.raises(BadInputError, match="is a file, which has no step 3"):
        start.begin(path=saved(tmp_path, linear().state_dict()), step=3)
