"""Processes watched through pidfds: our children, and those of an `overnight up` before us, in the same way."""

import os
import select
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType

from overnight.platform.node.identity import Identity


class Watched:
    """A process that cannot be confused with a later one of the same pid. Close it when it is of no more interest."""

    def __init__(self, identity: Identity, fd: int) -> None:
        self.identity = identity
        self.fd = fd

    @classmethod
    def open(cls, identity: Identity) -> "Watched | None":
        """Watches a process; None if it is dead already."""
        try:
            fd = os.pidfd_open(identity.pid)
        except OSError:
            return None
        if identity.alive():
            return cls(identity, fd)
        os.close(fd)
        return None

    @property
    def alive(self) -> bool:
        """Whether it still runs. Reaps it when it was our child."""
        if not select.select([self.fd], [], [], 0)[0]:
            return True
        self.reap()
        return False

    def reap(self) -> int | None:
        """The exit code of a dead child (negative is a signal); None when it was not ours, or was reaped before."""
        try:
            found = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def signal(self, number: int) -> None:
        """Sends a signal; nothing happens when it is dead."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def wait(self, seconds: float) -> bool:
        """Whether it ended in time."""
        return bool(select.select([self.fd], [], [], max(0.0, seconds))[0])

    def end(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL when it does not listen."""
        self.signal(signal.SIGTERM)
        if not self.wait(grace_seconds):
            self.signal(signal.SIGKILL)
            self.wait(5.0)
        self.close()

    def close(self) -> None:
        """Stops watching; the process is not touched."""
        if self.fd >= 0:
            self.reap()
            os.close(self.fd)
            self.fd = -1


class Signals:
    """Counts requests to stop, and wakes whoever sleeps in :meth:`sleep`. A context manager of the main thread."""

    CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def __enter__(self) -> "Signals":
        self._wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._caught) for number in self.CAUGHT}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._read.close()
        self._write.close()

    def asked(self) -> bool:
        """Whether somebody asked to stop."""
        return self.count > 0

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def sleep(self, seconds: float, watched: Iterable[Watched] = ()) -> None:
        """Sleeps until a signal comes, one of the processes ends, or the time is over."""
        fds = [self._read.fileno(), *(process.fd for process in watched)]
        ready = select.select(fds, [], [], max(0.0, seconds))[0]
        if self._read.fileno() in ready:
            with suppress(BlockingIOError):
                self._read.recv(4096)


def remaining(deadline: float) -> float:
    """Seconds until a deadline on the monotonic clock, never negative."""
    return max(0.0, deadline - time.monotonic())
