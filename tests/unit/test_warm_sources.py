"""Warm starts from what people have lying about: bare weights beside an average, damaged files, another step's name."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_lab import lay

from overnight.core.errors import (
    BadInputError,
    CheckpointError,
    CorruptCheckpointError,
    NotFoundError,
    OvernightError,
)
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
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


def a_folder(path: Path, *files: str) -> None:
    path.mkdir()
    for file in files:
        (path / file).write_bytes(b"")


class Unknown:
    """Of a script, not of torch."""


NOTHING: list[tuple[Callable[[Path], object], type[OvernightError], str, str]] = [
    (lambda path: None, NotFoundError, "cannot begin from {}: there is nothing", "{}/.. exists."),
    (lambda path: path.symlink_to("gone.pt"), NotFoundError, "{}: it is a link to gone.pt, which is not", "itself"),
    (os.mkfifo, BadInputError, "cannot begin from {}: it is neither a file nor a folder", "Give a torch.save"),
    (a_folder, NotFoundError, "looked for step-… folders in {}: there is none, and nothing else", "saved one already"),
    (lambda path: a_folder(path, "notes"), NotFoundError, "in {}: there is none; it holds notes", "saved one already"),
    (lambda path: a_folder(path, "a.pt"), NotFoundError, "in {}: there is none; it holds a.pt", "like {}/a.pt"),
    (lambda path: (path / "checkpoints").mkdir(parents=True), NotFoundError, "in {}: there is none", "{}/checkpoints."),
    (lambda path: claim(LocalPlace(path), Token(1), None), NotFoundError, "in {}: there is none", "saved one already"),
    (lambda path: path.write_bytes(b""), CorruptCheckpointError, "{} cannot be read: it is empty", "Copy"),
    (lambda path: path.write_text("hello"), CorruptCheckpointError, "{} cannot be read: it is no file of", "must"),
    (lambda path: torch.save(Unknown(), path), CorruptCheckpointError, "{} cannot be read: it needs", "weights_only"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "message", "hint"), NOTHING)
def test_what_is_not_there_is_told_in_one_line_with_the_place(
    tmp_path: Path, make: Callable[[Path], object], kind: type[OvernightError], message: str, hint: str
) -> None:
    path = tmp_path / "folder" / "weights"
    path.parent.mkdir()
    make(path)
    with pytest.raises(kind) as raised:
        warm(tmp_path, model=linear()).begin(path=path)
    assert message.format(path) in raised.value.message
    assert hint.format(path).replace(f"{path}/..", str(path.parent)) in raised.value.hint
    assert not any("\n" in text or "\x1b" in text for text in (raised.value.message, raised.value.hint))


@pytest.mark.parametrize("path", ["", "  ", "x" * 300, "a\0b"])
def test_what_is_no_path_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(BadInputError, match="warm start"):
        warm(tmp_path, model=linear()).begin(path=path)


def test_no_trial_beside_this_one_and_one_that_has_saved_nothing(tmp_path: Path) -> None:
    start = warm(tmp_path, model=linear())
    with pytest.raises(NotFoundError, match="there is no trial digits-7"):
        start.begin(from_trial="digits-7")
    (tmp_path / "trials" / "id-7" / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "trials" / "id-7" / "attempts" / "0001" / "order.json").write_text('{"trial_name": "digits-7"}')
    with pytest.raises(NotFoundError, match=r"digits-7 has saved no checkpoint yet: there is no folder .*id-7"):
        start.begin(from_trial="digits-7")


def test_a_home_folder_and_file_urls_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = saved(tmp_path, linear(0.5).state_dict())
    for path in ("~/weights.pt", file.as_uri()):
        assert warm(tmp_path, model=linear()).begin(path=path) == ["model"]


def test_a_damaged_checkpoint_is_named_with_its_folder(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "checkpoints")
    folder = place.path(lay(place, 10, [{"model": linear(0.5).state_dict()}]))
    (folder / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{folder} is damaged: manifest.json"):
        warm(tmp_path, model=linear()).begin(path=folder)


def test_a_checkpoint_copied_under_a_name_of_its_own_and_a_step_that_two_folders_claim(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "checkpoints")
    folder = place.path(lay(place, 10, [{"model": linear(0.5).state_dict()}]))
    folder.rename(tmp_path / "mine")
    model = linear()
    assert warm(tmp_path, model=model).begin(path=tmp_path / "mine", step=10) == ["model"]
    with pytest.raises(BadInputError, match="not the checkpoint of step 3"):
        warm(tmp_path, model=model).begin(path=tmp_path / "mine", step=3)
    lay(place, 10, [{"model": linear(0.25).state_dict()}])
    (tmp_path / "mine").rename(place.path(CheckpointName(10, Token(2))))
    assert warm(tmp_path, model=model).begin(path=place.root, step=10) == ["model"]
    assert torch.equal(model.weight, linear(0.25).weight)
