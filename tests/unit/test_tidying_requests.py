"""What tidying after a commit asks of a store: each folder is listed once, however many rules look at it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from place_lab import begin, lay, steps

from overnight.trainer.checkpoint.pins import pin
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.writing.tidying import Tidying

BASE, OTHER_BASE = "base-" + "0f" * 16, "base-" + "a0" * 16
RULES = Retention(keep=3)


class CountingFiles(LocalFileSystem):
    """A real file system behind fsspec that counts how often each folder is listed."""

    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.listed: Counter[str] = Counter()
        self.read: Counter[str] = Counter()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.listed[Path(path).name] += 1
        return super().ls(path, detail=detail, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.read[Path(path).name] += 1
        return super().cat_file(path, *arguments, **options)


@pytest.fixture
def local(tmp_path: Path) -> LocalPlace:
    """Attempt 1 reached step 20, attempt 2 has gone on from there."""
    place = LocalPlace(tmp_path / "checkpoints")
    begin(place, Token(1))
    for step in (10, 20):
        lay(place, step, bases=[BASE], retention=RULES.to_json())
    begin(place, Token(2), CheckpointName(20, Token(1)))
    for step in (30, 40):
        lay(place, step, Token(2), bases=[BASE], retention=RULES.to_json())
    return place


@pytest.fixture
def files() -> CountingFiles:
    return CountingFiles()


@pytest.fixture
def store(local: LocalPlace, files: CountingFiles) -> RemotePlace:
    return RemotePlace("store://trial", files, str(local.root))


def commit(
    store: RemotePlace, local: LocalPlace, tidying: Tidying, step: int, rules: Retention = RULES, **body: Any
) -> list[str]:
    """What goes after a commit of attempt 2, as its writer does it."""
    newest = lay(local, step, Token(2), retention=rules.to_json(), **body)
    deleted = [str(name) for name in tidying.after(store, newest, rules)]
    return deleted + [one.entry for one in tidying.of_earlier(store, newest, CheckpointName(20, Token(1)))]


def test_where_nothing_goes_each_folder_is_listed_once(
    store: RemotePlace, local: LocalPlace, files: CountingFiles
) -> None:
    rules, tidying = Retention(keep=9), Tidying()
    for step in (50, 60):
        files.listed.clear()
        files.read.clear()
        assert commit(store, local, tidying, step, rules, bases=[BASE]) == []
    names = [f"step-{step}.attempt-1.1" for step in (10, 20)] + [
        f"step-{step}.attempt-2.1" for step in (30, 40, 50, 60)
    ]
    assert files.listed == Counter(["checkpoints", BASE, *names])
    assert files.read["manifest.json"] == 1 and files.read["fence-1.1.json"] == files.read["fence-2.1.json"] == 1


def test_what_an_old_glance_shows_does_not_go_if_it_is_needed_now(store: RemotePlace, local: LocalPlace) -> None:
    """Somebody pins, and somebody starts, between the look and the deletion."""
    late = CheckpointName(30, Token(2))

    class Late(RemotePlace):
        on_read: Callable[[], object] = staticmethod(lambda: None)

        def read(self, path: str) -> bytes:
            if path == f"{late}/manifest.json":
                type(self).on_read()
            return super().read(path)

    slow = Late(store.url, store.files, str(local.root))
    for step in (50, 60):
        lay(local, step, Token(2), retention=RULES.to_json())
    pins = []

    def pin_it() -> None:
        if not pins:
            pins.append(pin(LocalPlace(local.root), late, "evaluation"))
            pins[0].__enter__()

    Late.on_read = staticmethod(pin_it)
    try:
        assert Tidying().after(slow, CheckpointName(60, Token(2)), RULES) == []
    finally:
        pins[0].__exit__(None, None, None)
    assert (2, 30) in steps(local)
    Late.on_read = staticmethod(lambda: None)
    tidying = Tidying()
    assert tidying.after(slow, CheckpointName(60, Token(2)), RULES) == [late]
    begin(local, Token(3), CheckpointName(60, Token(2)))
    assert tidying.of_earlier(slow, CheckpointName(60, Token(2)), None) == []
    assert (1, 10) in steps(local)


def test_what_has_gone_is_gone_from_the_glance(store: RemotePlace, local: LocalPlace) -> None:
    seen = store.glance()
    before = seen.checkpoints()
    store.remove(str(before[0]))
    assert seen.checkpoints() == before, "it is of the moment before"
    seen.gone(str(before[0]))
    assert seen.checkpoints() == before[1:] and seen.sizes(str(before[0])) == {}


def test_bases_go_with_the_last_that_mentions_them(store: RemotePlace, local: LocalPlace) -> None:
    tidying = Tidying()
    for step in (50, 60, 70):
        commit(store, local, tidying, step, bases=[OTHER_BASE])
    assert store.bases() == [BASE, OTHER_BASE], "the parent needs it"
    assert [one.entry for one in tidying.at_end(store, CheckpointName(70, Token(2)))] == ["step-20.attempt-1.1", BASE]
    assert store.bases() == [OTHER_BASE]


def test_a_survey_lists_each_folder_once(store: RemotePlace, local: LocalPlace, files: CountingFiles) -> None:
    found = survey(store)
    assert len(found.rows) == 4 and set(files.listed.values()) == {1}, files.listed
