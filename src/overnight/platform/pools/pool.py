"""The one interface to devices: everything above it is the same code for GPUs, CPU slots and fakes."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from overnight.core.clock import Clock, SystemClock
from overnight.core.errors import InvalidSpecError, SetupError
from overnight.core.models.node import DeviceReport
from overnight.core.paths import Home

MAX_SLOTS = 4096


class Pool(Protocol):
    """The devices of one node. Not thread-safe: one caller at a time."""

    def probe(self) -> list[DeviceReport]:
        """One look at every device, by rising index. A device that does not answer is reported, never left out."""
        ...

    def visible(self, indices: Sequence[int]) -> dict[str, str]:
        """Environment with which a process sees exactly these devices."""
        ...

    def is_clean(self, index: int, pids: Collection[int]) -> bool:
        """Whether none of these processes holds the device any more, so that it may be leased again."""
        ...

    def describe(self) -> str:
        """What the pool is, in a few words for people."""
        ...


def open_pool(spec: str | None, home: Home, clock: Clock | None = None) -> Pool:
    """The pool of this node.

    Args:
        spec: ``nvml[:0-3,7]``, ``cpu:N`` or ``fake:N``; None takes NVML if it finds GPUs, else one CPU slot per core.
        home: Where a fake pool finds its scripted faults and a GPU pool recognises our own processes.
        clock: Tells a fake pool when a scripted fault begins.

    Raises:
        InvalidSpecError: The text is none of these, or asks for no or too many devices.
        SetupError: NVML was asked for (or there plainly is a GPU), and its driver, its library or a GPU is missing.
    """
    from overnight.platform.pools.cpu import CpuPool
    from overnight.platform.pools.fake import FakePool
    from overnight.platform.pools.nvml import open_nvml

    if spec is None:
        try:
            return open_nvml(None, home)
        except SetupError:
            if Path("/dev/nvidia0").exists():
                raise  # GPUs that cannot be used must not turn into CPU slots unnoticed
            return CpuPool(_num_cores())
    kind, _, rest = spec.partition(":")
    if kind == "nvml" and (not rest) == (":" not in spec):
        return open_nvml(_indices(rest) if rest else None, home)
    if kind == "cpu":
        return CpuPool(_count(spec, rest))
    if kind == "fake":
        return FakePool(_count(spec, rest), home, clock or SystemClock())
    raise InvalidSpecError(f"pool {spec!r} is none", hint="Use nvml, nvml:0-3,7, cpu:N or fake:N.")


def _num_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def _count(spec: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise InvalidSpecError(f"pool {spec!r} needs a number of devices from 1 to {MAX_SLOTS}", hint="E.g. cpu:4.")
    return int(text)


def _indices(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if match is None or (last := int(match[2] or match[1])) < int(match[1]):
            raise InvalidSpecError(f"{text!r} are no GPU indices", hint="Write them like nvml:0-3,7.")
        found.update(range(int(match[1]), last + 1))
    return tuple(sorted(found))


def process_is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie, which holds nothing but its exit status."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
