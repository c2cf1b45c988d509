"""Files that are written past the page cache hold the same bytes as any others, whatever the alignment."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.writing.order import PAGE_BYTES
from overnight.trainer.checkpoint.writing.output import Output

NUM_PAGES = 64


@pytest.fixture(scope="module")
def memory() -> Iterator[memoryview]:
    arena = Arena(NUM_PAGES * PAGE_BYTES, 1)
    arena.array()[:] = np.random.default_rng(0).integers(0, 256, arena.size, dtype=np.uint8)
    mapped = mmap.mmap(arena.fileno(), arena.size, prot=mmap.PROT_READ)
    yield memoryview(mapped)
    arena.close()


def able(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def cached_pages(path: Path) -> int:
    """How many pages of a file the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapped:
        states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = (ctypes.c_char * size).from_buffer(mapped)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states) == 0
        del start
        return sum(state & 1 for state in states)


LENGTHS = st.integers(0, 5 * PAGE_BYTES) | st.integers(0, 5).map(lambda count: count * PAGE_BYTES)
APPENDS = st.lists(st.tuples(st.booleans(), LENGTHS, st.integers(0, NUM_PAGES - 6), st.just(0) | st.integers(0, 99)))


@settings(deadline=None)
@given(APPENDS, st.booleans())
def test_what_was_appended_is_in_the_file(
    memory: memoryview, appends: list[tuple[bool, int, int, int]], direct: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, expected, told = Path(folder) / "it", b"", []
        output = Output(path, direct=direct, progress=told.append)
        for by_page, length, page, shift in appends:
            start = page * PAGE_BYTES + shift
            data = memory[start : start + length]
            (output.append_pages if by_page else output.append)(data)
            expected += data
            assert output.position == len(expected) == sum(told)
        output.sync()
        output.close()
        output.close()
        assert path.read_bytes() == expected


def test_whole_pages_go_past_the_page_cache(memory: memoryview, tmp_path: Path) -> None:
    if not able(tmp_path):
        pytest.skip("this file system has no direct I/O")
    found = {}
    for direct in (True, False):
        output = Output(tmp_path / "it", direct=direct, progress=lambda _: None)
        output.append_pages(memory[: 40 * PAGE_BYTES + 10])
        output.append(memory[:100])
        output.sync()
        output.close()
        found[direct] = cached_pages(tmp_path / "it")
    assert found == {True: 1, False: 41}


def test_memory_that_does_not_begin_at_a_page_takes_the_usual_way(memory: memoryview, tmp_path: Path) -> None:
    output = Output(tmp_path / "it", direct=True, progress=lambda _: None)
    output.append_pages(memory[1 : 1 + 8 * PAGE_BYTES])
    output.append_pages(memory[: 8 * PAGE_BYTES])
    output.sync()
    output.close()
    assert (tmp_path / "it").read_bytes() == bytes(memory[1 : 1 + 8 * PAGE_BYTES]) + bytes(memory[: 8 * PAGE_BYTES])


def test_an_older_longer_file_leaves_nothing(memory: memoryview, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(bytes(50 * PAGE_BYTES))
    output = Output(tmp_path / "it", direct=True, progress=lambda _: None)
    output.append_pages(memory[: 3 * PAGE_BYTES])
    output.sync()
    output.close()
    assert (tmp_path / "it").read_bytes() == bytes(memory[: 3 * PAGE_BYTES])


def test_a_file_that_somebody_else_extends_is_noticed(memory: memoryview, tmp_path: Path) -> None:
    output = Output(tmp_path / "it", direct=True, progress=lambda _: None)
    output.append_pages(memory[:PAGE_BYTES])
    with (tmp_path / "it").open("ab") as other:
        other.write(b"x")
    with pytest.raises(OSError, match=f"{PAGE_BYTES + 1} bytes after {PAGE_BYTES}"):
        output.sync()
    output.close()
