"""Who holds a home, and is that process still the same one?

A pid alone is never trusted: it is reused. A process is named by pid, start time and boot id together, written into a
file that its holder keeps locked (``flock``) for life. The kernel drops the lock at death, however violent, so there is
no stale lock file to clean up. Standard library and core only: the node's side uses this too.
"""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from overnight.core.errors import HomeHeldError
from overnight.platform.node.identity import Identity

SETTLE_SECONDS = 1.0
"""How long a lock may be held by somebody whose identity cannot be read yet (it is writing it, or only probing)."""

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Holder(Identity):
    """A process that holds a file, and what it says there about itself.

    Attributes:
        facts: Such as ``since``, ``url``, ``socket`` …
    """

    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def current(cls, **facts: Any) -> "Holder":
        """The calling process."""
        return replace(cls.mine(), facts=facts)

    @classmethod
    def parse(cls, text: str | bytes) -> "Holder | None":
        """The holder in a file's text; None if it is not (yet) whole."""
        try:
            data = json.loads(text)
            found = cls.from_dict(data)
        except (ValueError, TypeError, KeyError):
            return None
        return replace(found, facts={name: fact for name, fact in data.items() if name not in found.to_dict()})

    def to_json(self) -> str:
        """One line of JSON, the inverse of :meth:`parse`."""
        return json.dumps({**self.to_dict(), **self.facts})

    def __str__(self) -> str:
        since = f", since {self.facts['since']}" if "since" in self.facts else ""
        url = f", at {self.facts['url']}" if self.facts.get("url") else ""
        return f"pid {self.pid}{since}{url}"


class LockFile:
    """An ``flock`` held by this process, on a file that says who it is. Make it with :meth:`acquire`."""

    def __init__(self, path: Path, fd: int, identity: Holder) -> None:
        self.path = path
        self.identity = identity
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path, what: str, **facts: Any) -> "LockFile":
        """Takes the lock and writes the caller's identity.

        Args:
            path: The lock file; made (mode 0600) if missing.
            what: The holder's role, for the message: ``"server"``.
            **facts: Kept beside the identity; ``since`` is added.

        Raises:
            HomeHeldError: Somebody alive holds it; the message names it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                other = Holder.parse(os.pread(fd, 65536, 0))
                if (other is not None and other.alive()) or time.monotonic() > deadline:
                    os.close(fd)
                    raise _held(path, what, other) from None
                time.sleep(_POLL_SECONDS)
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        lock = cls(path, fd, Holder.current(since=since, **facts))
        lock._write()
        return lock

    def update(self, **facts: Any) -> None:
        """Adds facts to what the file says."""
        self.identity = replace(self.identity, facts={**self.identity.facts, **facts})
        self._write()

    def release(self) -> None:
        """Forgets the identity, then drops the lock. The file stays: removing it would race with the next holder."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        data = self.identity.to_json().encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)


def _held(path: Path, what: str, other: Holder | None) -> HomeHeldError:
    who = str(other) if other is not None else "a process that does not say who it is"
    return HomeHeldError(
        f"the home {path.parent} is held by another {what}: {who}",
        hint="Use it as it is, stop it with `overnight down`, or choose another home with OVERNIGHT_HOME.",
        pid=other.pid if other else None,
        home=str(path.parent),
    )


def holder(path: Path) -> Holder | None:
    """Who holds the lock file, or None if nobody alive does. Never blocks longer than :data:`SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                found = Holder.parse(os.pread(fd, 65536, 0))
            if found is not None and found.alive():
                return found
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Replaces a file so that a reader, or a crash, sees the old or the new content and never a part.

    Raises:
        OSError: No space, no permission; the old content stays.
    """
    raw = data.encode() if isinstance(data, str) else data
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(raw)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def held(path: Path, what: str, **facts: Any) -> Iterator[LockFile]:
    """:meth:`LockFile.acquire` for a ``with`` block."""
    lock = LockFile.acquire(path, what, **facts)
    try:
        yield lock
    finally:
        lock.release()


def wait_until(condition: Callable[[], bool], seconds: float, poll_seconds: float = 0.02) -> bool:
    """Polls until the condition holds; False if it did not in time. For processes that are not our children."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_seconds)
    return True
