"""The server's process: what keeps it from starting, how it stops, and what a full disk does to it."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_poll import LongPoll

from overnight.core import errors as e
from overnight.platform.identity import holder
from overnight.platform.server.exits import exit_code, is_final
from overnight.testing.server import RunningServer

ROOM_BYTES = 24 * 2**20


def refused(server: RunningServer, *arguments: str) -> tuple[int, str]:
    process = server.spawn(*arguments)
    code = process.wait(60)
    said = server.log.rpartition("overnight server: ")[2]
    assert "Traceback" not in said
    return code, said


def test_a_second_server_names_the_first_and_does_not_disturb_it(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "home") as server:
        assert server.process is not None
        code, said = refused(server)
        assert code == 10 and is_final(code)
        assert f"pid {server.process.pid}" in said and server.url in said
        assert server.client.get("/v1/status").status_code == 200


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = refused(RunningServer(tmp_path / "home"), "--port", str(port))
    assert code == 11 and str(port) in said and "--port 0" in said


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    code, said = refused(RunningServer(tmp_path / "home"), "--host", "192.0.2.1")
    assert code == 17 and "192.0.2.1" in said


@pytest.mark.parametrize(("content", "mode"), [("", 0o600), ("junk", 0o600), ("x" * 43, 0o644)])
def test_a_broken_token_file_is_named_with_the_way_out(tmp_path: Path, content: str, mode: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(content)
    (home / "token").chmod(mode)
    code, said = refused(RunningServer(home))
    assert code == 14 and str(home / "token") in said and ("rm " in said or "chmod 600" in said)
    assert holder(home / "server.lock") is None


def test_a_home_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = RunningServer(tmp_path / "home", OVERNIGHT_HOME=str(tmp_path))
    process = server.spawn("--home", str(tmp_path / "file" / "home"))
    assert process.wait(60) == 17 and "cannot be used" in server.log


def test_it_stops_at_once_and_lets_long_polls_go(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "home") as server:
        polls = [LongPoll(server.client, "/v1/events", after=999, wait=60) for _ in range(5)]
        with server.client.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("retry")
            for poll in polls:
                poll.until_arrived()
            assert server.stop() < 3.0, "far below the 60 s that they would wait"
            for _ in lines:
                pass
        assert [poll.until_answered().status_code for poll in polls] == [200] * 5
        assert not server.home.server_file.exists()
        server.start()
        events = server.client.get("/v1/events").json()["items"]
        assert [e["after"] for e in events if e["kind"] == "server"] == ["started", "stopped", "started"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few megabytes; skipped where mounting is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def body(i: int, size: int = 0) -> str:
    config = {"experiment": "disk", "run": {"kind": "script", "target": "t.py"}}
    return json.dumps({"config": config, "params": {"i": i, "pad": "x" * size}, "key": f"k{i}", "hold": True})


def test_a_full_disk_is_said_and_survived(small_disk: Path) -> None:
    with RunningServer(small_disk / "home") as server:
        acknowledged = [i for i in range(5) if server.client.post("/v1/proposals", content=body(i)).status_code == 200]
        assert acknowledged == list(range(5))
        free = shutil.disk_usage(small_disk).free
        with (small_disk / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, free - 65536)
        refusals = []
        for i in range(5, 60):
            answer = server.client.post("/v1/proposals", content=body(i, 20_000))
            if answer.status_code == 200:
                acknowledged.append(i)
            else:
                refusals.append(answer)
        assert refusals, "the disk was not full enough for this test"
        found = refusals[-1].json()["error"]
        assert refusals[-1].status_code == 503 and found["code"] == "store_full" and found["retryable"]
        assert server.client.get("/v1/status").status_code == 200, "reading goes on"
        (small_disk / "ballast").unlink()
        assert server.client.post("/v1/proposals", content=body(1_000)).status_code == 200, "it recovers by itself"
        acknowledged.append(1_000)
        stored = server.client.get("/v1/trials", params={"limit": 1000}).json()["items"]
        assert sorted(t["params"]["i"] for t in stored) == sorted(acknowledged)


def test_every_refusal_has_its_own_exit_code() -> None:
    codes = [exit_code(cls("x")) for cls in (e.HomeHeldError, e.PortTakenError, e.StoreFullError, e.BadTokenFileError)]
    assert len(set(codes)) == 4
    assert not is_final(exit_code(e.StoreFullError("x"))), "space may come back"
    assert not is_final(-9) and not is_final(1)
