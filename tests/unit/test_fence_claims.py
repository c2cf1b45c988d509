"""Files by which a start announces its fence in a store: who is killed leaves one, and nobody takes a live one away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from place_lab import lay

from overnight.core.errors import FencedError
from overnight.trainer.checkpoint.fence import claim, clear_claims, next_attempt
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import LocalPlace, Token, fence_name
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import mark, sweep
from overnight.trainer.checkpoint.writing.tidying import Tidying

OLDER, SAME, NEWER = (f"{fence_name(token)}.claim-{'0f' * 8}" for token in (Token(1), Token(2), Token(2, 2)))


class Requests(LocalFileSystem):
    """A real file system behind fsspec that cannot create exclusively; something may happen before each request."""

    cachable = False

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.before = before

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.before()
        return super().ls(path, detail=detail, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        if mode == "create":
            raise NotImplementedError
        self.before()
        return super().pipe_file(path, value, **options)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.before()
        super().rm(path, recursive, maxdepth)


@pytest.fixture
def store(tmp_path: Path) -> RemotePlace:
    """A place that tokens 1.1 and 2.1 have claimed; three more starts were killed on the way."""
    (tmp_path / "checkpoints").mkdir()
    place = RemotePlace("store://trial", Requests(), str(tmp_path / "checkpoints"))
    claim(place, Token(1), None)
    claim(place, Token(2), None)
    for entry in (OLDER, SAME, NEWER):
        place.write(entry, b"")
    return place


def test_what_decides_nothing_any_more_goes_and_what_may_be_of_a_start_under_way_stays(store: RemotePlace) -> None:
    assert clear_claims(store, store.glance()) == [OLDER, SAME]
    assert store.entries() == sorted([fence_name(Token(1)), fence_name(Token(2)), NEWER])
    with pytest.raises(FencedError):
        claim(store, Token(2, 2), None)
    assert next_attempt(store) == 3
    claim(store, Token(3), None)
    assert clear_claims(store, store.glance()) == [NEWER]


@pytest.mark.parametrize("others", [[], [NEWER]])
def test_every_sweep_and_every_commit_takes_them_away(store: RemotePlace, tmp_path: Path, others: list[str]) -> None:
    local = LocalPlace(tmp_path / "checkpoints")
    if not others:
        store.remove(NEWER)
    newest = lay(local, 10, Token(2))
    Tidying().after(store, newest, Retention())
    assert [entry for entry in store.entries() if "claim" in entry] == others
    store.write(OLDER, b"")
    found = survey(store)
    sweep(found, mark(found, at_rest=False), PinWatch())
    assert [entry for entry in store.entries() if "claim" in entry] == others


def test_the_rest_is_tidied_in_the_same_pass(store: RemotePlace, tmp_path: Path) -> None:
    """A claim names a token; that it has gone is no new start."""
    store.remove(NEWER)
    store.write(f"{fence_name(Token(1, 5))}.claim-{'1f' * 8}", b"")
    local, tidying = LocalPlace(tmp_path / "checkpoints"), Tidying()
    lay(local, 5, Token(1))
    newest = lay(local, 10, Token(2), retention=Retention(keep=1).to_json())
    tidying.after(store, newest, Retention(keep=1))
    assert [gone.entry for gone in tidying.of_earlier(store, newest, None)] == ["step-5.attempt-1.1"]


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("rival", [Token(3), Token(4)])
def test_no_live_claim_is_raced(tmp_path: Path, at: int, rival: Token) -> None:
    """Before one of the requests of a claim somebody tidies, another start claims, and somebody tidies again."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    other = RemotePlace("store://trial", Requests(), str(root))
    claim(other, Token(1), None)
    won: list[str] = []
    count = 0

    def start(place: RemotePlace, token: Token, who: str) -> None:
        if place.create(fence_name(token), who.encode()):
            won.append(who)

    def meanwhile() -> None:
        nonlocal count
        count += 1
        if count - 1 == at:
            clear_claims(other, other.glance())
            start(other, rival, "rival")
            clear_claims(other, other.glance())

    start(RemotePlace("store://trial", Requests(meanwhile), str(root)), Token(3), "first")
    clear_claims(other, other.glance())
    if rival == Token(3):
        assert len(won) <= 1
        assert [other.read(fence_name(Token(3))).decode()] == won if won else Token(3) not in other.tokens()
    else:
        assert "first" in won
    assert not any("claim" in entry for entry in other.entries() if won)
    assert other.tokens()[0] == Token(1)
