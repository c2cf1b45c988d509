"""Reading output from any byte on: characters cut in two, holes, growth, floods."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.models.api import LogChunk
from overnight.platform.server.logs import read_chunk


def read_all(path: Path, limit: int, over: bool = True) -> str:
    text, offset = "", 0
    while True:
        chunk = read_chunk(path, 1, over, offset, limit)
        text += chunk.text
        if chunk.end or (not over and chunk.next_offset == chunk.offset):
            return text
        assert chunk.next_offset > offset or chunk.text, "it must get on"
        offset = chunk.next_offset


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=200), limit=st.integers(4, 64))
def test_pieces_of_any_size_make_the_whole(tmp_path_factory: pytest.TempPathFactory, text: str, limit: int) -> None:
    path = tmp_path_factory.mktemp("log") / "out.log"
    path.write_bytes(text.encode("utf-8", "replace"))
    assert read_all(path, limit) == text.encode("utf-8", "replace").decode()


@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=200), limit=st.integers(1, 64))
def test_any_bytes_come_to_an_end(tmp_path_factory: pytest.TempPathFactory, raw: bytes, limit: int) -> None:
    path = tmp_path_factory.mktemp("log") / "out.log"
    path.write_bytes(raw)
    read_all(path, limit)


def test_a_growing_file_is_not_at_its_end_until_the_attempt_is_over(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes("ä".encode()[:1])
    assert read_chunk(path, 1, False, 0, 100).end is False
    path.write_bytes("äb".encode())
    chunk = read_chunk(path, 1, False, 0, 100)
    assert (chunk.text, chunk.next_offset, chunk.end) == ("äb", 3, False)
    assert read_chunk(path, 1, True, 3, 100).end is True


def test_a_character_that_is_cut_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"a" + "€".encode()[:2])
    assert read_chunk(path, 1, False, 0, 100) == LogChunk(attempt=1, offset=0, next_offset=1, text="a", end=False)
    assert read_chunk(path, 1, True, 0, 100).text == "a\ufffd"


def test_negative_offsets_count_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"0123456789")
    assert read_chunk(path, 1, True, -3, 100).text == "789"
    assert read_chunk(path, 1, True, -300, 100).text == "0123456789"
    assert read_chunk(path, 1, True, 300, 100) == LogChunk(attempt=1, offset=10, next_offset=10, text="", end=True)


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_chunk(tmp_path / "none", 2, False, -5, 10) == LogChunk(
        attempt=2, offset=0, next_offset=0, text="", end=False
    )
    assert read_chunk(tmp_path / "none", 2, True, 0, 10).end


def test_holes_are_skipped_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    size = 8 * 2**20
    path.write_bytes(b"x" * size)
    punched = subprocess.run(
        ["fallocate", "--punch-hole", "--offset", "4096", "--length", str(size - 8192), path], capture_output=True
    )
    if punched.returncode:
        pytest.skip("this file system cannot punch holes")
    first = read_chunk(path, 1, True, 0, 2**20)
    assert len(first.text) == 4096 and first.next_offset == 4096
    second = read_chunk(path, 1, True, first.next_offset, 2**20)
    assert (second.offset, second.text) == (size - 4096, "x" * 4096)
    assert second.end


def test_a_file_that_ends_in_a_hole_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"x")
    os.truncate(path, 2**20)
    first = read_chunk(path, 1, True, 0, 10)
    assert first.text.startswith("x")
    last = read_chunk(path, 1, True, 2**20 - 1, 10)
    assert last.end and last.next_offset == 2**20
