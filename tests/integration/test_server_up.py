"""`overnight up` for real: starting, adopting, restarting, being told to stop, being killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from overnight.core.errors import HomeHeldError, OvernightError
from overnight.core.inherited import inherited
from overnight.core.settings import Settings
from overnight.platform.identity import Holder, holder, wait_until
from overnight.platform.server.environment import settings_environment
from overnight.platform.up import UpEvent, run_up, stop

SLEEPER = """
import os, signal, sys, time
print("up", flush=True)
time.sleep(600)
"""

UP = """
import os, sys
from dataclasses import asdict
import json
from overnight.core.errors import OvernightError
from overnight.core.settings import build_settings
from overnight.platform.up import run_up
try:
    sys.exit(run_up(build_settings(os.environ), on_event=lambda e: print(json.dumps(asdict(e)), flush=True)))
except OvernightError as error:
    print(json.dumps({"error": error.to_dict()}), flush=True)
    sys.exit(1)
"""


@contextmanager
def new_home(home: Path) -> Iterator[Settings]:
    """A home in which nothing runs afterwards."""
    settings = Settings(home=home, pool="fake:2", grace_seconds=0.5, lease_seconds=20.0)
    settings.home.mkdir()
    yield settings
    stop(settings)
    assert holder(settings.paths.server_lock) is None and holder(settings.paths.node_lock) is None


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    with new_home(tmp_path / "home") as made:
        yield made


class Up:
    """`overnight up` in a process of its own, and what it says."""

    def __init__(self, settings: Settings) -> None:
        self.server: dict[str, Any] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", UP],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | settings_environment(settings),
        )

    def until(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event.get("kind") == "server":
                self.server = event["data"]
            if event.get("kind") == kind or (kind == "error" and "error" in event):
                return event
        raise AssertionError(f"`up` ended with {self.process.wait()} before it said {kind!r}")

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(60)


class Ups:
    """All that were started for a home. What a test leaves running, the next one finds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started: list[Up] = []

    def start(self) -> Up:
        """A further `up`, whatever runs already."""
        self.started.append(Up(self.settings))
        return self.started[-1]

    def running(self) -> Up:
        """One that has said where its server is."""
        for up in self.started:
            if up.process.poll() is None and up.server:
                return up
        up = self.start()
        up.until("server")
        return up

    def end(self) -> None:
        for up in self.started:
            if up.process.poll() is None:
                up.end()
            elif up.process.stdout is not None:
                up.process.stdout.close()


@contextmanager
def new_ups(settings: Settings) -> Iterator[Ups]:
    ups = Ups(settings)
    try:
        yield ups
    finally:
        ups.end()


@pytest.fixture
def ups(settings: Settings) -> Iterator[Ups]:
    with new_ups(settings) as made:
        yield made


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ups]:
    """A home for the tests of which each can go on with what another left."""
    with new_home(tmp_path_factory.mktemp("house") / "home") as settings, new_ups(settings) as made:
        yield made


def client_of(settings: Settings) -> httpx.Client:
    found = Holder.parse(settings.paths.server_file.read_bytes())
    assert found is not None
    headers = {"Authorization": f"Bearer {settings.paths.token_file.read_text().strip()}"}
    return httpx.Client(base_url=str(found.facts["url"]), headers=headers, trust_env=False, timeout=30)


def submit(settings: Settings, client: httpx.Client, text: str, **fields: object) -> str:
    script = settings.home / "script.py"
    script.write_text(text)
    run = {"kind": "command", "target": sys.executable, "argv": [str(script)]}
    # In the environment for which `up` has a warm process ready.
    where = {"workdir": str(settings.home), "python": sys.executable, "env": inherited(os.environ)}
    config = {"experiment": "sleep", "run": run, "args": "none", **where, **fields}
    answer = client.post("/v1/proposals", json={"config": config})
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["trials"][0]["name"]
    return name


def test_ctrl_c_yields_the_workers_and_stops_everything(settings: Settings, ups: Ups) -> None:
    up = ups.start()
    assert up.until("server")["data"]["adopted"] is False
    with client_of(settings) as client:
        name = submit(settings, client, SLEEPER)
        assert wait_until(lambda: client.get(f"/v1/trials/{name}").json()["state"] == "running", 30)
    node = holder(settings.paths.node_lock)
    assert node is not None
    assert up.end() == 0
    assert holder(settings.paths.server_lock) is None and not node.alive()
    assert not _processes_of(settings), "no process may be left"
    again = ups.start()
    again.until("server")
    with client_of(settings) as client:
        trial = client.get(f"/v1/trials/{name}").json()
        first = trial["attempts"][0]
        assert first["outcome"] == "preempted" and first["cause"].startswith("shutdown"), first
        assert trial["retries_used"] == 0
        assert wait_until(lambda: len(client.get(f"/v1/trials/{name}").json()["attempts"]) == 2, 30), "it goes on"
    assert again.end(signal.SIGTERM) == 0


def _processes_of(settings: Settings) -> list[str]:
    """Command lines that name the home."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(settings.home) in words:
            found.append(words)
    return found


def test_a_second_up_says_who_holds_the_home(house: Ups) -> None:
    first = house.running()
    error = house.start().until("error")["error"]
    assert error["code"] == "home_held" and "since" in error["message"]
    assert f"pid {first.process.pid}" in error["message"] and first.server["url"] in error["message"]


def test_a_killed_server_and_a_killed_node_are_started_again(house: Ups) -> None:
    up = house.running()
    first = up.server
    os.kill(first["pid"], signal.SIGKILL)
    assert "killed by SIGKILL" in str(up.until("restart")["message"])
    second = up.until("server")["data"]
    assert second["pid"] != first["pid"] and second["url"] == first["url"], "the address survives a restart"
    node = holder(house.settings.paths.node_lock)
    assert node is not None
    os.kill(node.pid, signal.SIGKILL)
    up.until("restart")
    assert up.until("node")["data"]["pid"] != node.pid


def test_a_killed_up_leaves_both_and_the_next_adopts_them(house: Ups) -> None:
    first = house.running()
    first.end(signal.SIGKILL)
    server, node = (holder(lock) for lock in (house.settings.paths.server_lock, house.settings.paths.node_lock))
    assert server is not None and node is not None
    second = house.start()
    assert second.until("node")["data"] == {"pid": node.pid, "adopted": True}
    second.until("server")
    assert second.server == {"pid": server.pid, "url": first.server["url"], "adopted": True}
    assert second.end() == 0
    assert not server.alive() and not node.alive()


def test_in_the_background_and_down(settings: Settings) -> None:
    events: list[UpEvent] = []
    assert run_up(settings, detach=True, on_event=events.append) == 0
    assert [event.kind for event in events] == ["node", "server"]
    assert httpx.get(f"{events[-1].data['url']}/v1/health", trust_env=False).status_code == 200
    found = holder(settings.paths.up_lock)
    assert found is not None and os.getsid(found.pid) != os.getsid(0)
    with pytest.raises(HomeHeldError, match=f"pid {found.pid}"):
        run_up(settings, detach=True)
    began = time.monotonic()
    assert stop(settings) is True
    assert time.monotonic() - began < 15
    assert stop(settings) is False


def test_down_works_without_an_up(house: Ups) -> None:
    house.running().end(signal.SIGKILL)
    assert stop(house.settings) is True
    assert stop(house.settings) is False


SAVES = """
import os, signal, sys, time
if os.environ["OVERNIGHT_ATTEMPT"] != "1":
    sys.exit()
def save(number, frame):
    time.sleep(3)  # longer than the node itself takes to stop, shorter than the grace
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""


def test_down_with_a_broken_token_says_so_and_trials_save_all_the_same(settings: Settings) -> None:
    settings = settings.model_copy(update={"grace_seconds": 8.0})
    run_up(settings, detach=True)
    with client_of(settings) as client:
        name = submit(settings, client, SAVES, resume={"signal": "TERM", "exit_code": 75})
        path = f"/v1/trials/{name}"
        assert wait_until(lambda: "up" in client.get(f"{path}/logs").json().get("text", ""), 60)
    settings.paths.token_file.write_bytes(b"")
    events: list[UpEvent] = []
    assert stop(settings, events.append) is True
    [told] = [event for event in events if event.data.get("error") == "bad_token_file"]
    assert "is empty" in told.message and f"rm {settings.paths.token_file}" in told.message
    settings.paths.token_file.unlink()
    run_up(settings, detach=True)
    with client_of(settings) as client:
        assert wait_until(lambda: client.get(path).json()["preemptions"] == 1, 60), client.get(path).json()
        assert client.get(path).json()["retries_used"] == 0


def test_what_the_server_says_about_its_start_reaches_the_caller(settings: Settings) -> None:
    settings.paths.token_file.write_text("x" * 43)
    settings.paths.token_file.chmod(0o644)
    with pytest.raises(OvernightError) as caught:
        run_up(settings, detach=True)
    assert caught.value.code == "bad_token_file" and "chmod 600" in caught.value.hint
    settings.paths.token_file.chmod(0o600)
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OvernightError) as caught:
            run_up(settings.model_copy(update={"port": port}), detach=True)
    assert caught.value.code == "port_taken" and str(port) in caught.value.message
