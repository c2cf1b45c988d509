"""The spool under torn writes, lost acknowledgements and full disks; small files; directives."""

import json
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.platform.node.directives import DirectiveBoard
from overnight.platform.node.files import read_json, write_atomic
from overnight.platform.node.spool import Spool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), acked=st.integers(0, 12), batch=st.integers(1, 4))
def test_cut_at_any_byte_it_goes_on_contiguously(
    tmp_path_factory: pytest.TempPathFactory, cut: int, acked: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, now=lambda: 1.0)
    for number in range(6):
        spool.append("metrics", 1, {"text": "\u2603\n" * number})
    spool.close()
    file = folder / "spool.jsonl"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - min(cut, len(data))])
    whole = file.read_bytes().count(b"\n")
    again = Spool(folder, now=lambda: 1.0)
    assert again.last_seq == whole
    assert again.append("exit", 1, {})["seq"] == whole + 1
    again.ack(acked)
    seen = []
    while events := again.pending(max_events=batch):
        seen += [event["seq"] for event in events]
        again.ack(seen[-1])
    assert seen == list(range(min(acked, whole + 1) + 1, whole + 2))
    again.close()


def test_a_server_that_went_back_in_time_gets_everything_again(folder: Path) -> None:
    spool = Spool(folder)
    for _ in range(5):
        spool.append("metrics", 1, {})
    spool.ack(5)
    assert spool.drained and spool.pending() == []
    spool.ack(2)
    assert [event["seq"] for event in spool.pending()] == [3, 4, 5]
    spool.close()
    assert Spool(folder).acked == 2


def test_batches_are_bounded_in_bytes(folder: Path) -> None:
    spool = Spool(folder)
    for _ in range(10):
        spool.append("metrics", 1, {"text": "x" * 1000})
    assert len(spool.pending(max_bytes=2500)) == 3
    spool.ack(3)
    assert [event["seq"] for event in spool.pending(max_bytes=1)] == [4]


def test_a_full_disk_leaves_the_spool_as_it_was(folder: Path) -> None:
    spool = Spool(folder)
    spool.append("started", 1, {})
    size = (folder / "spool.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(OSError):
            spool.append("metrics", 1, {"rows": [["loss", 1, 0.5, 1.0]]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (folder / "spool.jsonl").stat().st_size == size
    assert spool.append("exit", 1, {})["seq"] == 2


def test_numbers_that_json_does_not_have_are_refused(folder: Path) -> None:
    spool = Spool(folder)
    with pytest.raises(ValueError):
        spool.append("metrics", 1, {"x": float("nan")})
    assert spool.last_seq == 0 and (folder / "spool.jsonl").read_bytes() == b""


def test_a_failed_replacement_keeps_the_old_file(folder: Path) -> None:
    file = folder / "exit.json"
    write_atomic(file, json.dumps({"a": 1}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(OSError):
            write_atomic(file, json.dumps({"a": 22222}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_json(file) == {"a": 1}
    assert os.listdir(folder) == ["exit.json"]  # noqa: PTH208


async def test_directives_rise_and_those_made_here_stay() -> None:
    board = DirectiveBoard()
    told = {"version": 3, "action": "yield", "grace_seconds": 1.0, "reason": "preempted"}
    assert board.from_server(told) and not board.from_server(told)
    assert (await board.wait(0, 5))["action"] == "yield" and board.leaving
    assert board.from_server({**told, "version": 4, "action": "continue"}) and not board.leaving
    board.from_here("stop", 0.0, "stale")
    assert not board.from_server({**told, "version": 9})
    assert board.current["reason"] == "stale" and board.current["version"] == 3
    assert (await board.wait(3, 0.01))["version"] == 3
