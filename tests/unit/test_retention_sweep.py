"""Mark and sweep: what nobody needs goes, and never the last good checkpoint, whatever the place looks like."""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from place_lab import begin, fingerprint, lay, steps

from overnight.core.errors import ConflictError, NotFoundError
from overnight.trainer.checkpoint.pins import PinWatch, pin
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.reading.lineage import lineage
from overnight.trainer.checkpoint.remote import open_remote
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.survey import survey
from overnight.trainer.checkpoint.sweep import choose, mark, sweep

BASE, OTHER_BASE = "base-" + "0f" * 16, "base-" + "a0" * 16
KEEP_ONE = Retention(keep=1).to_json()


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "checkpoints")


@pytest.fixture
def forked(place: LocalPlace) -> LocalPlace:
    """Attempt 1 reached step 40, attempt 2 went on from step 20 and reached 35."""
    begin(place, Token(1))
    for step in (10, 20, 30, 40):
        lay(place, step)
    begin(place, Token(2), CheckpointName(20, Token(1)))
    for step in (25, 35):
        lay(place, step, Token(2))
    return place


def tidy(place: LocalPlace, *, at_rest: bool = True, watch: PinWatch | None = None) -> list[str]:
    watch = watch or PinWatch()
    found = survey(place, watch)
    return [deletion.entry for deletion in sweep(found, mark(found, at_rest=at_rest), watch)]


def test_what_a_later_start_has_hidden_goes_and_the_lineage_stays(forked: LocalPlace) -> None:
    before = list(lineage(forked))
    assert tidy(forked) == ["step-30.attempt-1.1", "step-40.attempt-1.1"]
    assert list(lineage(forked)) == before
    assert tidy(forked) == []


def test_the_rules_of_the_run_hold_over_all_its_attempts(forked: LocalPlace) -> None:
    lay(forked, 45, Token(2), retention=KEEP_ONE)
    tidy(forked)
    assert steps(forked) == [(2, 45)]


def test_nothing_goes_while_no_good_checkpoint_is_left(forked: LocalPlace) -> None:
    for name in forked.checkpoints():
        (forked.path(name) / "data").write_bytes(b"damaged!")
    before = fingerprint(forked.root)
    assert tidy(forked) == []
    assert fingerprint(forked.root) == before


def test_if_the_newest_is_damaged_the_one_behind_it_stays(forked: LocalPlace) -> None:
    newest = lay(forked, 45, Token(2), retention=KEEP_ONE)
    (forked.path(newest) / "data").write_bytes(b"damaged!")
    tidy(forked)
    assert steps(forked) == [(2, 35), (2, 45)]
    found = newest_good(forked, lambda _: None)
    assert found is not None and found[0].step == 35


def test_a_fresh_start_that_has_committed_nothing_deletes_nothing(forked: LocalPlace) -> None:
    begin(forked, Token(3), fresh=True)
    assert tidy(forked) == []
    lay(forked, 5, Token(3))
    assert len(tidy(forked)) == 6
    assert steps(forked) == [(3, 5)]


def test_a_renamed_folder_is_named_as_foreign_and_is_no_checkpoint_of_the_trial(forked: LocalPlace) -> None:
    """It would be the newest of all by its name."""
    lay(forked, 45, Token(2), retention=Retention(keep=2).to_json())
    renamed = CheckpointName(90, Token(2))
    shutil.copytree(forked.path(CheckpointName(20, Token(1))), forked.path(renamed))
    found = survey(forked)
    row = next(row for row in found.rows if row.name == renamed)
    assert row.reason == "foreign: its manifest belongs to step-20.attempt-1.1" and not row.is_best
    assert found.line[0] == found.last_good() == CheckpointName(45, Token(2))
    assert [row.name.step for row in found.rows if row.reason == "newest 2"] == [35, 45]
    said: list[str] = []
    chosen = newest_good(forked, said.append)
    assert chosen is not None and chosen[0] == CheckpointName(45, Token(2))
    assert said == ["passed over step-90.attempt-2.1: manifest.json belongs to step-20.attempt-1.1"]
    tidy(forked)
    assert steps(forked) == [(2, 35), (2, 45), (2, 90)]


def test_a_renamed_folder_hides_nothing_that_the_trial_committed(forked: LocalPlace) -> None:
    """Attempt 3 went on from attempt 1 and committed nothing; a commit of it would hide attempt 2."""
    begin(forked, Token(3), CheckpointName(20, Token(1)))
    best = CheckpointName(35, Token(2))
    shutil.copytree(forked.path(best), forked.path(CheckpointName(36, Token(3))))
    assert survey(forked).line[0] == best
    said: list[str] = []
    chosen = newest_good(forked, said.append)
    assert chosen is not None and chosen[0] == best
    assert not any("stale attempt: 3.1" in line for line in said), said
    tidy(forked)
    assert (2, 35) in steps(forked)


def test_what_is_pinned_stays_until_it_is_not(forked: LocalPlace) -> None:
    hidden = CheckpointName(40, Token(1))
    with pin(forked, hidden, "evaluation"):
        assert tidy(forked) == ["step-30.attempt-1.1"]
    assert tidy(forked) == [str(hidden)]


def test_saves_that_never_ended_and_interrupted_deletions_go(forked: LocalPlace) -> None:
    for name in (CheckpointName(50, Token(1)), CheckpointName(50, Token(2))):
        forked.partial(name).mkdir()
    (forked.root / f"{BASE}.partial-1").mkdir()
    (forked.root / ".trash-step-1.attempt-1.1-00").mkdir()
    assert set(tidy(forked, at_rest=False)) >= {"step-50.attempt-1.1.partial", ".trash-step-1.attempt-1.1-00"}
    assert forked.partial(CheckpointName(50, Token(2))).exists(), "the newest start may still live"
    assert set(tidy(forked)) == {"step-50.attempt-2.1.partial", f"{BASE}.partial-1"}


def test_frozen_tensors_stay_as_long_as_a_manifest_mentions_them(forked: LocalPlace) -> None:
    lay(forked, 45, Token(2), bases=[BASE])
    lay(forked, 50, Token(2), bases=[BASE, OTHER_BASE])
    lay(forked, 55, Token(1), bases=[OTHER_BASE])
    (forked.root / ("base-" + "11" * 16)).mkdir()
    assert "base-" + "11" * 16 not in tidy(forked, at_rest=False)
    assert tidy(forked) == ["base-" + "11" * 16]
    assert forked.bases() == [BASE, OTHER_BASE]
    shutil.rmtree(forked.path(CheckpointName(50, Token(2))))
    assert tidy(forked) == [OTHER_BASE]
    (forked.path(CheckpointName(45, Token(2))) / "manifest.json").unlink()
    assert tidy(forked) == [], "nobody knows what the lost manifest mentioned"


def test_a_base_of_what_goes_goes_with_it(forked: LocalPlace) -> None:
    lay(forked, 45, Token(1), bases=[BASE])
    assert tidy(forked)[-2:] == ["step-45.attempt-1.1", BASE]


def test_once_a_new_start_claims_the_place_nothing_more_is_deleted(forked: LocalPlace) -> None:
    watch = PinWatch()
    found = survey(forked, watch)
    doomed = mark(found, at_rest=True)
    begin(forked, Token(3), CheckpointName(35, Token(2)))
    assert sweep(found, doomed, watch) == []
    assert len(steps(forked)) == 6


def test_a_start_in_the_very_moment_of_a_deletion_undoes_it(forked: LocalPlace) -> None:
    class Late(LocalPlace):
        looks = 0

        def tokens(self) -> list[Token]:
            self.looks += 1
            if self.looks == 3:  # after the survey, and after the look before the deletion
                begin(forked, Token(3), CheckpointName(35, Token(2)))
            return super().tokens()

    late = Late(forked.root)
    watch = PinWatch()
    found = survey(forked, watch)
    late.looks = 1
    doomed = mark(found, at_rest=True)
    found = replace(found, place=late)
    assert sweep(found, doomed, watch) == []
    assert len(steps(forked)) == 6


def test_a_person_cannot_pick_what_is_in_use(forked: LocalPlace) -> None:
    found = survey(forked)
    with pytest.raises(ConflictError, match="last good"):
        choose(found, ["step-35.attempt-2.1"], "because")
    with pytest.raises(NotFoundError, match="step-99"):
        choose(found, ["step-99.attempt-1.1"], "because")
    reader = pin(forked, CheckpointName(20, Token(1)), "warm start of digits-9")
    with reader, pytest.raises(ConflictError, match="warm start of digits-9"):
        choose(survey(forked), ["step-20.attempt-1.1"], "because")
    assert [d.entry for d in choose(found, ["step-20.attempt-1.1"], "because")] == ["step-20.attempt-1.1"]


tokens = st.lists(
    st.tuples(st.lists(st.integers(1, 9), max_size=4), st.integers(0, 9), st.sampled_from([False, False, False, True])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(starts=tokens, damaged=st.sets(st.integers(0, 20), max_size=4), keep=st.none() | st.integers(1, 3))
def test_whatever_happened_a_new_start_finds_the_same_checkpoint_after_a_sweep(
    starts: list[tuple[list[int], int, bool]], damaged: set[int], keep: int | None
) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        place = LocalPlace(root)
        retention = Retention(keep).to_json() if keep else {}
        for number, (gaps, back, fresh) in enumerate(starts, 1):
            line = list(lineage(place))
            parent = None if fresh or not line else line[min(back, len(line) - 1)]
            begin(place, Token(number), parent, fresh=fresh)
            step = parent.step if parent else 0
            for gap in gaps:
                step += gap
                lay(place, step, Token(number), retention=retention)
        for index, name in enumerate(place.checkpoints()):
            if index in damaged:
                (place.path(name) / "data").write_bytes(b"?")
        before = survey(place).last_good()
        tidy(place)
        assert survey(place).last_good() == before
        if before is not None:
            line = list(lineage(place))
            assert before in line
            assert {name for name in place.checkpoints() if name < before} <= set(line)
            if keep:
                assert len([name for name in line if name <= before]) <= keep + 1
        assert tidy(place) == []
    finally:
        shutil.rmtree(root)


def test_a_store_behind_fsspec_is_tidied_alike(forked: LocalPlace, tmp_path: Path) -> None:
    lay(forked, 45, Token(2), bases=[BASE])
    lay(forked, 50, Token(1), bases=[OTHER_BASE])
    (forked.root / "step-60.attempt-1.1.partial").mkdir()
    (forked.root / "step-60.attempt-1.1.partial" / "rank-0.json").write_text("{}")
    shutil.copytree(forked.root, tmp_path / "bucket")
    remote, watch = open_remote(f"local://{tmp_path / 'bucket'}"), PinWatch()
    with (
        pin(remote, CheckpointName(30, Token(1)), "evaluation"),
        pin(forked, CheckpointName(30, Token(1)), "evaluation"),
    ):
        found = survey(remote, watch)
        assert [row.to_json() for row in found.rows] == [row.to_json() for row in survey(forked).rows]
        gone = sorted(deletion.entry for deletion in sweep(found, mark(found, at_rest=True), watch))
        assert gone == sorted(tidy(forked))
    assert OTHER_BASE in gone and "step-60.attempt-1.1.partial" in gone
    assert [row.name for row in survey(remote).rows] == forked.checkpoints()
    assert remote.bases() == forked.bases() == [BASE]


def test_the_process_answers_in_lines_and_ends_with_its_input(forked: LocalPlace) -> None:
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "overnight.trainer.checkpoint.sweeper"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    place = str(forked.root)

    def ask(**question: object) -> list[dict[str, object]]:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
        lines = [json.loads(child.stdout.readline())]
        while "deleted" in lines[-1]:
            lines.append(json.loads(child.stdout.readline()))
        return lines

    try:
        [surveyed] = ask(op="survey", place=place)
        *deleted, done = ask(op="sweep", place=place)
        [refused] = ask(op="delete", place=place, entries=["step-35.attempt-2.1"], cause="quota")
        [unknown] = ask(op="dance", place=place)
    finally:
        _, errors = child.communicate(timeout=30)
    assert len(surveyed["done"]["rows"]) == 6  # type: ignore[index, call-overload]
    assert [line["deleted"]["entry"] for line in deleted] == ["step-30.attempt-1.1", "step-40.attempt-1.1"]  # type: ignore[index, call-overload]
    assert done["done"]["bytes"] == surveyed["done"]["bytes"] - sum(line["deleted"]["bytes"] for line in deleted)  # type: ignore[index, call-overload]
    assert refused["error"]["code"] == "conflict" and "dance" in unknown["error"]["message"]  # type: ignore[index, call-overload]
    assert child.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in errors.splitlines()}
    assert "xxhash" in imported and not imported & {"torch", "numpy", "fsspec", "pydantic"}
