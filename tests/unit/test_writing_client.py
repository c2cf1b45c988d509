"""The writer process under ordinary conditions: what it commits, what it costs, how it starts and ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from waiting import wait_for
from writing_lab import (
    Memory,
    client_of,
    committed,
    descriptors,
    finish,
    is_gone,
    name_of,
    order,
    raw,
    run_rank,
    state_of,
)

from overnight.core.errors import BadInputError, FencedError, SaveFailedError, SetupError
from overnight.trainer.checkpoint.fence import claim, read_fences
from overnight.trainer.checkpoint.index import INDEX, index_from_bytes
from overnight.trainer.checkpoint.manifest import load_manifest, verify
from overnight.trainer.checkpoint.place import LocalPlace, Token, open_place
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.writing.channel import Pulse
from overnight.trainer.checkpoint.writing.client import command
from overnight.trainer.checkpoint.writing.destination import make_destination
from overnight.trainer.checkpoint.writing.order import Author, Piece, SaveOrder
from overnight.trainer.checkpoint.writing.save import History, Save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "größe" / "checkpoints")


@pytest.fixture
def memory() -> Memory:
    return Memory({"w": torch.randn(100, 7), "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0)})


def test_what_is_committed_is_what_lay_in_the_arena(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        ticket = finish(client, client.submit(order(1, 5, memory, metrics={"loss": 0.5}, kind="asked"), memory))
    assert ticket.error is None and ticket.committed and ticket.released and ticket.num_tries == 1
    assert client.poll() == []
    folder = place.path(name_of(5))
    manifest = verify(folder)
    assert (ticket.published, ticket.published_bytes) == (manifest.name, manifest.num_bytes)
    assert manifest.metrics == {"loss": 0.5} and manifest.kind == "asked"
    assert manifest.position == {"at": 5} and manifest.versions == {"torch": "x"}
    assert sorted(path.name for path in folder.iterdir()) == sorted([*manifest.files, "manifest.json"])
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp", INDEX, "state-0.json"]
    assert json.loads((folder / "state-0.json").read_text()) == {"objects": {"it": 5}, "private": []}
    assert sum(ticket.seconds[stage] for stage in ("hashing", "writing", "publishing")) <= ticket.seconds["total"]
    found = {p.key: torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in memory.pieces}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    for piece in memory.pieces:
        assert raw(found[piece.key]) == memory.bytes[piece.offset : piece.offset + piece.num_bytes]


def test_orders_survive_the_wire() -> None:
    pieces = (Piece("ü", "float32", (), 0, 4, (), ()), Piece("x", "int8", (2, 3), 64, 6, None, None, True))
    one = SaveOrder(3, 2, 1, "{}", {"a": [1]}, pieces, "yield", {"m": float("inf")}, {"threads": 2})
    assert SaveOrder.from_bytes(one.to_bytes()) == one and one.num_bytes == 10
    author = Author(token=Token(2, 3), parent=name_of(4), place="0a", rank=1, world_size=2, seed=9)
    assert Author.from_json(json.loads(json.dumps(author.to_json()))) == author


def test_two_saves_at_one_step_are_two_checkpoints(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        first = finish(client, client.submit(order(1, 5, memory), memory))
        memory.bytes[0] ^= 1
        second = finish(client, client.submit(order(2, 5, memory, save=2), memory))
    assert committed(place) == ["step-5.attempt-1.1", "step-5.attempt-1.1.again-2"]
    assert first.published and second.published
    one, other = (verify(place.path(ticket.published)) for ticket in (first, second) if ticket.published)
    assert one.name == name_of(5) and one.content != other.content


def test_the_same_content_at_the_same_step_is_not_written_again(
    place: LocalPlace, memory: Memory, tmp_path: Path
) -> None:
    with client_of(place, tmp_path) as client:
        first = finish(client, client.submit(order(1, 5, memory), memory))
        again = finish(client, client.submit(order(2, 5, memory, save=2, kind="final"), memory))
        assert again.committed and again.published == first.published and again.num_bytes == 0
        later = finish(client, client.submit(order(3, 6, memory), memory))
        assert later.published == name_of(6)
    assert committed(place) == ["step-5.attempt-1.1", "step-6.attempt-1.1"]


def test_orders_wait_in_line_and_old_checkpoints_go(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path, retention=Retention(keep=2)) as client:
        tickets = [client.submit(order(n, n, memory), memory) for n in range(1, 6)]
        assert client.busy and client.wait(tickets[-1], 60)
        assert all(ticket.committed for ticket in tickets) and not client.busy
        assert client.poll() == tickets
    assert committed(place) == ["step-4.attempt-1.1", "step-5.attempt-1.1"]


def test_a_new_arena_is_handed_over(place: LocalPlace, tmp_path: Path) -> None:
    small, large = Memory({"w": torch.ones(2)}, 1), Memory({"w": torch.arange(5000.0)}, 2)
    with client_of(place, tmp_path) as client:
        for number, memory in enumerate((small, large, small), 1):
            ticket = finish(client, client.submit(order(number, number, memory), memory))
            assert ticket.error is None
            dcp_to_torch_save(place.path(name_of(number)), tmp_path / "it.pt")
            expected = memory.bytes[: memory.pieces[0].num_bytes]
            assert raw(torch.load(tmp_path / "it.pt", weights_only=True)["w"]) == expected


def test_frozen_tensors_are_written_once(place: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({"frozen": torch.randn(1 << 20), "w": torch.randn(1000)})
    moving = memory.pieces[1].offset
    with client_of(place, tmp_path, retention=Retention(keep=2)) as client:
        tickets = []
        for number in range(1, 6):
            memory.bytes[moving] = number
            tickets.append(finish(client, client.submit(order(number, number, memory), memory)))
        written = [ticket.num_bytes for ticket in tickets]
        assert all(share < 0.01 * written[0] for share in written[2:]), written
        manifest = verify(place.path(name_of(5)))
        assert manifest.bases == place.bases() and len(manifest.bases) == 1
        dcp_to_torch_save(place.path(name_of(5)), tmp_path / "it.pt")
        found = torch.load(tmp_path / "it.pt", weights_only=True)
        for piece in memory.pieces:
            assert raw(found[piece.key]) == memory.bytes[piece.offset : piece.offset + piece.num_bytes]
        memory.bytes[0] ^= 1  # it was not frozen after all
        for number in (6, 7):
            memory.bytes[moving] = number
            memory.bytes[1] = number
            ticket = finish(client, client.submit(order(number, number, memory), memory))
            assert ticket.published and load_manifest(place, ticket.published).bases == []
    assert place.bases() == [], "nothing mentions the base any more"
    verify(place.path(name_of(7)))


def test_expected_to_be_frozen_is_written_once_from_the_start(place: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({"frozen": torch.randn(1 << 20), "w": torch.randn(1000)})
    pieces = [Piece(p.key, p.dtype, p.shape, p.offset, p.num_bytes, frozen=p.key == "frozen") for p in memory.pieces]
    with client_of(place, tmp_path) as client:
        first = finish(client, client.submit(order(1, 1, memory, pieces=pieces), memory))
        memory.bytes[memory.pieces[1].offset] ^= 1
        second = finish(client, client.submit(order(2, 2, memory, pieces=pieces), memory))
    assert second.num_bytes < 0.02 * first.num_bytes
    with client_of(place, tmp_path, Token(2), parent=name_of(2)) as client:
        third = finish(client, client.submit(order(1, 3, memory), memory))
    assert third.num_bytes < 0.02 * first.num_bytes, "the next attempt knows the bases of the checkpoint it forks from"
    verify(place.path(name_of(3, Token(2))))


def test_a_base_that_is_gone_is_written_again(place: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({"frozen": torch.randn(1 << 20), "w": torch.randn(1000)})
    with client_of(place, tmp_path) as client:
        for number in (1, 2):
            finish(client, client.submit(order(number, number, memory), memory))
        for base in place.bases():
            place.remove(base)
        ticket = finish(client, client.submit(order(3, 3, memory), memory))
    assert ticket.committed
    verify(place.path(name_of(3)))


def test_the_process_knows_neither_torch_nor_numpy(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        finish(client, client.submit(order(1, 1, memory), memory))
        pid = client.pid
        assert pid is not None
        maps = Path(f"/proc/{pid}/maps").read_text()
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert os.getpgid(pid) == os.getpgid(0) and os.getsid(pid) == os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
    assert "torch" not in maps and "numpy" not in maps and resident < 60e6
    names = {"torch", "numpy", "fsspec", "pydantic", "asyncio", "logging"}
    code = f"import overnight.trainer.checkpoint.writing.process, sys; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_it_starts_without_overnight_on_the_path(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    line = command()
    assert line[1:3] == ["-P", "-c"] and Path(line[4]).name == "overnight"
    arguments = [sys.executable, "-P", "-c", line[3].replace("main(sys.argv[2:])", "print(main.__module__)"), line[4]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "overnight.trainer.checkpoint.writing.process"


def test_submitting_and_polling_do_not_wait(place: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({f"layer.{n}": torch.ones(2) for n in range(2000)})
    with client_of(place, tmp_path) as client:
        wait_for(lambda: client.pid is not None and state_of(client.pid) == "S")
        os.kill(client.pid or 0, signal.SIGSTOP)
        timer = threading.Timer(20, os.kill, (client.pid, signal.SIGCONT))
        timer.start()
        ticket = client.submit(order(1, 1, memory), memory)
        assert client.poll() == [] and not ticket.done and not client.wait(ticket, 0.01)
        assert state_of(client.pid or 0) == "T", "nothing waited for the stopped process"
        timer.cancel()
        os.kill(client.pid or 0, signal.SIGCONT)
        assert finish(client, ticket).committed


def test_orders_from_another_thread_survive_it_and_the_process(
    place: LocalPlace, memory: Memory, tmp_path: Path
) -> None:
    with client_of(place, tmp_path) as client:
        os.kill(client.pid or 0, signal.SIGKILL)
        tickets: list[Any] = []

        def submit() -> None:
            wait_for(lambda: (client.poll(), client.pid is None)[1], "the death to be noticed")
            tickets.append(client.submit(order(1, 1, memory), memory))

        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
        assert client.pid is None, "it would have died with that thread"
        assert finish(client, tickets[0]).committed and tickets[0].num_tries == 1


def test_a_thread_that_may_start_no_process_does_not_wait_for_one(
    place: LocalPlace, memory: Memory, tmp_path: Path
) -> None:
    """It would keep the one that may from the client, and from the interpreter too."""
    with client_of(place, tmp_path) as client:
        os.kill(client.pid or 0, signal.SIGSTOP)
        ticket = client.submit(order(1, 1, memory), memory)
        os.kill(client.pid or 0, signal.SIGKILL)
        found: list[tuple[bool, bool]] = []
        thread = threading.Thread(target=lambda: found.append((client.wait(ticket, 600), client.is_down)), daemon=True)
        thread.start()
        thread.join(20)
        assert found == [(False, True)]
        assert finish(client, ticket).committed and not client.is_down


def test_closing_leaves_nothing_behind(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    before = descriptors()
    with client_of(place, tmp_path) as client:
        pid = client.pid or 0
        finish(client, client.submit(order(1, 1, memory), memory))
    client.close()
    assert is_gone(pid) and client.pid is None
    assert descriptors() == before
    with client_of(LocalPlace(tmp_path / "other"), tmp_path) as client:
        pid = client.pid or 0
        wait_for(lambda: state_of(pid) == "S")
        os.kill(pid, signal.SIGSTOP)
        ticket = client.submit(order(1, 1, memory), memory)
    assert is_gone(pid) and ticket.error is not None and "given up" in ticket.error.message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_for_the_rank_do_not_end_it(
    place: LocalPlace, memory: Memory, tmp_path: Path, number: signal.Signals
) -> None:
    with client_of(place, tmp_path) as client:
        finish(client, client.submit(order(1, 1, memory), memory))
        os.kill(client.pid or 0, number)
        ticket = finish(client, client.submit(order(2, 2, memory), memory))
        assert ticket.committed and ticket.num_tries == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_it_dies_with_its_rank(tmp_path: Path, stopped: bool) -> None:
    rank = run_rank([str(tmp_path / "place")])
    assert rank.stdout is not None
    pid, done = rank.stdout.readline().split()
    assert done == "True"
    if stopped:
        os.kill(int(pid), signal.SIGSTOP)
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_for(lambda: state_of(int(pid)) in ("", "Z", "X"), "the writer process to die")


def test_a_process_whose_rank_is_dead_already_leaves(tmp_path: Path) -> None:
    done = subprocess.run([*command(), "98", "99", "1"], timeout=60, check=False)
    assert done.returncode == 0


def test_a_command_that_cannot_start_is_an_error_of_the_save(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path, arguments=["/no/such/program"]) as client:
        ticket = client.submit(order(1, 1, memory), memory)
        assert ticket.error is not None and "no writer process could be started" in ticket.error.message
    with client_of(
        LocalPlace(tmp_path / "2"), tmp_path, arguments=[sys.executable, "-c", "raise SystemExit(3)"]
    ) as client:
        ticket = finish(client, client.submit(order(1, 1, memory), memory))
        assert ticket.error is not None and "ended with code 3, 3 times" in ticket.error.message


def test_places_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no driver knows nonsense://"):
        open_place("nonsense://bucket/x")
    with pytest.raises(SetupError, match="the driver of abfs:// is not installed") as caught:
        open_place("abfs://container/x")
    assert caught.value.hint == 'pip install "adlfs"'
    assert isinstance(open_place(f"file://{tmp_path}/a%20b"), LocalPlace)
    assert str(open_place(f"file://{tmp_path}/a%20b")) == f"{tmp_path}/a b"


def test_a_hundred_thousand_tensors_go_through_the_process(place: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({"w": torch.arange(200_000.0)})
    pieces = [Piece(f"layer.{n}", "float32", (2,), 8 * n, 8) for n in range(100_000)]
    with client_of(place, tmp_path) as client:
        ticket = finish(client, client.submit(order(1, 1, memory, pieces=pieces), memory))
    assert ticket.error is None
    index = index_from_bytes((place.path(name_of(1)) / INDEX).read_bytes())
    data = (place.path(name_of(1)) / "__0_0.distcp").read_bytes()
    for number in range(0, 100_000, 9_999):
        chunk = index[f"layer.{number}"].chunks[0]
        assert data[chunk.offset : chunk.offset + 8] == memory.bytes[8 * number : 8 * number + 8]


def test_manifests_tell_whose_they_are(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        ticket = finish(client, client.submit(order(1, 1, memory), memory))
    assert ticket.published == name_of(1) == load_manifest(place, name_of(1)).name
    place.path(name_of(1)).rename(place.path(name_of(2)))
    with pytest.raises(Exception, match="belongs to"):
        load_manifest(place, name_of(2))


def test_no_growth_over_many_saves(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    def sizes(pid: int) -> tuple[int, int]:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]), len(descriptors(pid))

    with client_of(place, tmp_path) as client:
        seen: list[Any] = []
        for number in range(1, 121):
            memory.bytes[0] = number
            assert finish(client, client.submit(order(number, number, memory), memory)).committed
            if number in (20, 120):
                pid = client.pid or 0
                if seen:  # what a save leaves to tidy, it tidies after its answer
                    wait_for(lambda pid=pid: len(descriptors(pid)) <= seen[0][1], "its descriptors")  # type: ignore[misc]
                seen.append(sizes(pid))
                seen.append(len(descriptors()))
    (pages_before, fds_before), own_before, (pages_after, fds_after), own_after = seen
    assert pages_after - pages_before < 250 and fds_after <= fds_before and own_before == own_after


GONE = "the checkpoint place was deleted or replaced while the run was at work"


def test_a_manifest_names_the_place_in_which_it_was_made(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
    (fence,) = read_fences(place).values()
    assert fence.place and load_manifest(place, name_of(1)).place == fence.place


@pytest.mark.parametrize("num_saves", [0, 1])
def test_a_place_that_is_deleted_fails_saves_and_stays_away(
    place: LocalPlace, memory: Memory, tmp_path: Path, num_saves: int
) -> None:
    with client_of(place, tmp_path) as client:
        for number in range(1, num_saves + 1):
            assert finish(client, client.submit(order(number, number, memory), memory)).committed
        shutil.rmtree(place.root)
        for number in (5, 6):
            error = finish(client, client.submit(order(number, number, memory), memory)).error
            assert isinstance(error, SaveFailedError) and error.message.startswith(f"{GONE}: {place}")
            assert not place.root.exists()


def test_a_place_that_is_replaced_gets_nothing(place: LocalPlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        shutil.rmtree(place.root)
        claim(place, Token(1), None)
        error = finish(client, client.submit(order(1, 1, memory), memory)).error
    assert isinstance(error, SaveFailedError) and error.message.startswith(GONE)
    assert place.entries() == ["fence-1.1.json"]


@pytest.mark.parametrize("deed", ["delete", "replace", "supersede"])
@pytest.mark.parametrize("point", ["_write", "_publish", "_manifest"])
def test_a_place_that_goes_in_the_middle_of_a_save(
    place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, deed: str
) -> None:
    """The last look at the fence is right before the rename."""
    author = Author(token=Token(1), parent=None, place=claim(place, Token(1), None).place)
    original = getattr(Save, point)

    def struck(*arguments: Any) -> Any:
        if deed == "supersede":
            claim(place, Token(2), None)
        else:
            place.root.rename(tmp_path / "away")
        if deed == "replace":
            shutil.copytree(tmp_path / "away", place.root)
            place.fence_path(Token(1)).unlink()
            claim(place, Token(1), None, parent_place="another")
        return original(*arguments)

    monkeypatch.setattr(Save, point, struck)
    memory = Memory({"w": torch.randn(100, 7)})
    destination = make_destination(place, 0, tmp_path / "staging", lambda _: None)
    save = Save(
        order(1, 1, memory), memoryview(memory.bytes), author, destination, History(), Pulse(-1), lambda _: None
    )
    with pytest.raises(FencedError if deed == "supersede" else SaveFailedError) as caught:
        save.run()
    assert deed == "supersede" or caught.value.message.startswith(GONE)
    assert place.root.exists() == (deed != "delete") and committed(place) == []
