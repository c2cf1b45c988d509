"""The line to the supervisor: HTTP on its Unix socket, never in the way of training.

A sender thread batches what the loop says; a second thread holds a long-poll for directives. When the supervisor is
away, messages wait (bounded) and the loop goes on: nothing here raises into training.
"""

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overnight.core.enums import DirectiveAction
from overnight.trainer.owner import Owner

BATCH_SECONDS = 0.1
"""How long the sender gathers before it sends; reports do not wait."""

MAX_WAITING = 50_000
"""Metric rows and messages kept while the supervisor is away; beyond it the oldest metrics go."""

POLL_SECONDS = 20.0

PULSE_SECONDS = 1.0
"""How often the supervisor hears that a silent loop still gets on."""


@dataclass(frozen=True)
class Directive:
    """What the run is told. ``received`` is this process's monotonic clock, in seconds."""

    version: int = 0
    action: DirectiveAction = DirectiveAction.CONTINUE
    grace_seconds: float = 30.0
    reason: str = ""
    received: float = 0.0


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        """Connects to the socket's path instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def wire_number(value: float) -> float | str:
    """A number as JSON can carry it: NaN and the infinities become the texts ``nan``, ``inf`` and ``-inf``."""
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


class Link:
    """One rank's line to its supervisor; with ``path=None`` everything is dropped and nothing is started.

    Args:
        path: Path of the Unix socket.
        rank: Global rank of this process.
        pid: Its process id.
        pulse: What the process is at, as progress tells it; asked from the sender's thread. While it changes, the
            supervisor hears of it even if nothing else is said.
    """

    def __init__(self, path: str | None, rank: int, pid: int, pulse: Callable[[], dict[str, Any]] = dict) -> None:
        self._path = path
        self._rank = rank
        self._pid = pid
        self._pulse = pulse
        self._felt: dict[str, Any] = {}
        self._directive = Directive()
        self._messages: deque[tuple[str, dict[str, Any]]] = deque()
        self._rows: list[list[Any]] = []
        self._push: dict[str, Any] = {}
        self._state = threading.Condition()
        self._sending = False
        self._urgent = False
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._poll = UnixConnection(str(path), timeout_seconds=POLL_SECONDS + 10)
        self._is_away = False
        self._owner = Owner()
        self.dropped = 0

    @property
    def _is_silent(self) -> bool:
        """Whether nobody listens, or this is a forked child: it has no threads, and a lock may be held for good."""
        return self._path is None or not self._owner.is_here

    @property
    def directive(self) -> Directive:
        """The newest directive."""
        return self._directive

    def open(self) -> None:
        """Says hello and starts the two threads."""
        if self._path is None:
            return
        self.send("/v1/hello", {"pid": self._pid, "trainer": True})
        for target in (self._send_loop, self._poll_loop):
            thread = threading.Thread(target=target, name=f"overnight-{target.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def send(self, route: str, body: dict[str, Any]) -> None:
        """Queues a message that is sent at once, behind the metrics that came before it."""
        if self._is_silent:
            return
        with self._state:
            self._seal()
            self._messages.append((route, {"rank": self._rank, **body}))
            self._urgent = True
            self._state.notify_all()

    def push(
        self,
        step: int,
        phase: str,
        rows: list[list[Any]] | None = None,
        ledger: dict[str, dict[str, float]] | None = None,
    ) -> None:
        """Queues progress, metric rows ``[key, step, value, time]`` and ledger amounts for the next batch."""
        if self._is_silent:
            return
        with self._state:
            self._push |= {"step": step, "phase": phase}
            self._rows += rows or []
            if len(self._rows) > MAX_WAITING:
                self.dropped += len(self._rows) - MAX_WAITING
                del self._rows[: len(self._rows) - MAX_WAITING]
            if ledger:
                _add(self._push.setdefault("ledger", {}), ledger)
            self._state.notify_all()

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Waits until the supervisor has taken everything queued so far; False when it is away or too slow."""
        if self._is_silent:
            return True
        deadline = time.monotonic() + timeout_seconds
        with self._state:
            self._urgent = True
            self._state.notify_all()
            while self._messages or self._rows or self._push or self._sending:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._is_away or self._closed or not self._threads:
                    return False
                self._state.wait(remaining)
        return True

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Flushes and stops both threads; returns whether everything was delivered."""
        if self._is_silent:
            return True
        delivered = self.flush(timeout_seconds)
        with self._state:
            self._closed = True
            self._state.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                self._end_poll()  # again and again: the thread may be just about to connect
                thread.join(0.05)
        return delivered

    def _end_poll(self) -> None:
        waiting = self._poll.sock
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)

    def _seal(self) -> None:
        """Turns gathered progress and metrics into one message, so that order is kept. Caller holds the lock."""
        if self._push or self._rows:
            self._felt = self._pulse()
            body = {"rank": self._rank, **self._push, **self._felt}
            if self._rows:
                body["metrics"] = self._rows
            self._messages.append(("/v1/push", body))
            self._push, self._rows = {}, []

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        with self._state:
            while not (self._messages or self._push or self._rows):
                if self._closed:
                    return None
                if not self._state.wait(PULSE_SECONDS) and (pulse := self._pulse()) != self._felt:
                    self._felt = pulse
                    self._messages.append(("/v1/push", {"rank": self._rank, **pulse}))
            if not self._urgent and not self._closed:
                self._state.wait_for(lambda: self._urgent or self._closed, BATCH_SECONDS)
            self._seal()
            self._urgent = len(self._messages) > 1
            self._sending = True
            return self._messages[0]

    def _send_loop(self) -> None:
        connection = UnixConnection(str(self._path), timeout_seconds=10.0)
        pause_seconds = 0.05
        while (message := self._next()) is not None:
            answer = self._request(connection, "POST", *message)
            with self._state:
                self._sending = False
                self._is_away = answer is None
                if answer is not None:
                    self._messages.popleft()
                    self._trim()
                    pause_seconds = 0.05
                elif self._closed:
                    break
                else:
                    self._trim()
                    self._state.notify_all()
                    self._state.wait_for(lambda: self._closed, pause_seconds)
                    pause_seconds = min(2.0, 2 * pause_seconds)
                self._state.notify_all()
            if answer:
                self._obey(answer.get("directive"))
        connection.close()

    def _trim(self) -> None:
        while len(self._messages) > MAX_WAITING:
            self._messages.popleft()
            self.dropped += 1

    def _poll_loop(self) -> None:
        pause_seconds = 0.05
        while not self._closed:
            asked, version = time.monotonic(), self._directive.version
            route = f"/v1/directive?after={version}&wait={POLL_SECONDS:g}"
            answer = self._request(self._poll, "GET", route, None)
            if answer is None:
                with self._state:
                    self._state.wait_for(lambda: self._closed, pause_seconds)
                pause_seconds = min(2.0, 2 * pause_seconds)
            else:
                pause_seconds = 0.05
                self._obey(answer.get("directive", answer))
                if time.monotonic() - asked < 0.02 and self._directive.version == version:
                    with self._state:  # an answer that neither waited nor told us anything: do not spin
                        self._state.wait_for(lambda: self._closed, 0.5)
        self._poll.close()

    def _request(
        self, connection: UnixConnection, method: str, route: str, body: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """The answer; an empty one when the supervisor refused the message for good; None when it is away."""
        try:
            payload = None if body is None else json.dumps(body, allow_nan=False).encode()
            connection.request(method, route, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status >= 500:
                return None
            answer = json.loads(text) if response.status < 300 and text else {}
            return answer if isinstance(answer, dict) else {}
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            return None

    def _obey(self, raw: Any) -> None:
        if not isinstance(raw, dict) or int(raw.get("version", 0)) <= self._directive.version:
            return
        self._directive = Directive(
            version=int(raw["version"]),
            action=DirectiveAction(raw.get("action", "continue")),
            grace_seconds=float(raw.get("grace_seconds", 30.0)),
            reason=str(raw.get("reason", "")),
            received=time.monotonic(),
        )


def _add(target: dict[str, dict[str, float]], amounts: dict[str, dict[str, float]]) -> None:
    for kind, values in amounts.items():
        sums = target.setdefault(kind, {})
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
