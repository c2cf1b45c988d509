"""What must be true between two generations: nobody of the old one lives, and all that it said is heard."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from overnight.platform.node.wire import Client, Request, Server

REAP = """
import os, signal, sys, time
from overnight.platform.node import reaper

reaper.become_subreaper()
def fork(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid
def stay():
    while True: time.sleep(0.01)
def hop():
    os.setsid()
    while True:
        if os.fork(): os._exit(0)
        time.sleep(0.001)
keep = [fork(stay), fork(stay)]
ranks = {fork(stay), *(fork(hop) for _ in range(3))}
time.sleep(0.1)
ended = []
assert reaper.kill_descendants(lambda pid, status: ended.append(pid), keep=keep)
assert set(reaper.children(os.getpid())) == set(keep) == set(reaper.descendants(os.getpid()))
assert ranks <= set(ended) and not set(keep) & set(ended)
for pid in keep: os.kill(pid, 0)
time.sleep(0.1)
assert set(reaper.descendants(os.getpid())) == set(keep), "something had been missed"
assert reaper.kill_descendants()
assert reaper.children(os.getpid()) == []
"""


def test_all_but_the_spares_are_ended_however_fast_they_fork() -> None:
    for _ in range(3):
        subprocess.run([sys.executable, "-c", REAP], check=True, timeout=60)


def request(step: int) -> bytes:
    body = f'{{"step": {step}}}'
    return f"POST /v1/push HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


async def test_what_the_dead_had_sent_is_answered_and_nothing_of_theirs_comes_later(tmp_path: Path) -> None:
    heard: list[Any] = []
    waiting = asyncio.Event()

    async def answer(got: Request) -> tuple[int, Any]:
        if got.method == "GET":
            waiting.set()
            await asyncio.sleep(3600)  # a long-poll
        heard.append(got.json()["step"])
        return 200, {}

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen(16)
    server = Server(answer)
    await server.listen(listening)
    polling = asyncio.create_task(Client(f"unix:{tmp_path / 's'}").request("GET", "/v1/directive"))
    await waiting.wait()
    dead = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for number, one in enumerate(dead):
        one.connect(str(tmp_path / "s"))
        one.sendall(request(number))
        one.close()
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(tmp_path / "s"))
    await server.hear_out(0.5)
    assert sorted(heard) == [0, 1, 2, 3]
    silent.settimeout(5)
    assert silent.recv(1) == b"", "a connection that says nothing is dropped in the end"
    silent.close()
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    client = Client(f"unix:{tmp_path / 's'}")
    assert await client.request("POST", "/v1/push", {"step": 99}) == (200, {}), "who comes later is served"
    client.close()
    await server.close()


async def test_whoever_has_been_accepted_is_heard_however_early_it_is(tmp_path: Path) -> None:
    """Between its acceptance and its first task a connection of an asyncio server is nobody's."""
    heard: list[int] = []

    async def answer(got: Request) -> tuple[int, Any]:
        heard.append(got.json()["step"])
        return 200, {}

    for turns in range(8):
        heard.clear()
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / f"s{turns}"))
        listening.listen(16)
        server = Server(answer)
        await server.listen(listening)
        dead = socket.socket(socket.AF_UNIX)
        dead.connect(str(tmp_path / f"s{turns}"))
        dead.sendall(request(turns))
        dead.close()
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.hear_out(5)
        assert heard == [turns]
        await server.close()
