"""Who a process is, beyond its pid: pids are reused, so a pid alone is never trusted.

Standard library only: runs in the user's interpreter too.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self


@lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Stat:
    """The fields of ``/proc/PID/stat`` that matter here (proc_pid_stat(5))."""

    state: str
    parent: int
    session: int
    start: int
    env_start: int
    env_end: int


def read_stat(pid: int) -> Stat | None:
    """The process's entry, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read a thousand times in a sweep
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(b")")[2].split()
    return Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        env_start=int(fields[47]),
        env_end=int(fields[48]),
    )


@dataclass(frozen=True)
class Identity:
    """A process for good: its pid, start time (clock ticks since boot) and boot."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The identity of a living process; None if it is gone or a zombie."""
        stat = read_stat(pid)
        return None if stat is None or stat.state in "ZX" else cls(pid, stat.start, boot_id())

    @classmethod
    def mine(cls) -> Self:
        """This process."""
        found = cls.of(os.getpid())
        if found is None:
            raise RuntimeError("/proc does not show this process")
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Reads what :meth:`to_dict` wrote; further keys are ignored."""
        return cls(int(data["pid"]), int(data["start"]), str(data["boot"]))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"pid": self.pid, "start": self.start, "boot": self.boot}

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        now = Identity.of(self.pid)
        return now is not None and (now.start, now.boot) == (self.start, self.boot)

    def pidfd(self) -> int | None:
        """A file descriptor that becomes readable when the process ends; None if it has ended.

        The start time is compared after opening: from then on the pid cannot pass to another process unnoticed.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.alive():
            return descriptor
        os.close(descriptor)
        return None
