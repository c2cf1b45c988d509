"""The processes of a soak: a warm one that forks ranks, and what a supervisor does to them."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


class Warm:
    """Starts ranks by forking one warm process."""

    def __init__(self) -> None:
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        env = {key: value for key, value in os.environ.items() if not key.startswith("OVERNIGHT_")} | threads
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("soak_warm.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.pid = self._process.pid
        self._ready = False
        self._ends: dict[int, int] = {}
        """Descriptors of the ranks that are not known to have ended."""

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._ready:
            assert json.loads(self._process.stdout.readline()) == {"threads": 1}
            self._ready = True
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the warm process died")
        return json.loads(line)

    def start(self, order: dict[str, Any]) -> list[int]:
        """Pids of the ranks."""
        pids: list[int] = self._ask({"start": order})
        self._ends |= {pid: os.pidfd_open(pid) for pid in pids}
        return pids

    def hears_of_an_end(self, seconds: float = 0.0) -> bool:
        """Whether a rank has ended that is not reaped, or does so soon; to ask the kernel is cheaper than to reap."""
        return bool(select.select(list(self._ends.values()), [], [], seconds)[0])

    def reap(self) -> dict[int, int]:
        """Exit codes of what has ended since the last call."""
        ended = {int(pid): code for pid, code in self._ask({"reap": True}).items()}
        for pid in ended.keys() & self._ends.keys():
            os.close(self._ends.pop(pid))
        return ended

    def close(self) -> None:
        """Ends it; waits."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        for descriptor in self._ends.values():
            os.close(descriptor)
        self._ends.clear()

    def __enter__(self) -> "Warm":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def descendants(pid: int) -> list[int]:
    """All processes below one, nearest first."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop(0)
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                below = [int(child) for child in path.read_text().split()]
                found += below
                waiting += below
    return found


def command_of(pid: int) -> bytes:
    """The command line of a process; a forked one has its parent's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; returns whether the process was there."""
    if not is_alive(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
