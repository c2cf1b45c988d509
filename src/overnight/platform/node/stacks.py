"""Asks ranks that hang where they are: each dumps the stacks of all its threads, whatever its interpreter waits for.

The trainer registers ``faulthandler`` for :data:`SIGNAL`, with ``stacks.R.txt`` in the attempt's folder as its file. It
writes from the signal handler itself, so that a rank answers that is stuck in C or holds the interpreter's lock.

Standard library only: runs in the user's interpreter too.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from overnight.platform.node.identity import read_stat

SIGNAL = signal.SIGUSR2
DUMP_SECONDS = 2.0
_LOOK_SECONDS = 0.05
_MAX_BYTES = 256 * 1024


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return folder / f"stacks.{rank}.txt"


async def collect(folder: Path, generation: int, pids: Mapping[int, int], told: Mapping[int, str]) -> Path:
    """Writes ``hang-GENERATION.txt``: what each rank was at, the state of its process, and its stacks.

    Args:
        folder: The attempt's.
        generation: Of the ranks.
        pids: Of the ranks that live, and have the handler.
        told: A line about each rank.

    Returns:
        The file's path.

    Raises:
        OSError: It cannot be written.
    """
    starts = {rank: _size(file_of(folder, rank)) for rank in pids}
    states = {rank: _state(pid) for rank, pid in pids.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
            os.kill(pid, signal.SIGCONT)  # one that is stopped handles nothing
    await _until_written([file_of(folder, rank) for rank in pids], sum(starts.values()))
    parts = []
    for rank, line in told.items():
        parts.append(f"rank {rank}: {line}{states.get(rank, '')}\n")
        if rank in pids:
            parts.append(_read(file_of(folder, rank), starts[rank]) or "no stacks: it did not answer\n")
    path = folder / f"hang-{generation}.txt"
    path.write_text("\n".join(parts))
    return path


async def _until_written(files: list[Path], size: int) -> None:
    """Waits until the files have grown and grow no more."""
    deadline = time.monotonic() + DUMP_SECONDS
    grown = size
    while time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
        sizes = [_size(file) for file in files]
        if all(sizes) and sum(sizes) == grown != size:
            return
        grown = sum(sizes)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path, start: int) -> str:
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(start)
        return opened.read(_MAX_BYTES).decode(errors="replace")
    return ""


def _state(pid: int) -> str:
    """The state of a process as ps(1) shows it, and what it waits for in the kernel, where that may be read."""
    stat = read_stat(pid)
    if stat is None:
        return ", gone"
    waits = ""
    with contextlib.suppress(OSError):
        waits = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return f", pid {pid}, state {stat.state}" + (f" in {waits}" if waits else "")
