"""`overnight up`: keeps a node daemon and a server alive for a home, and takes everything down in order.

The node daemon and the server have sessions of their own, so that Ctrl-C reaches `up` alone: workers are told to yield
while the server still takes their reports, then the node stops, then the server. A second Ctrl-C kills. When `up`
itself is killed both live on, and the next `up` adopts them.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from overnight.core.errors import BadTokenFileError, SetupError
from overnight.core.settings import Settings
from overnight.platform.identity import Holder, LockFile, held, holder
from overnight.platform.node import client as node_client
from overnight.platform.node.identity import Identity, boot_id
from overnight.platform.server.environment import settings_environment
from overnight.platform.server.exits import error_of, is_final
from overnight.platform.server.tokens import ensure_token, read_token
from overnight.platform.switchboard import Switchboard
from overnight.platform.watch import Signals, Watched, remaining

Kind = Literal["node", "server", "restart", "stopping", "stopped"]

READY_SECONDS = 60.0
"""Longest start of a server: a migration of a large database may take a while, a hang must not."""

NODE_STOP_SECONDS = 10.0
SERVER_STOP_SECONDS = 5.0
YIELD_MARGIN_SECONDS = 15.0
"""Beyond the grace: SIGTERM, SIGKILL and the last reports of workers that did not listen."""

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 30.0
HEALTHY_SECONDS = 10.0


@dataclass(frozen=True)
class UpEvent:
    """Something that `up` did, for people and programs.

    Attributes:
        kind: What it is about.
        message: One sentence.
        data: Facts: ``pid``, ``url``, ``adopted``, ``code`` …
    """

    kind: Kind
    message: str
    data: dict[str, Any] = field(default_factory=dict)


OnEvent = Callable[[UpEvent], None]


def run_up(settings: Settings, detach: bool = False, on_event: OnEvent = lambda event: None) -> int:
    """Runs until told to stop (or with ``detach`` until the server answers); returns the exit code.

    Args:
        settings: Whose home.
        detach: Leave it running in the background, with its output in ``home/logs``.
        on_event: Told what happens.

    Raises:
        HomeHeldError: Another `up` looks after this home; the message says who, since when and where.
        OvernightError: The server cannot start; the message is its own.
    """
    if detach:
        from overnight.platform.detach import run_detached

        return run_detached(settings, on_event)
    ensure_token(settings.paths.token_file)
    settings.paths.logs.mkdir(parents=True, exist_ok=True)
    with held(settings.paths.up_lock, "`overnight up`") as lock, Signals() as signals:
        return _Up(settings, lock, signals, on_event).run()


class _Up:
    def __init__(self, settings: Settings, lock: LockFile, signals: Signals, on_event: OnEvent) -> None:
        self._settings = settings
        self._home = settings.paths
        self._lock = lock
        self._signals = signals
        self._tell = on_event
        self._node: Watched | None = None
        self._server: Watched | None = None

    def run(self) -> int:
        """Starts, watches, and takes down whatever happens."""
        try:
            # Each spends about a second on imports: side by side.
            launched = self._launch_server()
            self._start_node()
            self._ready(launched)
            self._watch()
        except _ServerDiedError as died:
            raise died.error from None
        finally:
            asked = max(1, self._signals.count)
            take_down(self._settings, self._node, self._server, self._tell, lambda: self._signals.count > asked)
        return 0

    def _start_node(self) -> None:
        found = holder(self._home.node_lock)
        adopted = found is not None
        self._node = Watched.open(found or node_client.spawn_daemon(self._settings))
        if self._node is None:
            raise SetupError(
                "the node daemon did not start", hint=f"Its last words are in {self._home.logs / 'node.log'}."
            )
        pid = self._node.identity.pid
        self._tell(UpEvent("node", f"node daemon is pid {pid}", {"pid": pid, "adopted": adopted}))

    def _start_server(self) -> None:
        self._ready(self._launch_server())

    def _launch_server(self) -> "_Launched":
        found = holder(self._home.server_lock)
        self._server = Watched.open(found) if found else None
        if self._server is not None:
            return _Launched(self._server, adopted=True)
        log = self._home.logs / "server.log"
        with log.open("ab") as output, Path(os.devnull).open("rb") as silence:
            said_from = output.tell()
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", "overnight.platform.server", "--home", str(self._home.root)],
                dict(os.environ) | settings_environment(self._settings),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, silence.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
                ],
                setsid=True,
            )
        self._server = Watched(Identity.of(pid) or Identity(pid, 0, boot_id()), os.pidfd_open(pid))
        return _Launched(self._server, adopted=False, said_from=said_from)

    def _ready(self, launched: "_Launched") -> None:
        """Waits until the server listens.

        Raises:
            _ServerDiedError: It ended, with its own words; or it takes too long.
        """
        server = launched.server
        deadline = time.monotonic() + READY_SECONDS
        while True:
            announced = _announced(self._home.server_file)
            if announced is not None and announced.pid == server.identity.pid:
                break
            if server.wait(0):
                words = _last_words(self._home.logs / "server.log", launched.said_from)
                raise _ServerDiedError(server.reap(), *words)
            if self._signals.asked():
                return
            if remaining(deadline) == 0:
                server.end(1.0)
                log = self._home.logs / "server.log"
                raise _ServerDiedError(None, f"the server does not listen after {READY_SECONDS:g} s", f"See {log}.")
            self._signals.sleep(0.02, [server])
        url = announced.facts.get("url", "")
        self._lock.update(url=url)
        verb = "goes on" if launched.adopted else "listens"
        facts = {"pid": server.identity.pid, "url": url, "adopted": launched.adopted}
        self._tell(UpEvent("server", f"server {verb} at {url}", facts))

    def _watch(self) -> None:
        node, server = _Pace(), _Pace()
        while not self._signals.asked():
            alive = [process for process in (self._node, self._server) if process is not None]
            self._signals.sleep(min(node.seconds, server.seconds), alive)
            if self._signals.asked():
                return
            if self._node is not None and self._node.wait(0):
                self._mourn("the node daemon", self._node, node)
                self._node = None
            if self._server is not None and self._server.wait(0):
                self._mourn("the server", self._server, server)
                self._server = None
            if self._node is None and node.due:
                self._try(self._start_node, node)
            if self._server is None and server.due:
                self._try(self._start_server, server)

    def _mourn(self, what: str, process: Watched, pace: "_Pace") -> None:
        code = process.reap()
        process.close()
        seconds = pace.died()
        later = f" in {seconds:.1f} s" if seconds else ""
        self._tell(UpEvent("restart", f"{what} ended ({_words(code)}); starting it again{later}", {"code": code}))

    def _try(self, start: Callable[[], None], pace: "_Pace") -> None:
        """Starts something again. What a restart would not cure ends `up`; anything else is tried later."""
        try:
            start()
        except (_ServerDiedError, SetupError) as error:
            if isinstance(error, _ServerDiedError):
                if error.code is not None and is_final(error.code):
                    raise
                self._server = None
            self._tell(UpEvent("restart", f"{error}; trying again in {pace.died():.1f} s"))
        else:
            pace.started()


@dataclass(frozen=True)
class _Launched:
    """A server that does not listen yet, perhaps; ``said_from`` is where its words begin in the log."""

    server: Watched
    adopted: bool
    said_from: int = 0


class _Pace:
    """When to start something again that has died: at once, then later and later while it does not live."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._due_at: float | None = None
        self.started()

    def started(self) -> None:
        """It runs."""
        self._began = time.monotonic()
        self._due_at = None

    def died(self) -> float:
        """It does not; returns the seconds until the next try."""
        if time.monotonic() - self._began > HEALTHY_SECONDS:
            self._pause = 0.0
        self._due_at = time.monotonic() + self._pause
        pause, self._pause = self._pause, min(max(self._pause * 2, FIRST_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
        return pause

    @property
    def seconds(self) -> float:
        """Until it is due; long while it runs."""
        return 3600.0 if self._due_at is None else remaining(self._due_at)

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return self._due_at is not None and remaining(self._due_at) == 0


class _ServerDiedError(Exception):
    """The server ended before it listened; ``error`` is what it said."""

    def __init__(self, code: int | None, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.error = error_of(code or 0)(message or f"the server did not start ({_words(code)})", hint=hint)


STOPPED = "node daemon and server are stopped"


def stop(settings: Settings, on_event: OnEvent = lambda event: None) -> bool:
    """Takes down what runs for a home (`overnight down`); False when nothing did.

    Asks the `up` that looks after it; without one (it was killed) does the same itself.
    """
    home = settings.paths
    found = holder(home.up_lock)
    up = Watched.open(found) if found else None
    if up is not None:
        on_event(
            UpEvent("stopping", f"asking `overnight up` (pid {up.identity.pid}) to stop", {"pid": up.identity.pid})
        )
        try:
            read_token(home.token_file)
        except BadTokenFileError as error:  # it will find the same, but says so elsewhere
            on_event(_cannot_tell_server(error))
        up.end(settings.grace_seconds + YIELD_MARGIN_SECONDS + NODE_STOP_SECONDS + SERVER_STOP_SECONDS)
    node, server = (
        Watched.open(identity) if identity else None for identity in (holder(home.node_lock), holder(home.server_lock))
    )
    if up is None and node is None and server is None:
        return False
    if node is not None or server is not None:
        take_down(settings, node, server, on_event, lambda: False)
    else:
        on_event(UpEvent("stopped", STOPPED))
    return True


def take_down(
    settings: Settings,
    node: Watched | None,
    server: Watched | None,
    on_event: OnEvent,
    impatient: Callable[[], bool],
) -> None:
    """Workers yield, then the node stops, then the server. ``impatient`` becoming true turns it into killing."""
    told = server is not None and server.alive and _yield_workers(settings, on_event, impatient)
    if node is not None:
        # Workers that the server has not told to save are told by the node, which then waits for them.
        yield_seconds = 0.0 if told else settings.grace_seconds + YIELD_MARGIN_SECONDS
        _stop_node(settings, node, yield_seconds + NODE_STOP_SECONDS, impatient)
    if server is not None:
        server.end(0.0 if impatient() else SERVER_STOP_SECONDS)
    on_event(UpEvent("stopped", STOPPED))


def _yield_workers(settings: Settings, on_event: OnEvent, impatient: Callable[[], bool]) -> bool:
    """Has the server tell the workers to save, and waits for them; whether it could be asked to."""
    board = Switchboard(settings)
    deadline = time.monotonic() + settings.grace_seconds + YIELD_MARGIN_SECONDS
    told = -1
    while not impatient() and remaining(deadline):
        try:
            live = board.shutdown()
        except BadTokenFileError as error:
            on_event(_cannot_tell_server(error))
            return False
        if live is None:
            return False
        if not live:
            return True
        if live != told:
            told = live
            words = "1 running trial saves and leaves" if live == 1 else f"{live} running trials save and leave"
            on_event(UpEvent("stopping", words, {"live": live}))
        time.sleep(0.1)
    return True


def _cannot_tell_server(error: BadTokenFileError) -> UpEvent:
    """The node stops its trials without the server, too; only the server hears of it later."""
    message = (
        f"{error.message}: the server cannot be told to let running trials save. The node tells them, and what they "
        f"saved counts from the next `overnight up` on. Before that: {error.hint}"
    )
    return UpEvent("stopping", message, {"error": error.code})


def _stop_node(settings: Settings, node: Watched, seconds: float, impatient: Callable[[], bool]) -> None:
    if impatient():
        node.end(0.0)
        return
    try:
        node_client.ask(settings.paths, {"op": "stop"})
    except OSError:
        node.signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while not node.wait(min(0.1, remaining(deadline))):
        if impatient() or not remaining(deadline):
            node.end(1.0)
            break
    node.close()


def _announced(path: Path) -> Holder | None:
    try:
        return Holder.parse(path.read_bytes())
    except OSError:
        return None


def _words(code: int | None) -> str:
    if code is None:
        return "how is unknown"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _last_words(log: Path, start: int) -> tuple[str, str]:
    """Message and hint that the server printed when it refused to start."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(1 << 20).decode(errors="replace")
    except OSError:
        return "", ""
    _, mark, said = text.rpartition("overnight server: ")
    if not mark:
        return "", f"Its last words are in {log}."
    message, _, hint = said.strip().partition("\n")
    return message, hint.strip()
