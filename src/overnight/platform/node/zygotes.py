"""The daemon's side of the warm processes: one per interpreter and import-time environment, started when needed."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overnight.core.paths import Home
from overnight.platform.node import boot, command, reaper
from overnight.platform.node.identity import Identity

READY_SECONDS = 120.0
ANSWER_SECONDS = 10.0
MAX_FAILURES = 3
FORGET_SECONDS = 600.0
"""An interpreter of which several warm processes in a row never got ready is started cold for so long."""
MAX_ZYGOTES = 4

_log = logging.getLogger(__name__)


class ColdError(Exception):
    """This order cannot be served warm; the message says why."""


class ZygoteGoneError(Exception):
    """The warm process ended before it answered: whether it passed the order on is unknown."""


@dataclass(frozen=True)
class Key:
    """What must agree for an order to be served by a warm process."""

    python: str
    env: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, python: str, order_env: Mapping[str, str]) -> "Key":
        """The key of an order."""
        return cls(python, tuple(sorted(command.import_time_env(order_env).items())))

    @property
    def label(self) -> str:
        """Short name for log files."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]


class Zygote:
    """One warm process.

    Args:
        key: Whom it serves.
        home: Where its log goes.
    """

    def __init__(self, key: Key, home: Home) -> None:
        self.key = key
        self.used_at = asyncio.get_running_loop().time()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda done: done.exception())  # nobody may be waiting
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        log = home.logs / f"zygote-{key.label}.log"
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                boot.command(key.python, "zygote", {"fd": theirs.fileno(), "scratch": str(home.socket_dir)}),
                env=self._env(home),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        asyncio.get_running_loop().add_reader(self._channel, self._read)

    def _env(self, home: Home) -> dict[str, str]:
        return {
            **command.base_env(os.environ),
            **dict(self.key.env),
            "OPENBLAS_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OVERNIGHT_HOME": str(home.root),
            reaper.MARK: "-" * reaper.MARK_BYTES,
        }

    @property
    def alive(self) -> bool:
        """Whether it may still answer."""
        return self._channel.fileno() >= 0

    @property
    def failed(self) -> bool:
        """Whether it will never get ready."""
        return self._ready.done() and self._ready.exception() is not None

    async def launch(self, handover: dict[str, Any]) -> int:
        """Hands an order over.

        Returns:
            The supervisor's pid.

        Raises:
            ColdError: It will not serve this order.
            ZygoteGoneError: It ended meanwhile.
        """
        self.used_at = asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), READY_SECONDS)
        except TimeoutError:
            self.stop()
            raise ColdError(f"the warm process was not ready in {READY_SECONDS:g} s") from None
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[handover["token"]] = answer
        try:
            self._channel.send(json.dumps(handover).encode())
            said = await asyncio.wait_for(answer, ANSWER_SECONDS)
        except (OSError, TimeoutError):
            self.stop()
            raise ZygoteGoneError("the warm process does not answer") from None
        finally:
            self._answers.pop(handover["token"], None)
        if "declined" in said:
            if said["declined"] == "stale":
                self.stop()
            raise ColdError(str(said["declined"]))
        return int(said["pid"])

    def stop(self) -> None:
        """Ends it; supervisors that it has forked live on."""
        if not self.alive:
            return
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self._fail("the warm process ended")

    def _read(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.stop()
            return
        said = json.loads(data)
        if said.get("ready"):
            _log.info("warm process %d for %s has %s", said["pid"], self.key.python, ", ".join(said["modules"]))
            self._ready.set_result(None)
        elif "unfit" in said:
            self._fail(said["unfit"])
        elif (answer := self._answers.get(said.get("token", ""))) is not None and not answer.done():
            answer.set_result(said)

    def _fail(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(ColdError(why))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ZygoteGoneError(why))


class WarmPool:
    """All warm processes of a daemon.

    Args:
        home: Where logs go.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._zygotes: dict[Key, Zygote] = {}
        self._failures: dict[Key, dict[Zygote, float]] = {}

    def start(self, key: Key) -> Zygote:
        """The warm process of a key, started if there is none.

        Raises:
            ColdError: The interpreter cannot be started, or failed to get ready several times in a row.
        """
        zygote = self._zygotes.get(key)
        if zygote is not None and zygote.alive:
            return zygote
        since = asyncio.get_running_loop().time() - FORGET_SECONDS
        if sum(at > since for at in self._failures.get(key, {}).values()) >= MAX_FAILURES:
            raise ColdError("this interpreter could not be kept warm")
        if len(self._zygotes) >= MAX_ZYGOTES:
            self._evict()
        try:
            zygote = self._zygotes[key] = Zygote(key, self._home)
        except OSError as error:
            raise ColdError(f"{key.python}: {error.strerror}") from None
        return zygote

    async def launch(self, key: Key, handover: dict[str, Any]) -> int:
        """As :meth:`Zygote.launch`, by the right one."""
        zygote = self.start(key)
        try:
            pid = await zygote.launch(handover)
        except ColdError:
            if zygote.failed:  # one failure, however many launches were waiting for it
                self._failures.setdefault(key, {})[zygote] = asyncio.get_running_loop().time()
            raise
        self._failures.pop(key, None)
        return pid

    def pids(self) -> set[int]:
        """Pids of all warm processes."""
        return {zygote.process.pid for zygote in self._zygotes.values()}

    def reap(self) -> None:
        """Forgets warm processes that have ended."""
        for key, zygote in list(self._zygotes.items()):
            if zygote.process.poll() is not None:
                zygote.stop()
                del self._zygotes[key]

    def stop(self) -> None:
        """Ends all."""
        for zygote in self._zygotes.values():
            zygote.stop()
            zygote.process.wait()
        self._zygotes.clear()

    def _evict(self) -> None:
        oldest = min(self._zygotes.values(), key=lambda zygote: zygote.used_at)
        oldest.stop()
        oldest.process.wait()
        del self._zygotes[oldest.key]


def is_spare(pid: int) -> bool:
    """Whether a process was forked from a warm one and has no order yet: it leaves by itself."""
    mark = reaper.mark_of(pid)
    return Identity.of(pid) is not None and mark == "-" * reaper.MARK_BYTES
