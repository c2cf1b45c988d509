"""What the tests of the node work with: a small real server on uvicorn, a daemon in its own process, orders."""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from overnight.core.paths import Home
from overnight.platform.node.control import make_socket_dir

TOKEN = "secret"


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """Polls until the condition is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.005)
    return value


class FakeServer:
    """The four endpoints of a node and its attempts, durable only in this object. Can be stopped and started again."""

    def __init__(self, home: Home, heartbeat_seconds: float = 0.5) -> None:
        self.home = home
        self.heartbeat_seconds = heartbeat_seconds
        self.launches: dict[str, dict[str, Any]] = {}
        self.keep: set[str] = set()
        self.kill: set[str] = set()
        self._version = 1
        self.directives: dict[str, dict[str, Any]] = {}
        self.spools: dict[str, list[dict[str, Any]]] = {}
        self.counters: dict[str, list[int]] = {}
        self.ended: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.hellos: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.stale: set[str] = set()
        self.problems: list[str] = []
        self.answers = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def version(self) -> int:
        """Of the work; whoever changes the work counts it up, and who waits for it is answered."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        self._answer_waiting()

    def start(self) -> None:
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=self.port, log_level="error", lifespan="off", ws="none",
            loop="asyncio", interface="asgi3",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server is not None and self._server.started, 10)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.home.token_file.write_text(TOKEN + "\n")
        self.home.server_file.write_text(json.dumps({"url": f"http://127.0.0.1:{self.port}"}))

    def stop(self, forget_address: bool = False) -> None:
        if self._server is None or self._thread is None:
            return
        self._server.force_exit = self._server.should_exit = True
        self._answer_waiting()
        self._thread.join(10)
        self._server = self._thread = None
        if forget_address:
            self.port = 0
            self.home.server_file.unlink(missing_ok=True)

    def order(self, order: dict[str, Any]) -> None:
        self.launches[order["attempt_id"]] = order
        self.keep.add(order["attempt_id"])
        self.version += 1

    def tell(self, attempt_id: str, action: str, grace_seconds: float = 10.0, reason: str = "") -> None:
        version = self.directives.get(attempt_id, {"version": 0})["version"] + 1
        self.directives[attempt_id] = {
            "version": version, "action": action, "grace_seconds": grace_seconds, "reason": reason,
        }  # fmt: skip
        self._answer_waiting()

    def events(self, attempt_id: str, kind: str | None = None) -> list[dict[str, Any]]:
        return [one for one in self.spools.get(attempt_id, []) if kind is None or one["kind"] == kind]

    def exit_of(self, attempt_id: str, seconds: float = 30.0) -> dict[str, Any]:
        events = wait_for(lambda: self.events(attempt_id, "exit"), seconds, f"exit of {attempt_id}")
        return events[0]["data"]

    def wait_ended(self, attempt_id: str, seconds: float = 30.0) -> dict[str, Any]:
        return wait_for(
            lambda: next((one for one in self.ended if one["attempt_id"] == attempt_id), None), seconds, "ended"
        )

    # -- the application, as plain ASGI

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if headers.get("authorization") != f"Bearer {TOKEN}":
            status, answer = 401, {"error": {"code": "unauthorized"}}
        else:
            query = dict(part.split("=") for part in scope["query_string"].decode().split("&") if part)
            status, answer = await self._route(
                scope["method"], scope["path"].split("/")[2:], query, json.loads(body or b"{}")
            )
        self.answers += 1
        data = json.dumps(answer).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": data})

    async def _route(
        self, method: str, parts: list[str], query: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, Any]:
        match (method, *parts):
            case ("POST", "nodes"):
                self.hellos.append(body)
                return 200, {"node_id": "node-1", "heartbeat_seconds": self.heartbeat_seconds, "probe_seconds": 1.0}
            case ("GET", "nodes", _, "work"):
                await self._wait(lambda: self.version != int(query["after"]), float(query["wait"]))
                return 200, {
                    "version": self.version, "launches": list(self.launches.values()), "keep": sorted(self.keep),
                    "kill": sorted(self.kill),
                }  # fmt: skip
            case ("POST", "nodes", _, "reports"):
                self.reports.append(body)
                for one in body["ended"]:
                    self.ended.append(one)
                    self._forget(one["attempt_id"])
                for one in body["failed"]:
                    self.failed.append(one)
                    self._forget(one["attempt_id"])
                return 200, {"ok": True}
            case ("POST", "attempts", attempt_id, "spool"):
                return self._ingest(attempt_id, body)
            case ("GET", "attempts", attempt_id, "directive"):
                if attempt_id in self.stale:
                    return 409, {"error": {"code": "stale_attempt"}}
                await self._wait(lambda: self._directive(attempt_id)["version"] > int(query["after"]), 5.0)
                return 200, self._directive(attempt_id)
        return 404, {"error": {"code": "no_route"}}

    def _forget(self, attempt_id: str) -> None:
        self.launches.pop(attempt_id, None)
        self.keep.discard(attempt_id)
        self.kill.discard(attempt_id)
        self.version += 1

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # of a start of the server
            self._loop, self._changed = loop, asyncio.Event()
        deadline = loop.time() + seconds
        while not condition() and not self._stopping and (left := deadline - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    @property
    def _stopping(self) -> bool:
        return self._server is None or self._server.should_exit

    def _answer_waiting(self) -> None:
        """Has the conditions of all who wait looked at again; from any thread."""

        def wake() -> None:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop of a server that has been stopped
                self._loop.call_soon_threadsafe(wake)

    def _directive(self, attempt_id: str) -> dict[str, Any]:
        first = {"version": 0, "action": "continue", "grace_seconds": 10.0, "reason": ""}
        return self.directives.get(attempt_id, first)

    def _ingest(self, attempt_id: str, body: dict[str, Any]) -> tuple[int, Any]:
        if attempt_id in self.stale:
            return 409, {"error": {"code": "stale_attempt"}}
        spool = self.spools.setdefault(attempt_id, [])
        self.counters.setdefault(attempt_id, []).append(body["counter"])
        for event in body["events"]:
            if event["seq"] == len(spool) + 1:
                spool.append(event)
            elif event["seq"] > len(spool) + 1:
                self.problems.append(f"gap: {event['seq']} after {len(spool)}")
            elif spool[event["seq"] - 1] != event:
                self.problems.append(f"event {event['seq']} changed between two posts")
            if event["kind"] == "started":
                self.launches.pop(attempt_id, None)
        return 200, {"acked": len(spool), "directive": self._directive(attempt_id)}


class Lab:
    """A home with a fake server and daemons.

    Args:
        python: The interpreter of the orders. A bare one gets warm in no time, for scripts that need no library.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self.python = python
        self.root = Path(tempfile.mkdtemp(prefix="ovn-"))
        self.home = Home(self.root)
        self.home.logs.mkdir()
        make_socket_dir(self.home.socket_dir)
        self.server = FakeServer(self.home)
        self.server.start()
        self.preload = True
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.code = self.root / "work"
        self.code.mkdir()

    def daemon(self, cold: bool = False, **extra: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "overnight.platform.node", "--home", str(self.root), "--pool", "cpu:2"]
        words += ["--term-seconds", "2"]  # who ignores SIGTERM does not heed it in 10 seconds either
        for name, value in extra.items():
            words += [f"--{name.replace('_', '-')}", value]
        words += ["--cold"] if cold or self.python != sys.executable else []
        self.preload = self.preload and not cold
        with (self.home.logs / "node.log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        self.daemons.append(process)
        return process

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    def order(self, target: str, kind: str = "script", **fields: Any) -> dict[str, Any]:
        attempt_id = fields.pop("attempt_id", f"att-{secrets.token_hex(6)}")
        trial_id = fields.pop("trial_id", f"tri-{attempt_id[4:]}")
        num_ranks = fields.pop("num_ranks", 1)
        order = {
            "attempt_id": attempt_id, "trial_id": trial_id, "trial_name": "exp-1", "experiment": "exp", "number": 1,
            "generation": 1, "node_id": "node-1", "devices": [{"id": "d0", "index": 0, "kind": "cpu"}],
            "world_size": num_ranks, "ranks": list(range(num_ranks)),
            "run": {"kind": kind, "target": target, "argv": fields.pop("argv", [])}, "args": "flags", "params": {},
            "python": self.python, "cwd": str(self.code), "code": None, "code_links": {},
            "env": {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
            "trial_dir": str(self.home.trial_dir(trial_id)), "attempt_dir": str(self.home.attempt_dir(trial_id, 1)),
            "checkpoints": str(self.home.checkpoints(trial_id)), "objective": None, "resume": None, "seed": 7,
            "mlflow_run_id": None, "mlflow_experiment": "exp", "server_file": str(self.home.server_file),
            "token_file": str(self.home.token_file), "grace_seconds": 5.0, "max_seconds": None, "threads": 1,
            "preload": self.preload,
        }  # fmt: skip
        return order | fields

    def run(self, target: str, **fields: Any) -> str:
        order = self.order(target, **fields)
        self.server.order(order)
        return str(order["attempt_id"])

    def folder(self, attempt_id: str) -> Path:
        return self.home.attempt_dir(f"tri-{attempt_id[4:]}", 1)

    def log(self, attempt_id: str, rank: int = 0) -> str:
        path = self.folder(attempt_id) / ("out.log" if rank == 0 else f"out.{rank}.log")
        return path.read_text(errors="replace") if path.exists() else ""

    def pids(self, attempt_id: str) -> dict[str, Any]:
        path = self.folder(attempt_id) / "pids.json"
        return wait_for(lambda: path.exists() and json.loads(path.read_text()), 30, "pids.json")

    def alive(self, attempt_id: str) -> list[int]:
        """Every process that has anything to do with an attempt."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and attempt_id.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        for process in self.daemons:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.daemons:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.server.stop()
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.home.socket_dir, ignore_errors=True)


@contextlib.contextmanager
def lab(python: str = sys.executable) -> Iterator[Lab]:
    made = Lab(python)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def warm_lab(python: str = sys.executable) -> Iterator[Lab]:
    """A lab for many tests: its daemon's warm process is ready, and nothing that its server heard was out of order.

    The lab of this interpreter is one for all test files of a session: its warm process takes seconds to start.
    """
    with contextlib.nullcontext(_shared_lab()) if python == sys.executable else lab(python) as made:
        if all(daemon.poll() is not None for daemon in made.daemons):
            made.daemon()
            made.server.exit_of(made.run(made.script("print('ready')", "warmup.py")), 120)
        yield made
        assert made.server.problems == []


@functools.cache
def _shared_lab() -> Lab:
    made = Lab()
    atexit.register(made.close)
    return made


def bare_python(folder: Path) -> str:
    """A real interpreter without any library, at least where this one has its own in a virtual environment."""
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")
