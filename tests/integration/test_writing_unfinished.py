"""What killed attempts leave in a store: found and removed by who may, and never what a manifest may still publish."""

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from store_lab import Store
from waiting import wait_for
from writing_lab import Memory, client_of, committed, finish, name_of, order

from overnight.trainer.checkpoint import multipart
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import Token, open_place
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import mark, sweep
from overnight.trainer.checkpoint.writing.destination import make_destination

BASE = "base-" + "0f" * 16
NUMBERS = itertools.count()


@pytest.fixture
def place(store: Store) -> RemotePlace:
    return store.place(f"unfinished-{next(NUMBERS)}/checkpoints")  # servers of one process share their buckets


@pytest.fixture
def memory() -> Memory:
    return Memory({"w": torch.randn(1000, 7)})


def begin_upload(place: RemotePlace, path: str) -> None:
    """Sends the first part of a large file, as who is killed in the middle of it does."""
    bucket, key, _ = place.files.split_path(place.full(path))
    number = place.files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    place.files.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=number, PartNumber=1, Body=b"x" * 1000)


def uploads(place: RemotePlace, folder: str = "") -> list[str]:
    return sorted(upload.path for upload in multipart.uploads_below(place.files, place.full(folder)))


def tidy(place: RemotePlace, *, at_rest: bool) -> list[str]:
    watch = PinWatch()
    found = survey(place, watch)
    return sorted(deletion.entry for deletion in sweep(found, mark(found, at_rest=at_rest), watch))


def test_a_store_tells_uploads_by_folder_and_page(place: RemotePlace) -> None:
    for path in ("step-1.attempt-1.1/a", "step-1.attempt-1.1/b", "step-10.attempt-1.1/a"):
        begin_upload(place, path)
    assert uploads(place, "step-1.attempt-1.1") == ["a", "b"], "not those of a folder whose name only begins alike"
    assert place.entries() == [], "no listing of objects shows them"
    assert set(place.unfinished()) == {"step-1.attempt-1.1", "step-10.attempt-1.1"}
    place.remove("step-1.attempt-1.1")
    assert uploads(place) == ["step-10.attempt-1.1/a"]


def test_pages_of_uploads_are_followed() -> None:
    asked: list[dict[str, str]] = []

    class Files:
        def split_path(self, path: str) -> tuple[str, str, None]:
            return "bucket", path, None

        def call_s3(self, method: str, **options: str) -> dict[str, object]:
            asked.append(options)
            key = f"trial/{len(asked)}"
            last = {"IsTruncated": len(asked) < 3, "NextKeyMarker": key, "NextUploadIdMarker": "u"}
            return {"Uploads": [{"Key": key, "UploadId": "u"}], **last}

    assert [upload.path for upload in multipart.uploads_below(Files(), "trial")] == ["1", "2", "3"]
    assert [one.get("KeyMarker") for one in asked] == [None, "trial/1", "trial/2"]


def test_what_a_killed_attempt_left_goes_and_what_may_be_under_way_stays(
    place: RemotePlace, memory: Memory, tmp_path: Path
) -> None:
    with client_of(place, tmp_path) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
    place.write("step-2.attempt-1.1/__0_0.distcp", b"half of a save")
    begin_upload(place, "step-3.attempt-1.1/__0_0.distcp")
    begin_upload(place, f"{BASE}/__0_0.distcp")
    place.write("step-2.attempt-1.1.partial/rank-0.json", b"{}")
    before = set(place.unfinished())
    assert before == {"step-2.attempt-1.1", "step-2.attempt-1.1.partial", "step-3.attempt-1.1", BASE}
    assert tidy(place, at_rest=False) == [], "attempt 1 may still be at it"
    claim(place, Token(2), name_of(1))
    place.write("step-2.attempt-2.1/__0_0.distcp", b"a save that is under way")
    begin_upload(place, "step-3.attempt-2.1/__0_0.distcp")
    assert tidy(place, at_rest=False) == ["step-2.attempt-1.1", "step-2.attempt-1.1.partial", "step-3.attempt-1.1"]
    assert uploads(place) == [f"{BASE}/__0_0.distcp", "step-3.attempt-2.1/__0_0.distcp"]
    assert tidy(place, at_rest=True) == [BASE, "step-2.attempt-2.1", "step-3.attempt-2.1"]
    assert uploads(place) == [] and place.unfinished() == {}
    assert committed(place) == ["step-1.attempt-1.1"] and tidy(place, at_rest=True) == []


def test_an_attempt_removes_its_own_unfinished_saves_and_nobody_elses(
    place: RemotePlace, memory: Memory, tmp_path: Path
) -> None:
    claim(place, Token(1), None)
    place.write("step-1.attempt-1.1/__0_0.distcp", b"of an earlier attempt")
    with client_of(place, tmp_path, Token(2)) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
        place.write("step-2.attempt-2.1/__0_0.distcp", b"of a save that failed")
        begin_upload(place, "step-3.attempt-2.1/__0_0.distcp")
        begin_upload(place, "step-4.attempt-2.1/__0_0.distcp")  # of a writer that was killed; the next redoes it
        memory.bytes[0] ^= 1
        assert finish(client, client.submit(order(2, 4, memory), memory)).committed
        wait_for(lambda: set(place.unfinished()) == {"step-1.attempt-1.1"}, "the attempt has tidied up")
    assert committed(place) == ["step-1.attempt-2.1", "step-4.attempt-2.1"]
    assert uploads(place) == [] and place.entries("step-1.attempt-1.1") == ["__0_0.distcp"]


def test_what_earlier_starts_have_staged_goes_and_what_others_send_now_stays(tmp_path: Path) -> None:
    destination = make_destination(open_place("memory://trial/checkpoints"), 1, tmp_path / "staging", lambda _: None)
    destination.tidy(Token(2, 3))  # there is no such folder yet
    gone = ["step-9.attempt-1.7.rank-0", "step-9.attempt-2.2.again-2.rank-3", "step-1.attempt-2.3.rank-1"]
    staying = ["step-1.attempt-2.3.rank-0", "step-1.attempt-2.4.rank-1", "step-1.attempt-10.1.rank-1", "notes"]
    for name in (*gone, *staying):
        (tmp_path / "staging" / name).mkdir(parents=True)
        (tmp_path / "staging" / name / "__0_0.distcp").write_bytes(b"x")
    destination.tidy(Token(2, 3))
    assert sorted(staged.name for staged in (tmp_path / "staging").iterdir()) == sorted(staying)


@pytest.mark.parametrize("how", ["uploading", "publishing"])
def test_the_next_start_removes_what_a_killed_one_had_uploaded(
    store: Store, place: RemotePlace, memory: Memory, tmp_path: Path, how: str
) -> None:
    reached = threading.Event()

    def hold(method: str, path: str) -> bool:
        if method == "PUT" and path.endswith("/manifest.json" if how == "publishing" else "/state-0.json"):
            reached.set()
            return True
        return False

    with client_of(place, tmp_path, tidies=True) as client:
        store.failing = hold
        ticket = client.submit(order(1, 1, memory), memory)
        assert wait_for(reached.is_set, "the writer is in the middle of its save")
        assert wait_for(place.unfinished, "another file, which is sent at the same time, has arrived")
        assert client.pid is not None and not ticket.done
        os.kill(client.pid, signal.SIGKILL)
    store.failing = lambda method, path: False
    assert committed(place) == [] and "step-1.attempt-1.1" in place.unfinished()
    staging = tmp_path / "staging"
    assert [staged.name for staged in staging.iterdir()] == ["step-1.attempt-1.1.rank-0"]
    with client_of(place, tmp_path, Token(2), tidies=True) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
        wait_for(lambda: not place.unfinished(), "the next start has tidied up")
    assert committed(place) == ["step-1.attempt-2.1"] and list(staging.iterdir()) == []


def test_a_store_that_tells_no_uploads_is_tidied_without(store: Store, place: RemotePlace) -> None:
    claim(place, Token(1), None)
    place.write("step-1.attempt-1.1/data", b"half")

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(place.files, name)

        def call_s3(self, method: str, **options: str) -> None:
            raise PermissionError("s3:ListBucketMultipartUploads")

    refusing = RemotePlace(place.url, Refusing(), place.full(""))
    assert tidy(refusing, at_rest=True) == ["step-1.attempt-1.1"] and place.entries() == ["fence-1.1.json"]
