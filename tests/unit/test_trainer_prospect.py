"""When a rank on its way out knows that the commit which it waits for cannot come, and when it must not say so."""

import threading
from pathlib import Path

import pytest
from place_lab import lay
from waiting import LIMIT_SECONDS, wait_for

from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.prospect import Prospect

NAME = CheckpointName(20, Token(1))


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    """Ranks 0 and 2 of three have told their parts."""
    place = LocalPlace(tmp_path)
    place.partial(NAME).mkdir()
    for rank in (0, 2):
        (place.partial(NAME) / f"rank-{rank}.json").touch()
    return place


def prospect(place: LocalPlace, *lost: int, name: CheckpointName | None = NAME) -> Prospect:
    return Prospect(place, lambda: lost, lambda: name, pause_seconds=0.01)


@pytest.mark.parametrize(
    ("lost", "found"),
    [((), None), ((1,), (NAME, 1)), ((2,), None), ((1, 2), (NAME, 1)), ((0,), (NAME, 0)), ((0, 1, 2), (NAME, 0))],
)
def test_a_lost_rank_matters_if_its_part_is_missing_or_it_would_publish(
    place: LocalPlace, lost: tuple[int, ...], found: object
) -> None:
    assert prospect(place, *lost).look() == found


def test_what_is_published_and_what_is_not_waited_for_is_not_given_up(place: LocalPlace) -> None:
    assert prospect(place, 1, name=None).look() is None
    place.remove(f"{NAME}.partial")
    assert prospect(place, 1).look() == (NAME, 1)
    lay(place, 20)
    assert prospect(place, 1).look() is None and prospect(place, 0).look() is None


def test_one_look_is_not_enough(place: LocalPlace) -> None:
    """The system call in which a killed writer was is ended by the kernel."""
    looks = 0

    def lost() -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 2:
            (place.partial(NAME) / "rank-1.json").touch()
        return [1]

    with Prospect(place, lost, lambda: NAME, pause_seconds=0.001) as it:
        wait_for(lambda: looks > 5)
        assert it.reason == ""
        (place.partial(NAME) / "rank-1.json").unlink()
        wait_for(lambda: it.reason)
    assert it.reason == f"checkpoint {NAME} was given up: rank 1 has ended before its part was written"


def test_a_place_that_fails_says_nothing_and_one_that_hangs_holds_nobody_up(place: LocalPlace) -> None:
    class Failing(LocalPlace):
        looks = 0

        def entries(self, folder: str = "") -> list[str]:
            self.looks += 1
            raise ConnectionError("away")

    failing = Failing(place.root)
    with prospect(failing, 1) as it:
        wait_for(lambda: failing.looks > 3)
    assert it.reason == ""
    answers, asked = threading.Event(), threading.Event()

    class Hanging(LocalPlace):
        def entries(self, folder: str = "") -> list[str]:
            asked.set()
            answers.wait(LIMIT_SECONDS)
            return []

    with prospect(Hanging(place.root), 1) as it:
        assert asked.wait(LIMIT_SECONDS)
    assert it.reason == "" and not answers.is_set()
    answers.set()


def test_no_peer_is_asked_once_nobody_waits_any_more(place: LocalPlace) -> None:
    """The process group may be gone by then."""
    began, may_end, num_asked = threading.Event(), threading.Event(), 0

    def lost() -> list[int]:
        nonlocal num_asked
        num_asked += 1
        began.set()
        may_end.wait(LIMIT_SECONDS)
        return []

    threading.Timer(0.05, may_end.set).start()
    with Prospect(place, lost, lambda: NAME, pause_seconds=0.001) as it:
        assert began.wait(LIMIT_SECONDS)
    assert may_end.is_set(), "the one under way was waited for"
    before = num_asked
    assert it.look() is None and num_asked == before
