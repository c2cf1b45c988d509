"""Reads what a trial printed, from any byte on, while it is still printing.

Output files are bounded by punching holes between their head and tail, so offsets stay absolute and a hole reads as
nothing.
"""

import asyncio
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from overnight.core.errors import NotFoundError
from overnight.core.models.api import LogChunk
from overnight.platform.server.services import Services
from overnight.platform.server.wake import MAX_WAIT_SECONDS
from overnight.store import attempts, trials

if TYPE_CHECKING:
    from overnight.store.engine import Connection

POLL_SECONDS = 0.05
"""How often a growing file is looked at: files have no commits to wait for."""

_INCOMPLETE_BYTES = 3
"""Most bytes by which a cut UTF-8 character is short."""


class _Place(BaseModel):
    trial_id: str
    attempt: int
    path: Path
    over: bool


async def follow_log(
    house: Services, ref: str, attempt: int | None, rank: int, offset: int, limit: int, wait_seconds: float
) -> LogChunk:
    """The next piece; waits for one while the attempt runs.

    Raises:
        NotFoundError: No such trial, or it has no such attempt.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(wait_seconds, MAX_WAIT_SECONDS)
    place = await house.read(_locate, house, ref, attempt, rank)
    with house.hub.watch(f"trial:{place.trial_id}") as watch:
        place = await house.read(_locate, house, place.trial_id, place.attempt, rank)
        while True:
            chunk = await house.work(read_chunk, place.path, place.attempt, place.over, offset, limit)
            offset = chunk.offset
            if chunk.text or chunk.end or loop.time() >= deadline or house.hub.closing:
                return chunk
            if await watch.wait(POLL_SECONDS):
                place = await house.read(_locate, house, place.trial_id, place.attempt, rank)


def _locate(conn: "Connection", house: Services, ref: str, attempt: int | None, rank: int) -> _Place:
    row = trials.row(conn, ref)
    number = attempt or row.attempts_made
    if number > row.attempts_made or number < 1:
        raise NotFoundError(
            f"{row.name} has no attempt {number}" if attempt else f"{row.name} has not started yet",
            hint=f"It has {row.attempts_made} attempts; `overnight why {row.name}` says what it waits for.",
        )
    found = attempts.of_trial(conn, row.id)[number - 1]
    folder = Path(found.dir) if found.dir else house.settings.paths.attempt_dir(row.id, number)
    name = "out.log" if rank == 0 else f"out.{rank}.log"
    return _Place(trial_id=row.id, attempt=number, path=folder / name, over=found.ended_at is not None)


def read_chunk(path: Path, attempt: int, over: bool, offset: int, limit: int) -> LogChunk:
    """At most ``limit`` bytes from ``offset`` on, holes skipped.

    Args:
        path: The output file; missing is empty.
        attempt: For the answer.
        over: No more will be written.
        offset: Negative counts from the end.
        limit: Most bytes.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return LogChunk(attempt=attempt, offset=max(0, offset), next_offset=max(0, offset), text="", end=over)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        start, stop = _data(fd, start, size)
        raw = os.pread(fd, min(limit, stop - start), start)
    finally:
        os.close(fd)
    final = start + len(raw) >= size
    if not (over and final):
        raw = _whole_characters(raw)
    following = start + len(raw)
    return LogChunk(
        attempt=attempt,
        offset=start,
        next_offset=following,
        text=raw.decode(errors="replace"),
        end=over and following >= size,
    )


def _data(fd: int, start: int, size: int) -> tuple[int, int]:
    """The next stretch that is no hole."""
    if start >= size:
        return start, start
    try:
        begin = os.lseek(fd, start, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size, size
        return start, size


def _whole_characters(raw: bytes) -> bytes:
    """Leaves a character that is not all there yet for the next piece."""
    for back in range(1, min(_INCOMPLETE_BYTES, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return raw[:-back] if needed > back and len(raw) > back else raw
    return raw
