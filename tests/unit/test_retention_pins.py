"""Pins: they hold as long as their holder lives, and no clock of another machine decides about it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from place_lab import lay, steps

from overnight.core.errors import CheckpointError, NotFoundError
from overnight.trainer.checkpoint import pins
from overnight.trainer.checkpoint.pins import STALE_SECONDS, PinWatch, pin, read_pins
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace
from overnight.trainer.checkpoint.remote import open_remote
from overnight.trainer.checkpoint.trash import discard

HOLDER = """
import sys, time
from pathlib import Path
from overnight.trainer.checkpoint.pins import pin
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace
with pin(LocalPlace(Path(sys.argv[1])), CheckpointName.parse(sys.argv[2]), "evaluation"):
    print("pinned", flush=True)
    time.sleep(60)
"""


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "plätze")


@pytest.fixture
def name(place: LocalPlace) -> CheckpointName:
    return lay(place, 10)


def from_elsewhere(place: LocalPlace, name: CheckpointName, beat: int = 0) -> Path:
    """A pin as another machine writes it, its clock years ahead."""
    path = place.root / f".pin-{name}.0123456789ab.json"
    process = {"pid": 1, "start": 1, "machine": "another boot"}
    path.write_text(json.dumps({"checkpoint": str(name), "holder": "far away", "beat": beat, "process": process}))
    os.utime(path, (2e9, 2e9))
    return path


def test_a_pin_ends_with_its_context(place: LocalPlace, name: CheckpointName) -> None:
    with pytest.raises(RuntimeError), pin(place, name, "evaluation of [red]x"):
        assert PinWatch().living(place) == {name: "evaluation of [red]x"}
        raise RuntimeError
    assert read_pins(place) == []


def test_a_dead_holder_on_this_machine_is_stale_at_once(place: LocalPlace, name: CheckpointName) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place.root), str(name)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "pinned\n"
        assert PinWatch().living(place) == {name: "evaluation"}
        holder.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # a zombie is dead too
        assert PinWatch().living(place) == {}
    finally:
        holder.kill()
        holder.communicate()
    assert len(PinWatch().clear(place)) == 1
    assert read_pins(place) == []


def test_a_pin_from_elsewhere_is_stale_only_for_who_watched_it_long(place: LocalPlace, name: CheckpointName) -> None:
    path = from_elsewhere(place, name)
    clock = Ticks()
    watch = PinWatch(clock)
    assert watch.living(place) == {name: "far away"}
    clock.now = STALE_SECONDS - 1
    assert watch.living(place) == {name: "far away"}
    from_elsewhere(place, name, beat=1)
    clock.now = 2 * STALE_SECONDS
    assert watch.living(place) == {name: "far away"}
    assert PinWatch(clock).living(place) == {name: "far away"}
    clock.now = 3 * STALE_SECONDS
    assert PinWatch(clock).living(place) == {name: "far away"}
    assert watch.living(place) == {}
    assert watch.clear(place) == [path.name]
    assert not path.exists()


def test_a_holder_beats(place: LocalPlace, name: CheckpointName) -> None:
    with pin(place, name, "evaluation", beat_seconds=0.01):
        first = read_pins(place)[0].content
        deadline = time.monotonic() + 10
        while read_pins(place)[0].content == first:
            assert time.monotonic() < deadline, "no beat came"
    assert read_pins(place) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"process": 3}'])
def test_a_pin_that_cannot_be_read_counts_until_it_was_watched(
    place: LocalPlace, name: CheckpointName, content: bytes
) -> None:
    (place.root / f".pin-{name}.0123456789ab.json").write_bytes(content)
    clock = Ticks()
    watch = PinWatch(clock)
    assert list(watch.living(place)) == [name]
    clock.now = STALE_SECONDS
    assert watch.living(place) == {}


def test_what_is_gone_cannot_be_pinned(
    place: LocalPlace, name: CheckpointName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "REAPPEAR_SECONDS", 0.05)
    with pytest.raises(NotFoundError, match="step-99"), pin(place, CheckpointName(99, name.token), "x"):
        pytest.fail("pinned")
    assert read_pins(place) == []


def test_a_place_that_takes_no_pins_says_so(place: LocalPlace, name: CheckpointName) -> None:
    place.root.rename(place.root.with_name("moved"))
    place.root.write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be pinned"), pin(place, name, "x"):
        pytest.fail("pinned")


@pytest.mark.parametrize("remote", [False, True])
def test_pinning_and_deleting_never_both_succeed(
    place: LocalPlace, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times at the same moment: either it is gone and the reader is told, or the reader has it until it ends."""
    monkeypatch.setattr(pins, "REAPPEAR_SECONDS", 0.05)
    watch, seen = PinWatch(), open_remote(f"local://{place.root}") if remote else place
    for number in range(40):
        name = lay(place, 100 + number)
        ready = threading.Barrier(2)
        told: list[str] = []

        def read(name: CheckpointName = name, ready: threading.Barrier = ready, told: list[str] = told) -> None:
            ready.wait()
            try:
                with pin(seen, name, "reader"):
                    told.append((place.path(name) / "data").read_text())
            except NotFoundError:
                told.append("gone")

        reader = threading.Thread(target=read)
        reader.start()
        ready.wait()
        if number % 2:
            time.sleep(0.0001 * (number % 7))
        deleted = discard(seen, str(name), lambda name=name: name in watch.living(seen))
        reader.join()
        assert told in (["x" * 8], ["gone"])
        assert deleted != ((1, 100 + number) in steps(place))
