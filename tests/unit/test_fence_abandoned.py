"""What a start leaves that is killed as it claims a place goes once it can be nobody's, and not a moment before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from place_lab import begin, lay
from store_lab import Store

from overnight.core.errors import FencedError
from overnight.trainer.checkpoint.abandoned import ABANDONED_SECONDS
from overnight.trainer.checkpoint.fence import claim, next_attempt
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import LocalPlace, Place, Token, fence_name
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import mark, sweep
from overnight.trainer.checkpoint.sweeper import Sweeper
from overnight.trainer.checkpoint.writing.tidying import Tidying

OLD, YOUNG = ABANDONED_SECONDS + 60, ABANDONED_SECONDS - 60
CLAIMS = [f"{fence_name(token)}.claim-{'0f' * 8}" for token in (Token(2), Token(3))]
KILLED = """
import os, signal, sys
from overnight.trainer.checkpoint import place
place.sync_file = lambda path: os.kill(os.getpid(), signal.SIGKILL)
place.open_place(sys.argv[1]).create(place.fence_name(place.Token(2)), b"{}")
"""


@pytest.fixture
def local(tmp_path: Path) -> LocalPlace:
    """A place with checkpoints, one of which nobody needs."""
    place = LocalPlace(tmp_path / "checkpoints")
    begin(place, Token(1))
    for step in (10, 20, 30):
        lay(place, step, retention={"keep": 1})
    return place


def make_older(place: LocalPlace, entry: str, seconds: float) -> None:
    """Dates a file back, as if it had been written so long ago."""
    then = time.time() - seconds
    os.utime(place.root / entry, (then, then))


def swept(place: Place, *, at_rest: bool = False) -> list[str]:
    found = survey(place)
    return [deletion.entry for deletion in sweep(found, mark(found, at_rest=at_rest), PinWatch())]


def test_the_half_of_a_fence_that_a_killed_start_leaves_goes_when_it_is_old(local: LocalPlace) -> None:
    died = subprocess.run([sys.executable, "-c", KILLED, local.url], timeout=60)
    assert died.returncode == -signal.SIGKILL
    (left,) = [entry for entry in local.entries() if entry.endswith(".tmp")]
    make_older(local, left, YOUNG)
    assert left not in swept(local) and left in local.entries()
    make_older(local, left, OLD)
    answers: list[dict[str, object]] = []
    Sweeper(answers.append).handle({"op": "sweep", "place": local.url})
    deleted = {"entry": left, "bytes": 2, "cause": "a start that never came to its fence"}
    assert {"deleted": deleted} in answers and left not in local.entries()


def test_a_run_without_a_janitor_takes_it_away_as_it_ends(local: LocalPlace) -> None:
    left = f".{fence_name(Token(1))}.0123456789ab.tmp"
    local.write(left, b"{}")
    make_older(local, left, OLD)
    Tidying().at_end(local, local.checkpoints()[-1])
    assert left not in local.entries()


def test_nothing_else_that_is_hidden_and_old_is_taken_for_one(local: LocalPlace) -> None:
    others = [".fence-2.1.json.tmp", ".fence-2.1.json.xyz.tmp", ".note.0123456789ab.tmp", "fence-2.1.json.tmp"]
    for entry in others:
        local.write(entry, b"")
        make_older(local, entry, OLD)
    swept(local, at_rest=True)
    assert set(others) <= set(local.entries())


@pytest.fixture
def remote(local: LocalPlace) -> RemotePlace:
    """The same place as a store; two starts were killed as they announced themselves."""
    for entry in CLAIMS:
        local.write(entry, b"")
    return RemotePlace("store://trial", LocalFileSystem(), local.url)


def test_claims_newer_than_every_fence_go_when_they_are_old_and_with_them_all_else(
    remote: RemotePlace, local: LocalPlace
) -> None:
    make_older(local, CLAIMS[0], OLD)
    make_older(local, CLAIMS[1], YOUNG)
    before = set(local.entries())
    assert swept(remote) == ["step-10.attempt-1.1", "step-20.attempt-1.1", CLAIMS[0]]
    assert before.difference(local.entries()) == {"step-10.attempt-1.1", "step-20.attempt-1.1", CLAIMS[0]}
    make_older(local, CLAIMS[1], OLD)
    assert swept(remote) == [CLAIMS[1]] and set(local.entries()) <= before, "nothing is left of the comparison"
    assert next_attempt(remote) == 2
    claim(remote, Token(2), None)


def test_both_go_in_one_pass(remote: RemotePlace, local: LocalPlace) -> None:
    for entry in CLAIMS:
        make_older(local, entry, OLD)
    assert swept(remote)[-2:] == CLAIMS


def test_a_start_that_appears_meanwhile_ends_the_sweep(remote: RemotePlace, local: LocalPlace) -> None:
    for entry in CLAIMS:
        make_older(local, entry, OLD)
    found = survey(remote)
    doomed = mark(found, at_rest=False)
    claim(remote, Token(4), None)
    assert sweep(found, doomed, PinWatch()) == [] and "step-10.attempt-1.1" in local.entries()


def test_the_age_is_told_by_the_store(store: Store, local: LocalPlace) -> None:
    place = store.place("abandoned/checkpoints")
    place.write(CLAIMS[0], b"")
    ages = place.ages([CLAIMS[0], "nothing"])
    assert list(ages) == CLAIMS[:1] and 0 <= ages[CLAIMS[0]] < 60
    assert swept(place) == [] and place.entries() == CLAIMS[:1]


def test_who_was_asleep_for_so_long_claims_nothing(remote: RemotePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its announcement may have been taken away, and another start have the number."""
    for entry in CLAIMS:
        remote.remove(entry)
    hours = iter([0.0, 5_000.0])
    monkeypatch.setattr("overnight.trainer.checkpoint.remote.time.clock_gettime", lambda clock: next(hours))
    with pytest.raises(TimeoutError, match=r"fence-2\.1\.json was not claimed within 3600 s"):
        claim(remote, Token(2), None)
    monkeypatch.undo()
    assert remote.tokens() == [Token(1)]
    claim(remote, Token(2), None)
    with pytest.raises(FencedError):
        claim(remote, Token(2), None)
