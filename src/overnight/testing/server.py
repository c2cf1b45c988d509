"""A real server process on a home of its own, to be called, stopped, killed and started again by tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from overnight.core.models.node import DeviceReport, NodeHello, SpoolPost
from overnight.core.paths import Home
from overnight.platform.identity import Holder

START_SECONDS = 60.0
STOP_SECONDS = 20.0


class RunningServer:
    """``python -m overnight.platform.server`` as a child; a context manager that leaves no process behind.

    Args:
        home: Its home.
        **env: More variables, e.g. ``OVERNIGHT_LEASE_SECONDS="2"``.
    """

    def __init__(self, home: Path, **env: str) -> None:
        self.home = Home(home)
        self._env = env
        self.process: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        if self._client is not None:
            self._client.close()

    def spawn(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Starts a process without waiting for it; its output is in ``logs/server.log``."""
        self.home.logs.mkdir(parents=True, exist_ok=True)
        with (self.home.logs / "server.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "overnight.platform.server", "--home", str(self.home.root), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self._env,
            )

    def start(self) -> Self:
        """Starts it and waits until it listens.

        Raises:
            AssertionError: It does not; the message has its output.
        """
        self.process = self.spawn()
        deadline = time.monotonic() + START_SECONDS
        while self._announced() is None:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            assert time.monotonic() < deadline, f"the server does not listen:\n{self.log}"
            time.sleep(0.01)
        return self

    def stop(self) -> float:
        """SIGTERM; returns the seconds that it took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_SECONDS)
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    @property
    def log(self) -> str:
        """What it has printed."""
        return (self.home.logs / "server.log").read_text(errors="replace")

    @property
    def url(self) -> str:
        """Where it listens."""
        found = self._announced()
        assert found is not None, "the server is not listening"
        return str(found.facts["url"])

    @property
    def token(self) -> str:
        """The operator's token."""
        return self.home.token_file.read_text().strip()

    @property
    def client(self) -> httpx.Client:
        """A client with the token, at the present address."""
        if self._client is None or str(self._client.base_url).rstrip("/") != self.url:
            if self._client is not None:
                self._client.close()
            headers = {"Authorization": f"Bearer {self.token}"}
            # Without TLS there is no certificate; to read those of all authorities takes longer than most requests.
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=70.0, trust_env=False, verify=False)
        return self._client

    def _announced(self) -> Holder | None:
        try:
            found = Holder.parse(self.home.server_file.read_bytes())
        except OSError:
            return None
        return found if self.process is not None and found is not None and found.pid == self.process.pid else None


class ScriptedNode:
    """A node without processes: says over HTTP exactly what a test wants a node daemon and its supervisors to say.

    Args:
        client: A client of the server.
        num_devices: Fake devices that it has.
        name: Its name.
    """

    def __init__(self, client: httpx.Client, num_devices: int = 4, name: str = "box") -> None:
        self.client = client
        self.name = name
        self.devices = tuple(
            DeviceReport(index=i, kind="fake", type="fake", memory_bytes=2**30, uuid=f"{name}-{i}")
            for i in range(num_devices)
        )
        self.id = ""
        self._counter = 0
        self._seqs: dict[str, int] = {}

    def hello(self, attempts: tuple[str, ...] = (), dirty: tuple[str, ...] = ()) -> dict[str, Any]:
        """Registers; returns the welcome."""
        message = NodeHello(
            name=self.name,
            pid=os.getpid(),
            boot_id="b",
            version="1",
            devices=self.devices,
            attempts=attempts,
            dirty=dirty,
        )
        answer: dict[str, Any] = _ok(self.client.post("/v1/nodes", content=message.model_dump_json()))
        self.id = answer["node_id"]
        return answer

    def work(self, after: int | None = None, wait: float = 0.0) -> dict[str, Any]:
        """What should be on it."""
        params: dict[str, Any] = {"wait": wait} | ({} if after is None else {"after": after})
        answer: dict[str, Any] = _ok(self.client.get(f"/v1/nodes/{self.id}/work", params=params))
        return answer

    def launches(self, count: int = 1, seconds: float = 10.0) -> list[dict[str, Any]]:
        """Waits until there are that many launches."""
        deadline = time.monotonic() + seconds
        found = self.work()
        while len(found["launches"]) < count:
            assert time.monotonic() < deadline, f"only {len(found['launches'])} of {count} launches came"
            found = self.work(after=found["version"], wait=1.0)
        return list(found["launches"])

    def report(self, **parts: Any) -> None:
        """A ``NodeReport``."""
        self._counter += 1
        _ok(self.client.post(f"/v1/nodes/{self.id}/reports", json={"counter": self._counter} | parts))

    def spool(self, attempt_id: str, *events: tuple[str, dict[str, Any]], generation: int = 1) -> dict[str, Any]:
        """Spools events, numbered on; returns the answer."""
        answer: dict[str, Any] = _ok(self.post_spool(attempt_id, *events, generation=generation))
        return answer

    def post_spool(
        self, attempt_id: str, *events: tuple[str, dict[str, Any]], generation: int = 1, first: int | None = None
    ) -> httpx.Response:
        """As :meth:`spool`, but returns the response; ``first`` numbers the events from there."""
        self._counter += 1
        seq = self._seqs.get(attempt_id, 0) + 1 if first is None else first
        rows = [
            {"seq": seq + i, "kind": kind, "generation": generation, "at": time.time(), "data": data}
            for i, (kind, data) in enumerate(events)
        ]
        self._seqs[attempt_id] = max(self._seqs.get(attempt_id, 0), seq + len(rows) - 1)
        post = SpoolPost.model_validate({"counter": self._counter, "generation": generation, "events": rows})
        return self.client.post(f"/v1/attempts/{attempt_id}/spool", content=post.model_dump_json())

    def start(self, attempt_id: str) -> None:
        """The ranks run."""
        self.spool(attempt_id, ("started", {"pids": {"0": 1}, "warm": True}))

    def exit(self, attempt_id: str, *codes: int | None, ended: bool = True, **data: Any) -> None:
        """The ranks have ended, and (with ``ended``) no process is left."""
        self.spool(attempt_id, ("exit", {"exit_codes": list(codes or (0,)), "seconds": 1.0} | data))
        if ended:
            self.report(ended=[{"attempt_id": attempt_id}])


def _ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return response.json()
