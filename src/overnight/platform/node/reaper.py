"""Nothing survives an attempt: find every process that belongs to it, freeze, kill and reap until none is left.

Freezing first means that a program which forks faster than it is killed cannot outrun the walk. A supervisor is a
child subreaper, so that whatever its ranks leave behind becomes its child; when the supervisor itself was killed, the
daemon finds survivors by the mark in their environment, by session and by the supervisor's own census.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

from overnight.platform.node.identity import Identity, boot_id, read_stat

MARK = "OVERNIGHT_ATTEMPT_ID"
MARK_BYTES = 64
"""Room that a warm process reserves in its initial environment, for :func:`mark_process` to write into."""

_MARK_START = f"\0{MARK}=".encode()
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends; leaves at once if it has ended already.

    Args:
        parent: Pid of the process that forked this one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Takes :func:`die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def mark_process(attempt_id: str) -> None:
    """Writes the attempt's id into this process's *initial* environment, which ``/proc/PID/environ`` shows.

    ``os.environ`` changes never appear there; a process forked from a warm one would stay anonymous. Does nothing when
    no room was reserved (a cold start has the variable from ``exec``).
    """
    stat = read_stat(os.getpid())
    if stat is None or not stat.env_start:
        return
    region = ctypes.string_at(stat.env_start, stat.env_end - stat.env_start)
    key = f"{MARK}=".encode()
    place = 0 if region.startswith(key) else region.find(b"\0" + key) + 1
    if place == 0 and not region.startswith(key):
        return
    place += len(key)
    room = region.find(b"\0", place) - place
    value = attempt_id.encode()
    if room >= len(value):
        ctypes.memmove(stat.env_start + place, value.ljust(room, b"\0"), room)


def mark_of(pid: int) -> str | None:
    """The attempt id in a process's initial environment; None without one, or when it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123 - hot in a sweep
            data = b"\0" + file.read()
    except OSError:
        return None
    found = data.partition(_MARK_START)
    return found[2].partition(b"\0")[0].decode(errors="replace") if found[1] else None


def children(pid: int) -> list[int]:
    """Direct children, of all threads. Empty when the process is gone."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - hot in a sweep
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        pass
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    seen: list[int] = []
    pending = children(pid)
    while pending:
        one = pending.pop()
        seen.append(one)
        pending += children(one)
    return seen


def reap(on_exit: Callable[[int, int], None] | None = None) -> bool:
    """Collects every child that has ended, without waiting.

    Args:
        on_exit: Called with (pid, raw wait status) of each.

    Returns:
        Whether any child is left.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if on_exit is not None:
            on_exit(pid, status)


def kill_descendants(
    on_exit: Callable[[int, int], None] | None = None,
    deadline_seconds: float = 10.0,
    *,
    keep: Collection[int] = (),
) -> bool:
    """Ends every descendant of this process, which must be a subreaper and have one thread.

    Args:
        on_exit: As in :func:`reap`.
        deadline_seconds: Give up after this long: something cannot be killed (uninterruptible I/O).
        keep: Children that stay, and that have no children.

    Returns:
        Whether none is left. Having no other child proves it: every orphan becomes a child, and a child stays one
        until it is reaped, which nobody but this thread does.
    """
    ends_at = time.monotonic() + deadline_seconds
    rounds = 0
    me = os.getpid()
    while reap(on_exit) and not (keep and set(children(me)) <= set(keep)):
        if time.monotonic() >= ends_at:
            return False
        _freeze_and_kill(pid for pid in descendants(me) if pid not in keep)
        rounds += 1
        time.sleep(0.001 if rounds < 50 else 0.01)
    return True


def _freeze_and_kill(pids: Iterable[int]) -> None:
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def survivors(attempt_id: str, known: Iterable[Identity], orphans: Iterable[int] = ()) -> list[int]:
    """Living processes of an attempt whose supervisor is gone.

    Args:
        attempt_id: Processes that carry it as :data:`MARK` in their environment belong to it.
        known: The ranks and everything else in the supervisor's last census. A rank leads a session: its members
            belong, too, as long as :func:`_proven_sessions` says that it is still that session.
        orphans: Further pids that the caller knows to belong.
    """
    known = list(known)
    sessions = _proven_sessions(known)
    wanted = {one.pid for one in known if one.alive()} | {pid for pid in orphans if Identity.of(pid)}
    me = os.getpid()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == me:
            continue
        pid = int(name)
        # The cheapest question first: hundreds of processes are none of ours.
        if (_is_member(pid, sessions) or mark_of(pid) == attempt_id) and Identity.of(pid):
            wanted.add(pid)
    for pid in list(wanted):
        wanted.update(one for one in descendants(pid) if Identity.of(one))
    wanted.discard(me)
    return sorted(wanted)


def _proven_sessions(known: Iterable[Identity]) -> set[int]:
    """Sessions led by known processes that cannot be those of strangers.

    A session's number is its leader's pid, and the kernel gives it to nobody else while the session has a member, be it
    a zombie. So one known process in it, the same by its start time and boot, proves it. When none is left, the number
    may have passed on, to a session whose leader is gone as well.
    """
    known = list(known)
    led = {one.pid for one in known}
    found = set()
    for one in known:
        stat = read_stat(one.pid) if one.boot == boot_id() else None
        if stat is not None and stat.start == one.start and stat.session in led:
            found.add(stat.session)
    return found


def _is_member(pid: int, sessions: set[int]) -> bool:
    try:
        return os.getsid(pid) in sessions
    except OSError:
        return False


def sweep(
    attempt_id: str, known: Iterable[Identity], orphans: Callable[[], list[int]] = list, deadline_seconds: float = 5.0
) -> list[int]:
    """Kills :func:`survivors` until two looks in a row find none.

    Whoever was seen once belongs until it has ended: a process that exits has no environment any more, and its files,
    those of a device among them, are closed after that.

    Returns:
        Pids that are still there at the deadline.
    """
    known = set(known)
    ends_at = time.monotonic() + deadline_seconds
    clean_looks = 0
    while clean_looks < 2:
        left = survivors(attempt_id, known, orphans())
        known.update(one for pid in left if (one := Identity.of(pid)) is not None)
        if not left:
            clean_looks += 1
            continue
        clean_looks = 0
        if time.monotonic() >= ends_at:
            return left
        _freeze_and_kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    return []
