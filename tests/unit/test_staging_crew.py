"""Copies on all cores where none is free: which that is, and that the bytes are the same."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from overnight.trainer.checkpoint.staging import crew as crew_module
from overnight.trainer.checkpoint.staging.arena import Arena
from overnight.trainer.checkpoint.staging.crew import MIN_SHARED_BYTES, Cores, Crew
from overnight.trainer.checkpoint.staging.gather import Gather, Rows

LENGTHS = [3 << 20, 100, MIN_SHARED_BYTES, 5_000_000, 0, 64]


class Machine:
    """Writes what /proc/stat would say."""

    def __init__(self, num_cores: int) -> None:
        self.ticks = [[0] * 10 for _ in range(num_cores)]

    def passes(self, ticks: int, *, free: list[float], steal: float = 0.0) -> None:
        for core, share in zip(self.ticks, free, strict=True):
            core[3] += round(ticks * share / 2)
            core[4] += round(ticks * share) - round(ticks * share / 2)
            core[7] += round(ticks * steal)
            core[0] += ticks - round(ticks * share) - round(ticks * steal)
            core[8] += ticks  # time of guests, which is counted as user time too

    def read(self) -> str:
        lines = [f"cpu{number} {' '.join(map(str, core))}" for number, core in enumerate(self.ticks)]
        return "\n".join(["cpu  " + " ".join(map(str, map(sum, zip(*self.ticks, strict=True)))), *lines, "intr 5 0 0"])


@pytest.mark.parametrize(
    ("free", "busy"),
    [([0.0, 0.0], True), ([0.2, 0.2], True), ([0.0, 1.0], False), ([0.3, 0.3], False), ([0.0, 0.45], True)],
)
def test_cores_are_busy_if_less_than_half_of_one_is_free(free: list[float], busy: bool) -> None:
    machine = Machine(2)
    machine.passes(1000, free=[1.0, 1.0])
    cores = Cores(machine.read, frozenset({0, 1}))
    machine.passes(100, free=free)
    assert cores.are_busy() is busy
    cores.begin()
    machine.passes(100, free=[1.0, 1.0])
    assert not cores.are_busy(), "the time before does not count"


def test_of_a_large_machine_only_the_cores_that_are_allowed_count() -> None:
    machine = Machine(12)
    cores = Cores(machine.read, frozenset({1, 10}))
    machine.passes(100, free=[1.0] + [0.0] + [1.0] * 8 + [0.0] + [1.0])
    assert cores.are_busy()


def test_a_short_time_says_nothing() -> None:
    machine = Machine(2)
    cores = Cores(machine.read, frozenset({0, 1}))
    machine.passes(2, free=[0.0, 0.0])
    assert not cores.are_busy()


@pytest.mark.parametrize("text", ["", "cpu0", "cpu0 a b c d e", "cpu0 1 2"])
def test_a_system_that_does_not_say_has_free_cores(text: str) -> None:
    assert not Cores(lambda: text, frozenset({0})).are_busy()


def test_a_system_without_proc_has_free_cores() -> None:
    def missing() -> str:
        raise FileNotFoundError

    assert not Cores(missing, frozenset({0, 1})).are_busy()


def test_this_machine_says() -> None:
    cores = Cores()
    idle, total = cores._look()
    assert 0 <= idle <= total and total > 0
    assert cores.allowed == os.sched_getaffinity(0)


class Given(Cores):
    """Cores of which it is said whether they are busy."""

    def __init__(self, busy: bool, num: int = 4) -> None:
        super().__init__(lambda: "", frozenset(range(num)))
        self._busy = busy

    def are_busy(self) -> bool:
        return self._busy


@pytest.fixture
def sources() -> list[np.ndarray]:
    return [np.random.default_rng(n).integers(0, 255, length, dtype=np.uint8) for n, length in enumerate(LENGTHS)]


@pytest.fixture
def copied(sources: list[np.ndarray]) -> Iterator[Callable[[Crew], None]]:
    """Copies with a crew and looks at what has arrived."""
    gather = Gather(4096, LENGTHS)
    arena = Arena(gather.end, 1)

    def copy(crew: Crew) -> None:
        arena.array()[:] = 255
        crew.copy(gather, arena, np.array([source.ctypes.data for source in sources], dtype=np.uint64))
        for offset, source in zip(gather.offsets.tolist(), sources, strict=True):
            assert os.pread(arena.fileno(), len(source), offset) == source.tobytes()

    yield copy
    arena.close()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("overnight-copying")]


def test_together_or_alone_the_bytes_are_the_same(copied: Callable[[Crew], None]) -> None:
    for busy, num in ((False, 4), (True, 1)):
        crew = Crew(Given(busy, num))
        copied(crew)
        assert not threads()
        crew.close()
    crew = Crew(Given(True))
    for _ in range(3):
        copied(crew)
    assert 1 <= len(threads()) <= 3
    crew.close()
    crew.close()
    assert not threads()


def test_little_is_copied_alone() -> None:
    gather, arena, crew = Gather(0, [1000]), Arena(4096, 1), Crew(Given(True))
    source = np.ones(1000, dtype=np.uint8)
    crew.copy(gather, arena, np.array([source.ctypes.data], dtype=np.uint64))
    assert not threads() and int(arena.array().sum()) == 1000
    arena.close()


def test_what_has_been_unmapped_is_an_error_behind_which_nobody_writes(sources: list[np.ndarray]) -> None:
    gather = Gather(0, LENGTHS)
    arena, crew = Arena(gather.end, 1), Crew(Given(True))
    addresses = np.array([source.ctypes.data for source in sources], dtype=np.uint64)
    addresses[3] = 4096
    with pytest.raises(OSError, match="Bad address"):
        crew.copy(gather, arena, addresses)
    before = arena.array().copy()
    for source in sources:
        source[:] = 0
    crew.close()
    assert (arena.array() == before).all()
    arena.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EACCES])
def test_where_the_system_does_not_allow_it_one_copies(
    number: int, copied: Callable[[Crew], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refused(address: int, rows: Rows) -> None:
        asked.append(address)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(crew_module, "copy_pieces", refused)
    crew = Crew(Given(True))
    copied(crew)
    assert asked
    asked.clear()
    copied(crew)
    assert not asked, "it is asked once"
    crew.close()


def test_memory_that_only_a_file_can_be_written_from_is_copied_by_one(
    copied: Callable[[Crew], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as memory that the kernel does not pin."""
    whole, num_calls = crew_module.copy_pieces, itertools.count()

    def sometimes(address: int, rows: Rows) -> None:
        if next(num_calls) % 3 == 1:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        whole(address, rows)

    monkeypatch.setattr(crew_module, "copy_pieces", sometimes)
    crew = Crew(Given(True))
    for _ in range(3):
        copied(crew)
    assert next(num_calls) > 6, "it is tried again each time"
    crew.close()


@pytest.mark.parametrize("num_started", range(3))
def test_a_thread_that_cannot_be_had_leaves_none_behind_that_writes_later(
    num_started: int, copied: Callable[[Crew], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, start, num_starts = crew_module.copy_pieces, threading.Thread.start, itertools.count()
    slow, calls = threading.Event(), []

    def late(address: int, rows: Rows) -> None:
        if threading.current_thread().name.startswith("overnight-copying"):
            slow.wait(0.2)
        calls.append(address)
        whole(address, rows)

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("overnight-copying") and next(num_starts) >= num_started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(crew_module, "copy_pieces", late)
    monkeypatch.setattr(threading.Thread, "start", refused)
    crew = Crew(Given(True))
    copied(crew)
    assert not threads()
    num_calls = len(calls)
    copied(crew)
    assert len(calls) == num_calls, "from then on one copies alone"


def test_a_call_that_copies_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from overnight.trainer.checkpoint.staging import gather as gather_module

    for name in ("_readv", "_pwritev"):
        monkeypatch.setattr(gather_module, name, lambda *arguments: 0)
    crew, arena = Crew(Given(True)), Arena(MIN_SHARED_BYTES, 1)
    with pytest.raises(OSError, match="nothing"):
        crew.copy(Gather(0, [MIN_SHARED_BYTES]), arena, np.array([arena.address], dtype=np.uint64))
    arena.close()


def test_a_system_that_does_not_know_the_call(monkeypatch: pytest.MonkeyPatch, copied: Callable[[Crew], None]) -> None:
    from overnight.trainer.checkpoint.staging import gather as gather_module

    monkeypatch.setattr(gather_module, "_readv", None)
    crew = Crew(Given(True))
    copied(crew)
    crew.close()
