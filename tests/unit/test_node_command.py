"""From orders to command lines and environments; process marks; launch locks; package checks; the wire."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.platform.node import command, launch_lock, packages, reaper
from overnight.platform.node.identity import Identity
from overnight.platform.node.wire import Client, HttpError, Request, Server, WireError


def order(**fields: Any) -> dict[str, Any]:
    run = {"kind": "command", "target": "python", "argv": ["train.py"]}
    base = {"run": run, "args": "flags", "params": {}, "python": None, "cwd": "/work", "env": {"PATH": "/nowhere"}}
    return base | fields


def test_params_become_words_by_style() -> None:
    params = {
        "lr": 0.001,
        "flag": True,
        "off": False,
        "none": None,
        "m": {"depth": 3, "empty": {}},
        "l": [1, "a"],
        "s": "-x",
    }
    assert command.param_words("flags", params) == [
        "--lr", "0.001", "--flag", "--no-off", "--none", "null", "--m.depth", "3", "--m.empty", "{}",
        "--l", '[1, "a"]', "--s=-x",
    ]  # fmt: skip
    assert command.param_words("hydra", {"lr": 1e-05, "name": "adam", "t": "true", "q": "it's \\"}) == [
        "lr=1e-05", "name=adam", "t='true'", "q='it\\'s \\\\'",
    ]  # fmt: skip
    assert command.param_words("json", {"a": {"b": 1}}) == ['{"a": {"b": 1}}']
    assert command.param_words("env", params) == command.param_words("none", params) == []
    assert command.param_env({"opt.lr": 0.1, "x y": "z"}) == {
        "OVERNIGHT_PARAM_OPT_LR": "0.1",
        "OVERNIGHT_PARAM_X_Y": "z",
    }


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_every_param_stays_within_its_own_words(params: dict[str, str]) -> None:
    words = command.param_words("flags", params)
    assert len(words) == sum(1 if value.startswith("-") else 2 for value in params.values())


def test_python_commands_are_recognised() -> None:
    plan = command.plan(order(), "/venv/bin/python")
    assert (plan.kind, plan.python, plan.target, plan.argv) == ("script", "/venv/bin/python", "train.py", ())
    run = {"kind": "command", "target": "bin/python3.12", "argv": ["-m", "pkg", "--x"]}
    plan = command.plan(order(run=run), "/venv/bin/python")
    assert (plan.kind, plan.python, plan.target, plan.argv) == ("module", "/work/bin/python3.12", "pkg", ("--x",))
    assert plan.words == ["/work/bin/python3.12", "-m", "pkg", "--x"]
    for argv in (["-X", "dev", "train.py"], ["-c", "print(1)"], []):
        run = {"kind": "command", "target": "python", "argv": argv}
        assert command.plan(order(run=run), "/p").kind == "command"
    assert command.plan(order(run={"kind": "command", "target": "bash", "argv": ["x.py"]}), "/p").kind == "command"


def test_the_nodes_own_environment_does_not_leak() -> None:
    environ = {"PATH": "/bin", "SECRET": "x", "OVERNIGHT_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "0", "LC_ALL": "C"}
    assert command.base_env(environ) == {"PATH": "/bin", "LC_ALL": "C"}
    assert command.import_time_env({"PYTHONPATH": "/a", "OMP_NUM_THREADS": "3", "HOME": "/"}) == {
        "PYTHONPATH": "/a", "PYTHONHASHSEED": "0",
    }  # fmt: skip


def test_a_warm_process_can_be_marked_and_found() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from overnight.platform.node import reaper; reaper.mark_process('att-marked'); print('x', flush=True);"
        "sys.stdin.read()"
    )
    source = str(Path(reaper.__file__).parents[3])
    env = {**os.environ, reaper.MARK: "-" * reaper.MARK_BYTES}
    with subprocess.Popen([sys.executable, "-c", code, source], stdin=-1, stdout=-1, env=env) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert reaper.mark_of(process.pid) == "att-marked"
        assert reaper.survivors("att-marked", []) == [process.pid]
        assert reaper.sweep("att-marked", []) == []
        process.wait(5)
        assert Identity.of(process.pid) is None


def test_an_identity_is_not_a_pid() -> None:
    mine = Identity.mine()
    assert mine.alive() and Identity.from_dict(mine.to_dict()) == mine
    assert not Identity(mine.pid, mine.start + 1, mine.boot).alive()
    assert Identity(mine.pid, mine.start + 1, mine.boot).pidfd() is None
    assert not Identity(mine.pid, mine.start, "another boot").alive()


def test_a_launch_happens_once(tmp_path: Path) -> None:
    first = launch_lock.stamp(tmp_path).token
    second = launch_lock.stamp(tmp_path).token
    assert first and second and first != second
    assert launch_lock.hold(tmp_path, first) is None
    held = launch_lock.hold(tmp_path, second)
    assert held is not None
    launch_lock.mark_held(held, second)
    assert launch_lock.is_held(tmp_path) and launch_lock.stamp(tmp_path) == (None, False)
    assert launch_lock.holder(tmp_path) == Identity.mine()
    (tmp_path / "pids.json").write_text("{}")
    os.close(held)
    assert not launch_lock.is_held(tmp_path) and launch_lock.stamp(tmp_path) == (None, True)


def test_folders_that_hide_loaded_modules_are_seen(tmp_path: Path) -> None:
    loaded = {"queue", "torch"}
    (tmp_path / "torch").mkdir()
    assert packages.clash(str(tmp_path), loaded) is None  # a namespace folder hides nothing
    (tmp_path / "torch" / "__init__.py").touch()
    assert packages.clash(str(tmp_path), loaded) == "torch"
    (tmp_path / "torch" / "__init__.py").unlink()
    (tmp_path / "queue.py").touch()
    assert packages.clash(str(tmp_path), loaded) == "queue"
    assert packages.clash("/nowhere", loaded) is None


async def _serve(handler: Any) -> tuple[Server, str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(handler)
    await server.listen(listening)
    return server, f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_the_wire_keeps_connections_and_survives_refusals() -> None:
    async def handler(request: Request) -> tuple[int, Any]:
        if request.path == "/boom":
            raise RuntimeError("bug")
        if request.path == "/no":
            raise HttpError(400, "no")
        return 200, {"path": request.path, "query": request.query, "body": request.json()}

    server, url = await _serve(handler)
    client = Client(url, "t")
    for _ in range(3):
        status, answer = await client.request("POST", "/a%20b?x=1&y=", {"k": "\u2603"})
        assert (status, answer) == (200, {"path": "/a b", "query": {"x": "1"}, "body": {"k": "\u2603"}})
    assert (await client.request("POST", "/boom"))[0] == 500
    assert (await client.request("POST", "/no"))[1]["error"]["message"] == "no"
    assert len(server._connections) == 1
    await server.close()
    with pytest.raises(WireError):
        await client.request("GET", "/", timeout_seconds=2)


async def test_a_kept_connection_that_died_is_opened_again() -> None:
    async def handler(request: Request) -> tuple[int, Any]:
        return 200, {}

    server, url = await _serve(handler)
    client = Client(url)
    await client.request("GET", "/")
    for task in list(server._connections):
        task.cancel()
    await asyncio.sleep(0)
    assert (await client.request("GET", "/"))[0] == 200
    client.close()
    await server.close()


@pytest.mark.parametrize("garbage", [b"", b"\x16\x03\x01" * 50 + b"\n", b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n"])
async def test_the_wire_survives_garbage(garbage: bytes) -> None:
    async def handler(request: Request) -> tuple[int, Any]:
        return 200, {}

    server, url = await _serve(handler)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(garbage)
    writer.write_eof()
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    client = Client(url)
    assert (await client.request("GET", "/"))[0] == 200
    client.close()
    await writer.wait_closed()
    await server.close()
