"""Token file and roles: made once, closed to others, and every broken file has a way out."""

import threading
from pathlib import Path

import pytest

from overnight.core.enums import Role
from overnight.core.errors import BadTokenFileError, ForbiddenError, SetupError, UnauthorizedError
from overnight.platform.server.tokens import Principal, TokenBook, check_bind, ensure_token, is_loopback, read_token


def test_first_start_makes_a_closed_file_and_later_starts_read_it(tmp_path: Path) -> None:
    path = tmp_path / "home" / "token"
    token = ensure_token(path)
    assert len(token) >= 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert ensure_token(path) == read_token(path) == token
    assert [p.name for p in path.parent.iterdir()] == ["token"]


def test_racing_starts_agree_on_one_token(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_token(tmp_path / "token"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize(
    ("content", "mode", "word"),
    [
        (b"", 0o600, "empty"),
        (b"  \n", 0o600, "empty"),
        (b"short", 0o600, "does not hold a token"),
        (b"\xff\xfe" * 40, 0o600, "does not hold a token"),
        (b"a" * 43 + b"\n" + b"b" * 43, 0o600, "does not hold a token"),
        (b"x" * 43, 0o644, "open to other users"),
        (b"x" * 43, 0o620, "open to other users"),
    ],
)
def test_broken_files_are_named_with_the_way_out(tmp_path: Path, content: bytes, mode: int, word: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(BadTokenFileError) as caught:
        ensure_token(path)
    assert word in caught.value.message and str(path) in caught.value.message
    assert str(path) in caught.value.hint
    assert "xxxx" not in str(caught.value), "a message must not show the token"


def test_a_folder_instead_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(BadTokenFileError, match="cannot be read"):
        ensure_token(tmp_path / "token")


def test_the_book_knows_only_its_token() -> None:
    book = TokenBook("t" * 43)
    assert book.identify(b"Bearer " + b"t" * 43).role is Role.OPERATOR
    assert book.identify(b"bearer " + b"t" * 43).role is Role.OPERATOR
    for header in (None, b"", b"Bearer", b"Bearer ", b"Basic " + b"t" * 43, b"Bearer " + b"t" * 42, b"t" * 43):
        with pytest.raises(UnauthorizedError):
            book.identify(header)


@pytest.mark.parametrize(
    ("role", "right", "allowed"),
    [
        (Role.OPERATOR, Role.NODE, True),
        (Role.OPERATOR, Role.VIEWER, True),
        (Role.AGENT, Role.AGENT, True),
        (Role.AGENT, Role.VIEWER, True),
        (Role.AGENT, Role.OPERATOR, False),
        (Role.AGENT, Role.NODE, False),
        (Role.VIEWER, Role.AGENT, False),
        (Role.NODE, Role.AGENT, False),
        (Role.NODE, Role.NODE, True),
    ],
)
def test_roles(role: Role, right: Role, allowed: bool) -> None:
    if allowed:
        Principal("x", role).require(right)
    else:
        with pytest.raises(ForbiddenError, match=right.value):
            Principal("x", role).require(right)


def test_never_reachable_from_outside_without_tokens() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"):
        assert is_loopback(host)
        check_bind(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org", ""):
        assert not is_loopback(host)
        with pytest.raises(SetupError, match="without tokens"):
            check_bind(host, None)
        check_bind(host, TokenBook("t" * 43))


def test_an_unknown_token_is_told_which_one_counts() -> None:
    with pytest.raises(UnauthorizedError, match="started with") as caught:
        TokenBook("t" * 43).identify(b"Bearer " + b"u" * 43)
    assert "overnight token" in caught.value.hint and "OVERNIGHT_TOKEN" in caught.value.hint
