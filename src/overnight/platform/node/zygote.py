"""The warm process of one interpreter: it has imported what takes seconds, and forks supervisors that have it too.

It has exactly one thread, and never runs a tensor operator, draws a random number or asks for CUDA: whatever it started
would be broken in its children. One supervisor with one rank is forked in advance and waits, so that an order costs
a message and no fork.

Standard library only (what it preloads apart): runs in the user's interpreter.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from overnight.platform.node import packages, rank, reaper, rehearsal, supervisor

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "threadpoolctl",
    "overnight.trainer.execution",  # overnight.trainer alone loads its parts when they are asked for
)
SPARE_DELAY_SECONDS = 0.05
"""A new spare is forked this long after the last order: not while the trial that took the old one starts."""

_MESSAGE_BYTES = 1 << 16


def main(message: dict[str, Any]) -> NoReturn:
    """Serves the daemon at the other end of a socket until it is gone.

    Args:
        message: ``scratch``, a folder for short-lived files; ``fd``, a SEQPACKET socket of JSON messages. In:
            handovers (see :func:`supervisor.main`) with ``kind``, ``folder`` (which the script puts on
            ``sys.path``). Out: ``{"ready": true, "pid", "modules", "threads"}``, then for each handover ``{"token",
            "pid"}`` or ``{"token", "declined": why}``.
    """
    channel = socket.socket(fileno=message["fd"])
    channel.set_inheritable(False)
    modules = _preload()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads != 1:
        _tell(channel, {"unfit": f"preloading started {threads - 1} further threads"})
        os._exit(1)
    _tidy()
    zygote = Zygote(channel, message["scratch"])
    zygote.prepare()
    _tell(channel, {"ready": True, "pid": os.getpid(), "modules": modules, "threads": threads})
    zygote.serve()


def _preload() -> list[str]:
    loaded = []
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # a script that needs it says so itself
        except Exception as error:
            print(f"preload of {name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        loaded.append(name)
    return loaded


def _tidy() -> None:
    """Drops what belongs to this process and must not be ended again by every child."""
    keep: list[Callable[[], Any]] = [logging.shutdown, multiprocessing.util._exit_function]  # type: ignore[attr-defined]
    finalize: Any = weakref.finalize
    keep.append(finalize._exitfunc)
    dataloader = sys.modules.get("torch.utils.data._utils")
    if dataloader is not None:
        keep.append(dataloader._set_python_exit_flag)
    global _finalizers
    _finalizers = dict(finalize._registry)  # referenced for ever: their callbacks must not run
    finalize._registry.clear()
    atexit._clear()
    for handler in keep:
        atexit.register(handler)
    finalize._registered_with_atexit = True
    gc.collect()
    gc.freeze()


_finalizers: dict[Any, Any] = {}


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        channel.send(json.dumps(message).encode())


class Zygote:
    """The serving loop. ``channel`` leads to the daemon; ``scratch`` is a folder for short-lived files."""

    def __init__(self, channel: socket.socket, scratch: str) -> None:
        self._channel = channel
        self._scratch = scratch
        self._spare: tuple[int, socket.socket] | None = None
        self._watched = packages.watched_places()
        self._signature = packages.signature(self._watched)
        self._loaded = packages.loaded_names()
        self._wake, wake_up = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)

    def prepare(self) -> None:
        """Makes sure that a spare waits."""
        if self._spare is None:
            self._spare = self._fork()
            # Forking makes all of our memory copy-on-write: take the page faults of the next check now.
            self._unfit_for({"folder": "/"})

    def serve(self) -> NoReturn:
        """Answers the daemon until it is gone."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(SPARE_DELAY_SECONDS * 1000 if not self._spare else None)}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                reaper.reap(self._on_exit)
            if self._channel.fileno() in ready:
                self._take_order()
            elif not ready:
                self.prepare()

    def _on_exit(self, pid: int, status: int) -> None:
        if self._spare is not None and self._spare[0] == pid:
            self._spare[1].close()
            self._spare = None

    def _take_order(self) -> None:
        try:
            data = self._channel.recv(_MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            os._exit(0)
        order = json.loads(data)
        why = self._unfit_for(order)
        if why is not None:
            _tell(self._channel, {"token": order["token"], "declined": why})
            return
        for _ in range(2):  # a spare may have been killed a moment ago
            pid, channel = self._spare or self._fork()
            self._spare = None
            try:
                channel.send(data)
            except OSError:
                continue
            finally:
                channel.close()
            _tell(self._channel, {"token": order["token"], "pid": pid})
            return
        _tell(self._channel, {"token": order["token"], "declined": "a supervisor could not be forked"})

    def _unfit_for(self, order: dict[str, Any]) -> str | None:
        if packages.signature(self._watched) != self._signature:
            return "stale"
        name = packages.clash(order["folder"], self._loaded)
        return None if name is None else f"the script's folder has its own {name!r}"

    def _fork(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        try:
            self._become_spare(theirs, parent)
        finally:
            os._exit(1)

    def _become_spare(self, theirs: socket.socket, parent: int) -> NoReturn:
        os.setsid()
        reaper.die_with_parent(parent)
        reaper.become_subreaper()
        rank.reset_signals()
        descriptor = os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1 << 20)
        seat = rank.fork_seat()
        rehearsal.rehearse(self._scratch)
        data = os.read(descriptor, _MESSAGE_BYTES)
        os.close(descriptor)
        if not data:
            os._exit(0)
        reaper.outlive_parent()
        handover = json.loads(data)
        log = os.open(Path(handover["dir"], "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.dup2(log, 1)
        os.close(log)
        supervisor.main(handover, seat)
