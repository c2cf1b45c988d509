"""Reading from a store behind fsspec: parallel ranges, damage told from absence of an answer, newest good one first."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_lab import lay

from overnight import trainer
from overnight.core.errors import CorruptCheckpointError, NoUsableCheckpointError, UnavailableError
from overnight.trainer.checkpoint.place import LocalPlace, Place, open_place
from overnight.trainer.checkpoint.reading.finding import newest_good, open_newest
from overnight.trainer.checkpoint.reading.inspection import inspect
from overnight.trainer.checkpoint.reading.source import PlaceSource
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.retry import Patience

URL = "memory://bucket/Prüfung/checkpoints"
BIG = torch.arange(9 << 20, dtype=torch.float32)
HURRY = Patience(seconds=0.2, first_pause_seconds=0.001)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[RemotePlace]:
    """Steps 10 and 20, laid out locally and copied into the store."""
    local = LocalPlace(tmp_path / "checkpoints")
    for step in (10, 20):
        lay(local, step, [{"model": {"big": BIG + step, "n": torch.tensor(step)}}])
    files = fsspec.filesystem("memory")
    files.put(str(local.root), "/bucket/Prüfung/", recursive=True)
    yield RemotePlace(URL, files, "/bucket/Prüfung/checkpoints", HURRY)
    files.rm("/bucket", recursive=True)


def path_of(file: str, step: int = 20) -> str:
    return f"/bucket/Prüfung/checkpoints/step-{step}.attempt-1.1/{file}"


def test_the_newest_comes_back_in_one_pass(place: RemotePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    threads: set[int] = set()
    real = place.read_range

    def read_range(path: str, offset: int, length: int) -> bytes:
        asked.append((path, length))
        threads.add(threading.get_ident())
        return real(path, offset, length)

    monkeypatch.setattr(place, "read_range", read_range)
    restored = open_newest(place)
    assert restored is not None and restored.manifest.step == 20
    state = restored.state("model")
    assert torch.equal(state["big"], BIG + 20) and state["n"] == 20
    data = sum(length for path, length in asked if path.endswith(".distcp"))
    assert data == restored.manifest.files["__0_0.distcp"].size, "each byte was asked for once"
    assert len(threads) > 1
    assert isinstance(open_place(URL), Place) and newest_good(URL) is not None


@pytest.mark.parametrize("file", ["__0_0.distcp", "index.json", "state-0.json", "manifest.json", ".metadata"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_named_and_the_one_before_is_used(place: RemotePlace, file: str, damage: str) -> None:
    whole = place.files.cat_file(path_of(file))
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    place.files.pipe_file(path_of(file), flipped if damage == "flip" else whole[:-1])
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.step == 10
    assert len(said) == 1 and file in said[0]


def test_an_object_that_is_gone_is_damage(place: RemotePlace) -> None:
    place.files.rm_file(path_of("__0_0.distcp"))
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.step == 10 and "__0_0.distcp" in said[0]
    place.files.rm_file(path_of("__0_0.distcp", 10))
    with pytest.raises(NoUsableCheckpointError, match=r"step-20.*step-10"):
        open_newest(place, complaints=said.append)


class Cable:
    """Between us and the store; fails for a while."""

    def __init__(self, files: Any, failures: int, of: str) -> None:
        self._files = files
        self.left = failures
        self._of = of

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._files, name)
        if name not in ("cat_file", "ls", "info"):
            return real

        def request(path: str, *args: Any, **kwargs: Any) -> Any:
            if self._of in path and self.left > 0:
                self.left -= 1
                raise ConnectionResetError("the cable is cut")
            return real(path, *args, **kwargs)

        return request


@pytest.mark.parametrize("of", ["fence", "manifest", "distcp", "checkpoints"])
def test_a_bad_moment_is_waited_for(place: RemotePlace, of: str) -> None:
    """C17."""
    place.files = Cable(place.files, 3, of)
    said: list[str] = []
    restored = open_newest(place, complaints=said.append)
    assert restored is not None and restored.manifest.step == 20 and not said
    assert place.files.left == 0


@pytest.mark.parametrize("of", ["fence", "manifest", "distcp", "checkpoints"])
def test_a_store_that_does_not_answer_is_no_reason_to_go_back(place: RemotePlace, of: str) -> None:
    place.files = Cable(place.files, 1_000_000, of)
    with pytest.raises(UnavailableError, match="the cable is cut"):
        open_newest(place)


def test_one_checkpoint_by_its_url(place: RemotePlace, tmp_path: Path) -> None:
    facts = inspect(f"{URL}/step-10.attempt-1.1")
    assert facts["step"] == 10 and facts["good"] and facts["objects"]["model"] > BIG.numel() * 4
    assert trainer.export(URL, tmp_path / "m.safetensors")["step"] == 20


def test_shorter_answers_than_asked_for(place: RemotePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    name = place.checkpoints()[-1]
    monkeypatch.setattr(place, "read_range", lambda path, offset, length: b"x")
    with pytest.raises(CorruptCheckpointError, match="ends at byte 11"):
        PlaceSource(place, name).read("__0_0.distcp", 10, 100, [])
