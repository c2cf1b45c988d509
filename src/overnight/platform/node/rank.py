"""What a rank becomes: a process of its own session that is told what to run, tidies itself and runs it.

A rank is forked before its order exists (a spare of the warm process) or right after; it waits on a socket, so that its
pid is on record before the first line of the user's code runs. Warm, the script is executed here, in a fresh permanent
``__main__``; cold, the process is replaced by the user's own command line.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from overnight.platform.node import reaper, script

CANNOT_EXECUTE = 126
NOT_FOUND = 127


@dataclass
class Seat:
    """A forked rank that waits for its order."""

    pid: int
    channel: socket.socket

    def send(self, order: dict[str, Any]) -> None:
        """Starts it. See :func:`become` for the order's keys.

        Raises:
            OSError: The rank is gone.
        """
        self.channel.sendall(json.dumps(order).encode())
        self.channel.close()


def fork_seat() -> Seat:
    """Forks a rank; it dies with this process."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Seat(pid, ours)
    try:
        os.setsid()
        reaper.die_with_parent(parent)
        reset_signals()
        descriptor = os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1 << 20)
        gc.freeze()  # what the parent is amid of must not be finalised here: its descriptors have new owners
        script.make_anew()
        _rehearse()
        order = _receive(descriptor)
        if order is not None:
            become(order)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"overnight: {type(error).__name__}: {error}\n".encode())
        os._exit(CANNOT_EXECUTE)
    os._exit(0)


def _rehearse() -> None:
    """Touches what a start will touch: a forked process pays for each page that it is the first to write to."""
    env = dict(os.environ)
    sample = {f"OVERNIGHT_REHEARSAL_{number}": "x" * (20 + number) for number in range(60)}
    json.loads(json.dumps({"words": ["python", "train.py"], "env": {**env, **sample}, "threads": 1}))
    _set_environment({**env, **sample})
    _set_environment(env)
    script.rehearse()


def reset_signals() -> None:
    """Python's own defaults, whatever the parent had set up."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _receive(descriptor: int) -> dict[str, Any] | None:
    data = bytearray()
    while chunk := os.read(descriptor, 1 << 16):
        data += chunk
    os.close(descriptor)
    value = json.loads(data) if data else None
    return value if isinstance(value, dict) else None


def become(order: dict[str, Any]) -> NoReturn:
    """Runs what the order says and never returns.

    Args:
        order: ``attempt_id``, ``log`` (path), ``cwd``, ``env``, ``words`` (the cold command line), ``warm`` (run
            inside this process), ``kind``, ``target``, ``argv``, ``threads``.
    """
    _open_streams(order["log"])
    env = order["env"]
    try:
        os.chdir(order["cwd"])
        if not order["warm"]:
            _execute(order["words"], env)
    except (OSError, ValueError) as error:
        _refuse(order, error)
    reaper.mark_process(order["attempt_id"])
    _set_environment(env)
    script.run(order)


def _open_streams(log: str) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in (nothing, output):
        if descriptor > 2:
            os.close(descriptor)


def _execute(words: list[str], env: dict[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would pass through exec
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execvpe(words[0], words, env)


def _refuse(order: dict[str, Any], error: OSError | ValueError) -> NoReturn:
    if isinstance(error, OSError) and not os.path.isdir(order["cwd"]):  # noqa: PTH112
        what = f"the working directory {order['cwd']!r} cannot be entered"
    else:
        what = f"{order['words'][0]!r} cannot be started"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    os.write(2, f"overnight: {type(error).__name__}: {what}: {reason}\n".encode(errors="backslashreplace"))
    os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE)


def _set_environment(env: dict[str, str]) -> None:
    for name in list(os.environ):
        if name not in env:
            del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.stdin = open(0, closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115
            descriptor, "w", buffering=1, closefd=False, encoding="utf-8", errors="backslashreplace"
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
