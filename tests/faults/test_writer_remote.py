"""C6 and bytes that arrive altered: the writer killed and stopped while it uploads, a store that damages, a full disk.

The rank lives on all the while. A save is published whole or not at all, the next one works, and nothing stays behind.
"""

import contextlib
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from store_lab import Store
from waiting import wait_for
from writing_lab import Memory, client_of, committed, finish, is_gone, name_of, order, small_disk, strikes

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.multipart import uploads_below
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.writing.client import Ticket, WriterClient

NUMBERS = itertools.count()
KILLS = [
    "writing.upload:verify",
    "writing.destination:RemoteDestination.add",
    "writing.destination:RemoteDestination.clean",
]
STOPS = ["writing.upload:_deliver", "writing.destination:RemoteDestination.publish"]
FILES = ["__0_0.distcp", "state-0.json", "index.json", "manifest.json"]


def new_place(store: Store) -> RemotePlace:
    return store.place(f"writer-{next(NUMBERS)}/checkpoints")


@pytest.fixture
def memory() -> Memory:
    return Memory({"w": torch.randn(1000, 7), "b": torch.ones(3, dtype=torch.bfloat16)})


def save(client: WriterClient, memory: Memory, number: int) -> Ticket:
    memory.bytes[number] ^= 1
    return finish(client, client.submit(order(number, number, memory), memory))


def assert_clean(place: RemotePlace, staging: Path, *steps: int) -> None:
    """The newest is good to the last byte, and neither store nor staging hold anything that belongs to no save."""
    names = [str(name_of(step)) for step in steps]
    assert committed(place) == names and place.entries() == ["fence-1.1.json", *names]
    found = newest_good(place)
    assert found is not None and found[0] == name_of(steps[-1])
    assert uploads_below(place.files, place.full("")) == []
    assert list(staging.iterdir()) == []


def is_put(file: str, method: str, path: str) -> bool:
    return method == "PUT" and path.endswith(f".1/{file}")


@pytest.mark.parametrize("point", KILLS)
def test_killed_while_it_uploads_it_is_redone(store: Store, memory: Memory, tmp_path: Path, point: str) -> None:
    place = new_place(store)
    with client_of(place, tmp_path, arguments=strikes(point, 1, "kill", tmp_path / "mark")) as client:
        first = client.pid
        ticket = save(client, memory, 1)
        assert ticket.committed and ticket.num_tries == 2, ticket.error
        assert first is not None and is_gone(first), "no zombie"
        assert_clean(place, tmp_path / "staging", 1)
        assert save(client, memory, 2).committed
    assert_clean(place, tmp_path / "staging", 1, 2)


def test_killed_when_its_manifest_has_arrived_damaged_it_is_redone(
    store: Store, memory: Memory, tmp_path: Path
) -> None:
    place, mark = new_place(store), tmp_path / "mark"
    store.tampering = lambda method, path: is_put("manifest.json", method, path) and not mark.exists()
    arguments = strikes("writing.upload:ArrivedDamagedError.__init__", 1, "kill", mark)
    with client_of(place, tmp_path, arguments=arguments) as client:
        ticket = save(client, memory, 1)
        assert ticket.committed and ticket.num_tries == 2, ticket.error
    assert_clean(place, tmp_path / "staging", 1)


def test_stopped_while_it_uploads_it_is_replaced(store: Store, memory: Memory, tmp_path: Path) -> None:
    """At both points at once, each in a place of its own: the time goes by in waiting for signs of life."""
    folders = [tmp_path / str(number) for number in range(len(STOPS))]
    places = [new_place(store) for _ in STOPS]
    with contextlib.ExitStack() as stack:
        clients = []
        for point, place, folder in zip(STOPS, places, folders, strict=True):
            folder.mkdir()
            arguments = strikes(point, 1, "stop", folder / "mark")
            clients.append(stack.enter_context(client_of(place, folder, arguments=arguments, stall_seconds=2.0)))
        tickets = [client.submit(order(1, 1, memory), memory) for client in clients]
        wait_for(lambda: [client.poll() for client in clients] and all(ticket.done for ticket in tickets), "all saves")
        assert [(ticket.error, ticket.num_tries) for ticket in tickets] == [(None, 2)] * len(STOPS)
    for place, folder in zip(places, folders, strict=True):
        assert_clean(place, folder / "staging", 1)


def test_what_is_altered_on_its_way_is_sent_again(store: Store, memory: Memory, tmp_path: Path) -> None:
    place, altered = new_place(store), set[str]()

    def once(method: str, path: str) -> bool:
        file = path.rpartition("/")[2]
        if method != "PUT" or "/step-" not in path or file in altered:
            return False
        altered.add(file)
        return True

    store.tampering = once
    with client_of(place, tmp_path) as client:
        ticket = save(client, memory, 1)
        assert ticket.committed and ticket.num_tries == 1, ticket.error
    assert altered == {*FILES, ".metadata", "rank-0.json"}
    assert_clean(place, tmp_path / "staging", 1)


def test_what_never_arrives_whole_is_never_published(store: Store, memory: Memory, tmp_path: Path) -> None:
    place = new_place(store)
    with client_of(place, tmp_path, retry_seconds=1.5) as client:
        assert save(client, memory, 1).committed
        for number, file in enumerate(FILES, 2):
            store.tampering = partial(is_put, file)
            before = sum(is_put(file, *request) for request in store.requests)
            ticket = save(client, memory, number)
            assert isinstance(ticket.error, SaveFailedError) and not ticket.committed
            assert f"{name_of(number)} was not saved" in ticket.error.message and file in ticket.error.message
            assert sum(is_put(file, *request) for request in store.requests) - before >= 2, "it was sent again"
            assert committed(place) == [str(name_of(1))] and list((tmp_path / "staging").iterdir()) == []
        store.tampering = lambda method, path: False
        assert save(client, memory, 9).committed
        wait_for(lambda: not place.unfinished(), "the writer has removed what it did not publish")
    assert_clean(place, tmp_path / "staging", 1, 9)


def test_a_staging_disk_that_is_full(store: Store, tmp_path: Path) -> None:
    place, memory = new_place(store), Memory({"w": torch.randn(1 << 18)})
    with small_disk(tmp_path / "disk", "4m"), client_of(place, tmp_path / "disk") as client:
        assert save(client, memory, 1).committed
        ballast = tmp_path / "disk" / "ballast"
        ballast.write_bytes(bytes(7 << 19))
        ticket = save(client, memory, 2)
        assert isinstance(ticket.error, SaveFailedError) and "No space left on device" in ticket.error.message
        assert list((tmp_path / "disk" / "staging").iterdir()) == [] and committed(place) == [str(name_of(1))]
        ballast.unlink()
        assert save(client, memory, 3).committed
        wait_for(lambda: not place.unfinished(), "the writer has removed what it did not publish")
        assert_clean(place, tmp_path / "disk" / "staging", 1, 3)
