"""Who holds a home: locks, identities, atomic writes; with real processes."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from overnight.core.errors import HomeHeldError
from overnight.platform.identity import Holder, LockFile, holder, wait_until, write_atomic
from overnight.platform.node.identity import Identity, boot_id

HOLD = """
import sys, pathlib
from overnight.platform.identity import LockFile
lock = LockFile.acquire(pathlib.Path(sys.argv[1]), "server", url="http://x")
print("held", flush=True)
sys.stdin.read()
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def finish(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_second_holder_is_refused_with_the_firsts_name(tmp_path: Path) -> None:
    path = tmp_path / "server.lock"
    child = start_holder(path)
    try:
        with pytest.raises(HomeHeldError) as caught:
            LockFile.acquire(path, "server")
        assert f"pid {child.pid}" in caught.value.message
        assert "http://x" in caught.value.message
        assert caught.value.details["pid"] == child.pid
        found = holder(path)
        assert found is not None and found.pid == child.pid and found.facts["url"] == "http://x"
    finally:
        finish(child)


def test_sigkill_frees_the_lock_at_once(tmp_path: Path) -> None:
    path = tmp_path / "server.lock"
    child = start_holder(path)
    finish(child)
    assert holder(path) is None
    lock = LockFile.acquire(path, "server")
    assert holder(path) == lock.identity
    lock.release()
    assert holder(path) is None


def test_probing_does_not_make_an_acquirer_fail(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text(Holder(999_999_999, 1, boot_id()).to_json())
    probe = os.open(path, os.O_RDONLY)
    fcntl.flock(probe, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, os.close, [probe])
    timer.start()
    LockFile.acquire(path, "server").release()
    timer.join()


def test_a_reused_pid_is_not_the_same_process() -> None:
    me = Holder.current()
    assert me.alive()
    assert not Holder(me.pid, me.start - 1, me.boot).alive()
    assert not Holder(me.pid, me.start, "another-boot").alive()


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert Identity.of(child.pid) is not None
    os.kill(child.pid, signal.SIGKILL)
    try:
        assert wait_until(lambda: Identity.of(child.pid) is None, 5)
    finally:
        child.communicate()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": 1}', '{"pid": "x", "start": 1, "boot": ""}', "7"])
def test_half_written_identities_are_none(text: str) -> None:
    assert Holder.parse(text) is None


def test_update_keeps_older_facts(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    lock = LockFile.acquire(path, "server", a=1)
    lock.update(url="u")
    found = holder(path)
    assert found is not None and found.facts["a"] == 1 and found.facts["url"] == "u"
    lock.release()


def test_atomic_write_replaces_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    write_atomic(path, "one" * 1000)
    write_atomic(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["server.json"]


def test_failed_atomic_write_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    write_atomic(path, "old")

    with pytest.raises(TypeError):
        write_atomic(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["server.json"]
