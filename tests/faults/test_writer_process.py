"""The writer process killed and stopped at every stage, full disks, folders that vanish, zombies that come late.

Whatever happens, a save either commits whole or fails with a clear error; nothing is half published, and the next save
works.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from waiting import wait_for
from writing_lab import Memory, client_of, committed, finish, is_gone, name_of, order, small_disk, state_of, strikes
from writing_strike import ALWAYS

from overnight.core.errors import FencedError, SaveFailedError
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.manifest import load_manifest, verify
from overnight.trainer.checkpoint.place import LocalPlace, Token
from overnight.trainer.checkpoint.writing.client import Ticket, WriterClient

POINTS = [
    ("writing.process:Server._save", 1),
    ("writing.save:hash_piece", 2),
    ("os:pwrite", 2),
    ("os:fsync", 2),
    ("writing.save:write_atomic", 1),
    ("writing.process:Server._release", 1),
    ("writing.dcp:Metadata.of", 1),
    ("writing.destination:LocalDestination.publish", 1),
    ("writing.destination:refuse_stale", 1),
    ("writing.destination:LocalDestination.clean", 1),
    ("writing.save:History.committed", 1),
    ("writing.process:Server._tell", 1),
    ("writing.process:Server._tidy", 1),
]


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "checkpoints")


@pytest.fixture
def memory() -> Memory:
    return Memory({"w": torch.randn(1 << 18), "small": torch.arange(10.0), "b": torch.zeros(0)})


def assert_as_saved(place: LocalPlace, step: int, memory: Memory) -> None:
    folder = place.path(name_of(step))
    manifest = verify(folder)
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "manifest.json"}
    data = (folder / "__0_0.distcp").read_bytes()
    assert bytes(memory.bytes[: memory.pieces[0].num_bytes]) in data


def save(client: WriterClient, memory: Memory, number: int) -> Ticket:
    return finish(client, client.submit(order(number, number, memory), memory))


@pytest.mark.parametrize(("point", "number"), POINTS, ids=str)
def test_killed_at_any_stage_it_is_redone(
    place: LocalPlace, memory: Memory, tmp_path: Path, point: str, number: int
) -> None:
    """C6."""
    mark = tmp_path / "mark"
    with client_of(place, tmp_path, arguments=strikes(point, number, "kill", mark)) as client:
        first = client.pid
        ticket = save(client, memory, 1)
        assert ticket.committed and ticket.published is not None, ticket.error
        wait_for(mark.exists, "the strike")
        wait_for(lambda: (client.poll(), client.pid != first)[1], "its end to be noticed")
        assert first is not None and is_gone(first), "no zombie"
        assert_as_saved(place, 1, memory)
        memory.bytes[0] ^= 1
        assert save(client, memory, 2).committed
    assert_as_saved(place, 2, memory)
    assert [entry for entry in place.entries() if "partial" in entry] == []


@pytest.mark.parametrize(("point", "number"), POINTS[2:-2:4], ids=str)
def test_stopped_at_any_stage_it_is_replaced(
    place: LocalPlace, memory: Memory, tmp_path: Path, point: str, number: int
) -> None:
    """C6."""
    mark = tmp_path / "mark"
    arguments = strikes(point, number, "stop", mark)
    with client_of(place, tmp_path, arguments=arguments, stall_seconds=3.0) as client:
        first = client.pid
        ticket = save(client, memory, 1)
        assert ticket.committed and ticket.num_tries == 2
        assert first is not None and is_gone(first)
        assert_as_saved(place, 1, memory)
        assert save(client, memory, 2).committed


def test_killed_again_and_again_the_save_fails_within_bounds_and_the_next_works(
    place: LocalPlace, memory: Memory, tmp_path: Path
) -> None:
    with client_of(place, tmp_path) as client:
        assert save(client, memory, 1).committed
    claim(place, Token(1, 2), name_of(1))
    bad = strikes("writing.save:write_tensors", 1, "kill", ALWAYS)
    with client_of(place, tmp_path, Token(1, 2), claims=False, parent=name_of(1), arguments=bad) as client:
        ticket = save(client, memory, 2)
        assert isinstance(ticket.error, SaveFailedError) and ticket.num_tries == 3
    assert committed(place) == ["step-1.attempt-1.1"]
    claim(place, Token(1, 3), name_of(1))
    with client_of(place, tmp_path, Token(1, 3), claims=False, parent=name_of(1)) as client:
        assert save(client, memory, 3).committed


@pytest.mark.parametrize(
    ("point", "number", "error"),
    [
        ("os:pwrite", 1, "ENOSPC"),
        ("os:fsync", 1, "EIO"),
        ("os:fsync", 3, "EDQUOT"),
        ("writing.destination:sync_directory", 1, "EACCES"),
    ],
    ids=str,
)
def test_whatever_the_file_system_refuses_fails_the_save_and_only_it(
    place: LocalPlace, memory: Memory, tmp_path: Path, point: str, number: int, error: str
) -> None:
    with client_of(place, tmp_path, arguments=strikes(point, number, error, tmp_path / "mark")) as client:
        ticket = save(client, memory, 1)
        assert isinstance(ticket.error, SaveFailedError) and not ticket.committed and ticket.num_tries == 1
        assert "step-1.attempt-1.1 was not saved" in ticket.error.message and ticket.error.hint
        assert committed(place) == []
        assert save(client, memory, 2).committed
    assert_as_saved(place, 2, memory)
    assert [entry for entry in place.entries() if "partial" in entry] == []


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    memory = Memory({"w": torch.randn(3 << 20)})
    with small_disk(tmp_path / "disk", "40m"):
        place = LocalPlace(tmp_path / "disk" / "checkpoints")
        with client_of(place, tmp_path) as client:
            assert save(client, memory, 1).committed
            ballast = tmp_path / "disk" / "ballast"
            ballast.write_bytes(bytes(20 << 20))
            for number in (2, 3):
                memory.bytes[number] ^= 1
                ticket = save(client, memory, number)
                assert ticket.error is not None and "No space left on device" in ticket.error.message
            assert committed(place) == ["step-1.attempt-1.1"]
            verify(place.path(name_of(1)))
            free = os.statvfs(place.root)
            assert free.f_bavail * free.f_bsize > 5 << 20, "the failed saves gave their space back"
            ballast.unlink()
            assert save(client, memory, 4).committed
        assert_as_saved(place, 4, memory)


def test_a_disk_that_becomes_read_only(tmp_path: Path, memory: Memory) -> None:
    with small_disk(tmp_path / "disk", "60m"):
        place = LocalPlace(tmp_path / "disk" / "checkpoints")
        with client_of(place, tmp_path) as client:
            assert save(client, memory, 1).committed
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
            memory.bytes[0] ^= 1
            ticket = save(client, memory, 2)
            assert ticket.error is not None and "Read-only file system" in ticket.error.message
            subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "disk")], check=True)
            assert save(client, memory, 3).committed
        assert_as_saved(place, 3, memory)


def test_a_file_size_limit_fails_the_save(place: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({"w": torch.randn(1 << 20)})
    with client_of(place, tmp_path) as client:
        subprocess.run(["prlimit", "--pid", str(client.pid), "--fsize=1000000:unlimited"], check=True)
        ticket = save(client, memory, 1)
        assert ticket.error is not None and "File too large" in ticket.error.message
        subprocess.run(["prlimit", "--pid", str(client.pid), "--fsize=unlimited:unlimited"], check=True)
        assert save(client, memory, 2).committed


def test_a_destination_that_goes_and_comes_back(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        assert save(client, memory, 1).committed
        place.root.rename(tmp_path / "away")
        memory.bytes[0] ^= 1
        ticket = save(client, memory, 2)
        assert ticket.error is not None and "does not hold the fence" in ticket.error.message
        assert not place.root.exists(), "nothing is written below a mount point that lost its disk"
        (tmp_path / "away").rename(place.root)
        assert save(client, memory, 3).committed
    assert committed(place) == ["step-1.attempt-1.1", "step-3.attempt-1.1"]


def test_a_place_without_permission(memory: Memory, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with client_of(str(blocked / "place"), tmp_path) as client:
        ticket = save(client, memory, 1)
        assert ticket.error is not None and "Not a directory" in ticket.error.message


@pytest.mark.parametrize(
    "point", ["writing.save:write_tensors", "writing.destination:LocalDestination.publish"], ids=str
)
def test_a_zombie_that_wakes_up_late_publishes_nothing(
    place: LocalPlace, memory: Memory, tmp_path: Path, point: str
) -> None:
    with client_of(place, tmp_path) as client:
        assert save(client, memory, 1).committed
    zombie_token, heir = Token(2), Token(3)
    arguments = strikes(point, 1, "stop", tmp_path / "mark")
    with client_of(place, tmp_path, zombie_token, parent=name_of(1), arguments=arguments) as zombie:
        pid = zombie.pid or 0
        ticket = zombie.submit(order(1, 5, memory), memory)
        wait_for(lambda: state_of(pid) == "T", "the zombie to stop")
        with client_of(place, tmp_path, heir, parent=name_of(1)) as client:
            assert save(client, memory, 2).committed
            os.kill(pid, signal.SIGCONT)
            assert isinstance(finish(zombie, ticket).error, FencedError)
            assert save(client, memory, 3).committed
    assert committed(place) == ["step-1.attempt-1.1", "step-2.attempt-3.1", "step-3.attempt-3.1"]
    for name in place.checkpoints():
        verify(place.path(name))


def test_a_rank_killed_while_another_waits_costs_a_time_out(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    options = {"world_size": 2, "timeout_seconds": 3.0}
    slow = strikes("writing.save:write_tensors", 1, "stop", tmp_path / "mark")
    with (
        client_of(place, tmp_path / "0", rank=0, **options) as first,
        client_of(place, tmp_path / "1", rank=1, arguments=slow, **options) as second,
    ):
        tickets = [c.submit(order(1, 1, memory), memory) for c in (first, second)]
        ticket = finish(first, tickets[0])
        assert ticket.error is not None and "waited 3 s" in ticket.error.message
        os.kill(second.pid or 0, signal.SIGKILL)
        other = finish(second, tickets[1])
        assert other.error is not None and "rank 0 gave up" in other.error.message
        tickets = [c.submit(order(2, 2, memory), memory) for c in (first, second)]
        assert [finish(c, t).committed for c, t in zip((first, second), tickets, strict=True)] == [True, True]
    assert committed(place) == ["step-2.attempt-1.1"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("point", "number"),
    [("writing.save:divide", 1), ("writing.save:write_atomic", 1), ("writing.process:Server._release", 1)],
    ids=str,
)
def test_a_writer_killed_in_a_gang_is_redone(
    place: LocalPlace, memory: Memory, tmp_path: Path, rank: int, point: str, number: int
) -> None:
    arguments = [None, None]
    arguments[rank] = strikes(point, number, "kill", tmp_path / "mark")  # type: ignore[call-overload]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(client_of(place, tmp_path / str(r), rank=r, world_size=2, arguments=arguments[r]))
            for r in range(2)
        ]
        tickets = [client.submit(order(1, 1, memory), memory) for client in clients]
        wait_for(lambda: [client.poll() for client in clients] and all(t.done for t in tickets), "both ranks")
        assert [ticket.error for ticket in tickets] == [None, None] and tickets[rank].num_tries == 2
    verify(place.path(name_of(1)))


def test_rank_one_killed_after_rank_zero_has_published(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    arguments = strikes("writing.save:Save._await", 1, "stop", tmp_path / "mark")
    with (
        client_of(place, tmp_path / "0", rank=0, world_size=2) as first,
        client_of(place, tmp_path / "1", rank=1, world_size=2, arguments=arguments) as second,
    ):
        tickets = [c.submit(order(1, 1, memory), memory) for c in (first, second)]
        assert finish(first, tickets[0]).committed
        os.kill(second.pid or 0, signal.SIGKILL)
        other = finish(second, tickets[1])
        assert other.committed and other.num_tries == 2
    assert load_manifest(place, name_of(1)).world_size == 2
    shutil.rmtree(place.root)
