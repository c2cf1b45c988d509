"""Checkpoints on an SFTP server: no object store, one connection, folders, files that grow while they are written."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sftp_lab import Sftp, running_sftp
from waiting import LIMIT_SECONDS, wait_for
from writing_lab import Memory, client_of, committed, finish, name_of, order

from overnight.core.errors import FencedError
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.pins import PinWatch, pin
from overnight.trainer.checkpoint.place import Place, Token, open_place
from overnight.trainer.checkpoint.reading.finding import open_newest
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import mark, sweep


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sftp]:
    (tmp_path / "served").mkdir()
    with running_sftp(tmp_path / "served") as running:
        yield running


@pytest.fixture
def place(server: Sftp) -> Place:
    return open_place(f"{server.url}/trial/checkpoints")


@pytest.fixture
def memory() -> Memory:
    return Memory({name: torch.randn(1 << 18) for name in "abc"})


def change(memory: Memory) -> None:
    for piece in memory.pieces:
        memory.bytes[piece.offset] ^= 1


def test_what_is_committed_is_read_back(place: Place, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path, retention=Retention(keep=1)) as client:
        assert finish(client, client.submit(order(1, 5, memory), memory)).committed
        change(memory)
        assert finish(client, client.submit(order(2, 6, memory), memory)).committed
        wait_for(lambda: committed(place) == ["step-6.attempt-1.1"], "the older one is deleted")
    assert list((tmp_path / "staging").iterdir()) == [] and place.unfinished() == {}
    restored = open_newest(place)
    assert restored is not None and restored.manifest.step == 6
    assert len(restored.manifest.files["__0_0.distcp"].segments) > 3, "it was read in parallel"


def test_many_threads_ask_one_connection(place: Place) -> None:
    for number in range(8):
        place.write(f"folder/{number}", bytes([number]) * 200_000)
    errors: list[BaseException] = []

    def read(number: int) -> None:
        try:
            for _ in range(10):
                assert place.read(f"folder/{number}") == bytes([number]) * 200_000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_a_connection_that_is_lost_is_made_anew(server: Sftp, place: Place, tmp_path: Path) -> None:
    memory = Memory({"w": torch.randn(1000)})
    with client_of(place, tmp_path) as client:
        for number in (1, 2):
            change(memory)
            ticket = finish(client, client.submit(order(number, number, memory), memory))
            assert ticket.committed and ticket.num_tries == 1
            server.drop()
    assert committed(place) == ["step-1.attempt-1.1", "step-2.attempt-1.1"], "the reader's was dropped too"


def test_fences_pins_and_the_janitor_work_there_too(place: Place, tmp_path: Path) -> None:
    memory = Memory({"w": torch.randn(1000)})
    with client_of(place, tmp_path) as client:
        for number in (1, 2):
            change(memory)
            assert finish(client, client.submit(order(number, number, memory), memory)).committed
        place.write("step-3.attempt-1.1/__0_0.distcp", b"half of a save")
        claim(place, Token(2), name_of(1))
        change(memory)
        assert isinstance(finish(client, client.submit(order(3, 4, memory), memory)).error, FencedError)
    with client_of(place, tmp_path, Token(2), claims=False, parent=name_of(1)) as client:
        assert finish(client, client.submit(order(1, 3, memory), memory)).committed
    watch = PinWatch()
    with pin(place, name_of(1), "evaluation"):
        found = survey(place, watch)
        gone = {deletion.entry for deletion in sweep(found, mark(found, at_rest=True), watch)}
    assert gone >= {"step-2.attempt-1.1", "step-3.attempt-1.1"}
    assert committed(place) == ["step-1.attempt-1.1", "step-3.attempt-2.1"] and place.unfinished() == {}
