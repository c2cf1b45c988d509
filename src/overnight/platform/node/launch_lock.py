"""``launch.lock`` makes a launch happen once, whatever races: two orders, two daemons, a daemon that dies half-way.

A launcher stamps the file with a token under ``flock`` before it starts a supervisor, and hands the token over. The
supervisor takes the lock for life, and starts its ranks only if the stamp is still that token. So a held lock *is* a
living supervisor, and a launcher that finds it free may stamp anew: whoever still comes with the old token leaves.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overnight.platform.node.files import write_json
from overnight.platform.node.identity import Identity

NAME = "launch.lock"
PIDS = "pids.json"
_STAMP_SECONDS = 2.0


class Claim(NamedTuple):
    """What :func:`stamp` found.

    Attributes:
        token: To hand over to a supervisor; None when there is nothing to launch.
        over: A supervisor ran and is gone: the attempt is to be buried, never launched again.
    """

    token: str | None
    over: bool = False


def stamp(folder: Path) -> Claim:
    """Claims the launch, unless a supervisor lives or lived.

    ``pids.json`` is written before a rank runs, so that its absence proves that no code of the user has.

    Raises:
        OSError: The folder cannot be written.
    """
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(descriptor, _STAMP_SECONDS):
            return Claim(None)
        if (folder / PIDS).exists():
            return Claim(None, over=True)
        token = secrets.token_hex(8)
        _write(descriptor, {"token": token, "launcher": Identity.mine().to_dict()})
        return Claim(token)
    finally:
        os.close(descriptor)


def hold(folder: Path, token: str) -> int | None:
    """Takes the lock for this process's life, as the supervisor with this token.

    Returns:
        The descriptor to keep, or None if the launch was given to someone else.
    """
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if _lock(descriptor, _STAMP_SECONDS) and _read(descriptor).get("token") == token:
        return descriptor
    os.close(descriptor)
    return None


def is_held(folder: Path) -> bool:
    """Whether a supervisor lives. A launcher that stamps at this very moment looks like one."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _lock(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, seconds: float) -> bool:
    """Tries for a while: a launcher holds it for microseconds only, a supervisor for life."""
    ends_at = time.monotonic() + seconds
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= ends_at or _read(descriptor).get("held"):
            return False
        time.sleep(0.002)


def mark_held(descriptor: int, token: str) -> None:
    """Says in the file that the holder is a supervisor, so that others need not wait to find out."""
    _write(descriptor, {"token": token, "held": True, "supervisor": Identity.mine().to_dict()})


def write_pids(folder: Path, ranks: Mapping[int, int], census: Iterable[int]) -> None:
    """Says who belongs to the attempt, for whoever buries it should its supervisor be killed. As that supervisor.

    Args:
        folder: The attempt's.
        ranks: Pids by rank.
        census: Further pids.

    Raises:
        OSError: The file cannot be written.
    """
    mine = Identity.mine()
    known = {str(rank): identity.to_dict() for rank, pid in ranks.items() if (identity := Identity.of(pid))}
    further = [[pid, identity.start] for pid in sorted(census) if (identity := Identity.of(pid))]
    write_json(folder / PIDS, {"supervisor": mine.to_dict(), "ranks": known, "census": further, "boot": mine.boot})


def mark_restarted(descriptor: int) -> None:
    """The ranks start again: the file's time of change is that of the newest launch, as those who measure it expect."""
    os.utime(descriptor)


def holder(folder: Path) -> Identity | None:
    """The supervisor that holds, or last held, the lock; None if none ever did."""
    try:
        value = json.loads((folder / NAME).read_bytes())
        return Identity.from_dict(value["supervisor"])
    except (OSError, ValueError, KeyError):
        return None


def _read(descriptor: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(descriptor: int, value: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(value).encode(), 0)
