"""Memory that is shared with another process, and system calls that fill it from a thousand places at once."""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.errors import SaveFailedError
from overnight.trainer.checkpoint.staging import gather as gather_module
from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.staging.gather import ALIGNMENT, Gather, copy_pieces, write_pieces
from overnight.trainer.checkpoint.writing.order import LARGE_BYTES


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shared_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300) | st.just(ALIGNMENT) | st.sampled_from([LARGE_BYTES, LARGE_BYTES + 1]), max_size=40),
    st.sampled_from([0, ALIGNMENT, 640]),
    st.integers(0, 5),
)
def test_every_piece_lies_aligned_and_whole(lengths: list[int], start: int, num_shares: int) -> None:
    sources = [np.random.default_rng(i).integers(1, 255, n, dtype=np.uint8) for i, n in enumerate(lengths)]
    gather = Gather(start, lengths)
    arena = Arena(gather.end + 1, 1)
    try:
        addresses = [int(source.ctypes.data) for source in sources]
        if num_shares == 0:
            gather.write(arena.fileno(), addresses)
        else:
            shares = gather.shares(addresses, num_shares)
            assert len(shares) <= num_shares
            for offset, rows in reversed(shares):
                copy_pieces(arena.address + offset, rows)
        taken = np.zeros(arena.size, dtype=bool)
        for offset, source in zip(gather.offsets, sources, strict=True):
            assert offset % ALIGNMENT == 0
            assert os.pread(arena.fileno(), len(source), int(offset)) == source.tobytes()
            assert not taken[offset : offset + len(source)].any()
            taken[offset : offset + len(source)] = True
        rest = np.frombuffer(os.pread(arena.fileno(), arena.size, 0), dtype=np.uint8)
        assert not rest[~taken].any()
    finally:
        arena.close()


def test_more_pieces_than_a_system_call_takes() -> None:
    sources = [np.full(100, number % 251, dtype=np.uint8) for number in range(5000)]
    gather = Gather(0, [100] * 5000)
    arena = Arena(gather.end, 1)
    gather.write(arena.fileno(), [int(source.ctypes.data) for source in sources])
    bytes_of_each = arena.array()[: 5000 * 128].reshape(5000, 128)
    assert (bytes_of_each[:, :100] == (np.arange(5000) % 251)[:, None]).all()
    assert not bytes_of_each[:, 100:].any()
    arena.close()


def test_a_write_that_takes_a_part_goes_on_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does with more than 2 GiB."""
    source = np.random.default_rng(0).integers(0, 255, 100_000, dtype=np.uint8)
    whole = gather_module._pwritev

    def at_most_777_bytes(descriptor: int, rows: int, count: int, offset: int) -> int:
        address, length = (ctypes.c_uint64 * 2).from_address(rows)
        part = np.array([[address, min(length, 777)]], dtype=np.uint64)
        return int(whole(descriptor, part.ctypes.data, 1, offset))

    monkeypatch.setattr(gather_module, "_pwritev", at_most_777_bytes)
    cuts = [(0, 30_000), (30_000, 1), (30_001, 69_999)]
    arena = Arena(100_000, 1)
    rows = np.array([[source.ctypes.data + start, length] for start, length in cuts], dtype=np.uint64)
    write_pieces(arena.fileno(), 0, rows)
    assert os.pread(arena.fileno(), 100_000, 0) == source.tobytes()
    arena.close()


def test_memory_that_is_gone_is_an_error_and_no_crash() -> None:
    arena = Arena(4096, 1)
    source = np.ones(64, dtype=np.uint8)
    for rows in ([[4096, 64]], [[source.ctypes.data, 64], [4096, 64]]):
        with pytest.raises(OSError, match="Bad address"):
            write_pieces(arena.fileno(), 0, np.array(rows, dtype=np.uint64))
        with pytest.raises(OSError, match="Bad address"):
            copy_pieces(arena.address, np.array(rows, dtype=np.uint64))
    arena.close()


def test_shares_are_equal_and_a_large_piece_is_cut() -> None:
    source = np.random.default_rng(0).integers(0, 255, 10 << 20, dtype=np.uint8)
    gather = Gather(4096, [len(source)])
    shares = gather.shares([int(source.ctypes.data)], 3)
    sizes = [int(rows[:, 1].sum()) for _, rows in shares]
    assert sum(sizes) == len(source) and max(sizes) - min(sizes) <= 2 * 4096
    arena = Arena(gather.end, 1)
    for offset, rows in shares:
        copy_pieces(arena.address + offset, rows)
    assert os.pread(arena.fileno(), len(source), 4096) == source.tobytes()
    arena.close()


def test_another_process_sees_what_is_written() -> None:
    arena = Arena(1 << 20, 7)
    arena.view(64, torch.float32, (3, 2)).copy_(torch.arange(6.0).view(3, 2))
    script = f"import mmap, struct; m = mmap.mmap({arena.fileno()}, 0); print(struct.unpack_from('6f', m, 64))"
    seen = subprocess.run(
        [sys.executable, "-c", script], pass_fds=[arena.fileno()], check=True, capture_output=True, text=True
    )
    assert seen.stdout.strip() == "(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)"
    arena.close()


def test_views_of_every_kind() -> None:
    arena = Arena(4096, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8):
        for shape in ((), (0,), (3,), (2, 0, 3), (4, 5)):
            view = arena.view(128, dtype, shape)
            assert view.dtype == dtype and tuple(view.shape) == shape
    del view
    arena.close()


def test_closing_gives_memory_and_descriptors_back() -> None:
    gc.collect()
    files, memory = open_files(), shared_kb()
    for number in range(20):
        arena = Arena(8 << 20, number)
        arena.array()[:] = 1
        arena.close()
        arena.close()
    assert open_files() == files
    assert shared_kb() - memory < 8 << 10


def test_touching_takes_the_memory_and_keeps_the_content() -> None:
    arena = Arena(1 << 20, 1)
    arena.array()[100] = 7
    blocks = os.fstat(arena.fileno()).st_blocks
    arena.touch()
    assert os.fstat(arena.fileno()).st_blocks * 512 == arena.size > blocks * 512
    assert arena.array()[100] == 7 and arena.array().sum() == 7
    arena.close()


def test_no_memory_is_a_failed_save() -> None:
    with pytest.raises(SaveFailedError, match="shared memory"):
        Arena(1 << 62, 1)


def test_sources_of_zero_bytes_need_no_address() -> None:
    gather = Gather(0, [0, 8, 0])
    arena = Arena(gather.end, 1)
    source = ctypes.create_string_buffer(b"12345678")
    gather.write(arena.fileno(), [0, ctypes.addressof(source), 0])
    assert os.pread(arena.fileno(), 8, 0) == b"12345678"
    arena.close()
