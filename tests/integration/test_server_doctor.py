"""The doctor answers on every kind of home, healthy or broken, and changes nothing."""

import socket
from pathlib import Path

import pytest

from overnight.core.settings import Settings
from overnight.platform import doctor
from overnight.platform.doctor import CHECKS, Finding, diagnose
from overnight.testing.server import RunningServer


def by_name(settings: Settings) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(settings)}


def test_a_home_that_does_not_exist_yet_is_no_problem(tmp_path: Path) -> None:
    home = tmp_path / "none"
    found = by_name(Settings(home=home, pool="fake:2"))
    assert list(found) == [name for name, _ in CHECKS]
    assert [f for f in found.values() if f.level == "problem"] == []
    assert found["server"].level == found["node"].level == "warning" and "overnight up" in found["server"].hint
    assert not home.exists(), "it only looks"


def test_every_problem_says_how_to_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text("")
    (home / "token").chmod(0o600)
    (home / "overnight.db").write_bytes(b"SQLite format 3\0" + b"garbage" * 5000)
    monkeypatch.setattr(doctor, "NO_BYTES", 2**70)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = by_name(Settings(home=home, pool="fake:2", port=taken.getsockname()[1]))
    for name in ("token", "database", "space", "port"):
        assert found[name].level == "problem" and found[name].hint, found[name]
    assert not any("Traceback" in f.message for f in found.values())


def test_a_missing_extra_names_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXTRAS, "server", ("no-such-package",))
    found = by_name(Settings(home=tmp_path, pool="cpu:1"))
    assert found["extras"].level == "problem" and "pip install 'overnight[server]'" in found["extras"].hint


def test_a_check_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings) -> Finding:
        raise ZeroDivisionError("x")

    monkeypatch.setattr(doctor, "CHECKS", (("broken", broken),))
    assert diagnose(Settings(home=tmp_path))[0].message == "the check failed: ZeroDivisionError: x"


def test_a_running_server_is_found(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "home") as server:
        found = by_name(Settings(home=server.home.root, pool="fake:1"))
        assert found["server"].ok and str(server.process.pid if server.process else "") in found["server"].message
        assert found["database"].ok and found["token"].ok and found["port"].ok


def test_a_token_of_no_use_does_not_make_the_server_look_dead(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "home") as server:
        server.home.token_file.write_text("")
        found = by_name(Settings(home=server.home.root, pool="fake:1"))
        assert found["server"].ok
        assert found["token"].level == "problem"
