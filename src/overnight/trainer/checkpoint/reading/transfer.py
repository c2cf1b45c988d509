"""One pass over a checkpoint's files that verifies and places at once, several segments at a time.

A segment is what has a hash of its own. It is always read whole, whatever part of it is wanted, and what it gave is not
to be used before this function has returned.
"""

import bisect
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.manifest import FileEntry, Segment
from overnight.trainer.checkpoint.reading.source import Source, Want

MAX_THREADS = 8

Wants = Mapping[str, Sequence[Want]]
Choice = tuple[str, Segment]


def num_threads(source: Source, local_world_size: int = 1) -> int:
    """Threads that read a source: hashing keeps a core busy, remote requests mostly wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return source.num_requests or max(1, min(MAX_THREADS, cores // local_world_size))


def transfer(
    source: Source, files: Mapping[str, FileEntry], wants: Wants, verify: Iterable[Choice] = (), threads: int = 0
) -> None:
    """Reads the segments in which something is wanted, and those that shall be verified anyway.

    Args:
        source: Where from.
        files: What the manifest says.
        wants: What to place, by file.
        verify: Segments to read even if nothing in them is wanted.
        threads: Reads at a time; 0 lets the source decide.

    Raises:
        CorruptCheckpointError: The message names a file that is missing, truncated or altered. Where the bytes went
            that had been wanted holds nothing of use.
        UnavailableError: A remote store did not answer.
    """
    jobs: dict[Choice, list[Want]] = {choice: [] for choice in verify}
    again: dict[str, list[Want]] = {}
    for name, wanted in wants.items():
        if name not in files:
            raise CorruptCheckpointError(f"{name} is not listed in the manifest")
        first, second = _disjoint(wanted)
        _assign(name, files[name], first, jobs)
        if second:
            again[name] = second
    _run(source, jobs, threads or num_threads(source))
    if again:
        transfer(source, files, again, threads=threads)


def _run(source: Source, jobs: Mapping[Choice, list[Want]], threads: int) -> None:
    if len(jobs) <= 1 or threads == 1:
        for (name, segment), wants in jobs.items():
            _read(source, name, segment, wants)
        return
    longest_first = sorted(jobs, key=lambda choice: -choice[1].length)
    with ThreadPoolExecutor(min(threads, len(jobs)), thread_name_prefix="overnight-read") as pool:
        futures = [pool.submit(_read, source, name, segment, jobs[name, segment]) for name, segment in longest_first]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
    for future in done:
        future.result()


def _read(source: Source, name: str, segment: Segment, wants: list[Want]) -> None:
    end = segment.offset + segment.length
    if source.read(name, segment.offset, end, wants) != segment.xxh3_128:
        raise CorruptCheckpointError(f"{name} does not match its hash (bytes {segment.offset} to {end})")


def _disjoint(wants: Iterable[Want]) -> tuple[list[Want], list[Want]]:
    """Splits off what is wanted twice, such as bytes that two tensors share: a read has one place for each byte."""
    first: list[Want] = []
    second: list[Want] = []
    end = 0
    for want in sorted(wants, key=lambda want: want.offset):
        (first if want.offset >= end else second).append(want)
        end = max(end, want.end)
    return first, second


def _assign(name: str, entry: FileEntry, wants: Sequence[Want], jobs: dict[Choice, list[Want]]) -> None:
    """Cuts what is wanted at the borders of the segments."""
    starts = [segment.offset for segment in entry.segments]
    for want in wants:
        if not 0 <= want.offset <= want.end <= entry.size:
            raise CorruptCheckpointError(f"{name} has no bytes {want.offset} to {want.end}")
        for segment in entry.segments[max(0, bisect.bisect_right(starts, want.offset) - 1) :]:
            if segment.offset >= want.end:
                break
            if (part := want.within(segment.offset, segment.offset + segment.length)) is not None:
                jobs.setdefault((name, segment), []).append(part)
