"""Checkpoints in a real object store: verified there, published by their manifest, through failures of the store."""

import itertools
from pathlib import Path

import pytest
import torch
from store_lab import BUCKET, Store
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from writing_lab import Memory, client_of, committed, finish, name_of, order, raw

from overnight.core.errors import FencedError, SaveFailedError, SetupError
from overnight.trainer.checkpoint.fence import claim, next_attempt, read_fences
from overnight.trainer.checkpoint.manifest import MANIFEST, load_manifest, verify
from overnight.trainer.checkpoint.place import CheckpointName, Token
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.retry import Patience, is_transient
from overnight.trainer.checkpoint.writing.upload import ArrivedDamagedError
from overnight.trainer.checkpoint.writing.upload import verify as verify_upload

NUMBERS = itertools.count()


@pytest.fixture
def place(store: Store) -> RemotePlace:
    return store.place(f"trial-{next(NUMBERS)}/checkpoints")


@pytest.fixture
def memory() -> Memory:
    return Memory({"w": torch.randn(1000, 7), "b": torch.ones(3, dtype=torch.bfloat16)})


def download(place: RemotePlace, name: CheckpointName, folder: Path) -> Path:
    for entry in (str(name), *place.bases()):
        (folder / entry).mkdir(parents=True)
        for file in place.sizes(entry):
            (folder / entry / file).write_bytes(place.read(f"{entry}/{file}"))
    return folder / str(name)


def test_what_is_committed_is_there(place: RemotePlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        ticket = finish(client, client.submit(order(1, 5, memory), memory))
        assert ticket.error is None and ticket.committed
        memory.bytes[0] ^= 1
        assert finish(client, client.submit(order(2, 6, memory), memory)).committed
        assert list((tmp_path / "staging").iterdir()) == [], "the local copy is gone"
    assert committed(place) == ["step-5.attempt-1.1", "step-6.attempt-1.1"]
    assert [entry for entry in place.entries() if "partial" in entry] == []
    folder = download(place, name_of(6), tmp_path / "down")
    assert verify(folder) == load_manifest(place, name_of(6))
    dcp_to_torch_save(folder, tmp_path / "it.pt")
    found = torch.load(tmp_path / "it.pt", weights_only=True)
    for piece in memory.pieces:
        assert raw(found[piece.key]) == memory.bytes[piece.offset : piece.offset + piece.num_bytes]


def test_several_ranks_meet_in_the_store(place: RemotePlace, tmp_path: Path) -> None:
    memories = [Memory({"w": torch.ones(1000), "rng": torch.full((4,), float(rank))}) for rank in range(2)]
    with (
        client_of(place, tmp_path / "0", rank=0, world_size=2) as first,
        client_of(place, tmp_path / "1", rank=1, world_size=2) as second,
    ):
        tickets = [c.submit(order(1, 1, m), m) for c, m in zip((first, second), memories, strict=True)]
        assert [finish(c, t).error for c, t in zip((first, second), tickets, strict=True)] == [None, None]
    manifest = verify(download(place, name_of(1), tmp_path / "down"))
    assert {"state-0.json", "state-1.json"} <= set(manifest.files)


def test_a_store_that_fails_for_a_while_costs_time_only(
    store: Store, place: RemotePlace, memory: Memory, tmp_path: Path
) -> None:
    with client_of(place, tmp_path) as client:
        counter = itertools.count()
        store.failing = lambda method, path: "step-" in path and next(counter) % 3 != 2
        ticket = finish(client, client.submit(order(1, 1, memory), memory))
        store.failing = lambda method, path: False
    assert ticket.committed and ticket.num_tries == 1 and next(counter) > 5
    verify(download(place, name_of(1), tmp_path / "down"))


def test_a_store_that_stays_away_fails_the_save_and_the_next_works(
    store: Store, place: RemotePlace, memory: Memory, tmp_path: Path
) -> None:
    with client_of(place, tmp_path, retry_seconds=1.0) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
        store.failing = lambda method, path: method == "PUT"
        memory.bytes[0] ^= 1
        ticket = finish(client, client.submit(order(2, 2, memory), memory))
        assert isinstance(ticket.error, SaveFailedError) and "step-2.attempt-1.1 was not saved" in ticket.error.message
        store.failing = lambda method, path: False
        assert committed(place) == ["step-1.attempt-1.1"]
        assert list((tmp_path / "staging").iterdir()) == []
        assert finish(client, client.submit(order(3, 3, memory), memory)).committed
    assert committed(place) == ["step-1.attempt-1.1", "step-3.attempt-1.1"]


def test_a_higher_fence_in_the_store_stops_a_save(place: RemotePlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
        claim(place, Token(2), name_of(1))
        memory.bytes[0] ^= 1
        assert isinstance(finish(client, client.submit(order(2, 2, memory), memory)).error, FencedError)
    assert committed(place) == ["step-1.attempt-1.1"] and next_attempt(place) == 3
    assert read_fences(place)[Token(2)].parent == name_of(1)
    with pytest.raises(FencedError, match="already been started"):
        claim(place, Token(2), None)


def test_what_has_no_manifest_does_not_exist(place: RemotePlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
    place.write("step-9.attempt-1.1/state-0.json", b"{}")
    assert committed(place) == ["step-1.attempt-1.1"] and place.foreign() == []
    place.remove("step-1.attempt-1.1")
    assert committed(place) == [] and place.sizes("step-1.attempt-1.1") == {}


def test_damage_on_the_way_is_noticed(place: RemotePlace, memory: Memory, tmp_path: Path) -> None:
    with client_of(place, tmp_path) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
    folder = download(place, name_of(1), tmp_path / "down")
    entry = verify(folder).files["__0_0.distcp"]
    target = f"{name_of(1)}/__0_0.distcp"
    verify_upload(place, target, folder / "__0_0.distcp", entry, lambda _: None)
    data = bytearray(place.read(target))
    data[entry.size // 2] ^= 1
    for damaged, what in ((bytes(data), "differs"), (bytes(data[:-1]), "bytes at the destination")):
        place.write(target, damaged)
        with pytest.raises(ArrivedDamagedError, match=what):
            verify_upload(place, target, folder / "__0_0.distcp", entry, lambda _: None)
    assert place.read_range(target, 3, 5) == data[3:8] and MANIFEST in place.sizes(str(name_of(1)))


def test_of_two_claims_at_most_one_wins(place: RemotePlace) -> None:
    assert place.create("fence-1.1.json", b"a") and not place.create("fence-1.1.json", b"b")
    place.write("fence-2.1.json.claim-00ff", b"")
    assert not place.create("fence-2.1.json", b"c"), "somebody else is about to"
    assert place.tokens() == [Token(1), Token(2)] and place.read("fence-1.1.json") == b"a"


def test_a_mistyped_bucket_is_an_error_and_is_not_made(place: RemotePlace) -> None:
    other = RemotePlace("s3://experimnets/trial", place.files, "experimnets/trial")
    with pytest.raises(SetupError, match="'experimnets'"):
        claim(other, Token(1), None)
    assert place.files.ls("") == [BUCKET]


def test_patience_ends_and_refusals_are_final() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    patience = Patience(10.0, sleep=sleep, clock=lambda: now[0])
    calls = itertools.count()

    def fail(error: Exception) -> None:
        next(calls)
        raise error

    with pytest.raises(ConnectionError):
        patience.call(lambda: fail(ConnectionError("reset")))
    assert 4 < next(calls) < 12 and now[0] < 20
    calls = itertools.count()
    with pytest.raises(PermissionError):
        patience.call(lambda: fail(PermissionError("no")))
    assert next(calls) == 1
    assert is_transient(TimeoutError()) and not is_transient(OSError(28, "full"))
