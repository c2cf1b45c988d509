"""Which checkpoints stay, whatever is saved, measured, pinned or started again."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from place_lab import begin, lay, steps

from overnight.core.errors import BadInputError
from overnight.trainer.checkpoint.manifest import MANIFEST, load_manifest
from overnight.trainer.checkpoint.pins import pin
from overnight.trainer.checkpoint.place import PARTIAL, CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.retention import Retention, prune
from overnight.trainer.checkpoint.summary import summarize
from overnight.trainer.checkpoint.trash import discard

ME, OTHER = Token(2), Token(1)
BASE = "base-" + "0f" * 16


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    place = LocalPlace(tmp_path / "checkpoints")
    begin(place, OTHER)
    lay(place, 10, OTHER)
    begin(place, ME, CheckpointName(10, OTHER))
    return place


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 400), min_size=1, max_size=25),
    values=st.data(),
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(50, 500),
    mode=st.sampled_from([None, "min", "max"]),
    number=st.integers(1, 4),
)
def test_exactly_what_the_rules_say_stays(
    gaps: list[int], values: Any, keep: int, keep_every: int | None, mode: str | None, number: int
) -> None:
    """After every save of a run, against rules that look at all that was ever saved."""
    root = Path(tempfile.mkdtemp())
    try:
        place = LocalPlace(root)
        lay(place, 7, OTHER)
        retention = Retention(keep, keep_every, ("loss", mode, number) if mode else None)
        measured: dict[int, float] = {}
        ever: list[int] = []
        for gap in gaps:
            step = (ever[-1] if ever else 0) + gap
            ever.append(step)
            if (value := values.draw(st.none() | st.floats(-5, 5).map(lambda x: round(x, 3)))) is not None:
                measured[step] = value
            newest = lay(place, step, ME, metrics={"loss": measured[step]} if step in measured else {})
            prune(place, newest, retention)
        staying = {*ever[-keep:]}
        if keep_every is not None:
            for multiple in range(keep_every, ever[-1] + 1, keep_every):
                first = next(step for step in ever if step >= multiple)
                staying |= {first} if first < multiple + keep_every else set()
        if mode is not None:
            earliest: dict[float, int] = {}
            for step, value in measured.items():
                earliest.setdefault(value, step)
            staying |= {earliest[v] for v in sorted(earliest, reverse=mode == "max")[:number]}
        assert steps(place) == [(1, 7), *((2, step) for step in sorted(staying))]
    finally:
        shutil.rmtree(root)


def test_what_others_wrote_and_what_is_pinned_stays(place: LocalPlace) -> None:
    names = [lay(place, step, ME) for step in (20, 30, 40)]
    with pin(place, names[0], "evaluation"):
        assert prune(place, names[-1], Retention(keep=1)) == [names[1]]
        assert steps(place) == [(1, 10), (2, 20), (2, 40)]
    assert prune(place, names[-1], Retention(keep=1)) == [names[0]]


def test_if_the_newest_is_gone_nothing_is_deleted(place: LocalPlace) -> None:
    names = [lay(place, step, ME) for step in (20, 30, 40)]
    shutil.rmtree(place.path(names[-1]))
    assert prune(place, names[-1], Retention(keep=1)) == []
    assert steps(place) == [(1, 10), (2, 20), (2, 30)]


def test_unfinished_folders_of_earlier_saves_go_and_no_other(place: LocalPlace) -> None:
    newest = lay(place, 50, ME)
    mine, later, theirs = CheckpointName(40, ME), CheckpointName(60, ME), CheckpointName(40, OTHER)
    for name in (mine, later, theirs):
        place.partial(name).mkdir()
    prune(place, newest, Retention())
    assert [e for e in place.entries() if e.endswith(PARTIAL)] == sorted(f"{name}{PARTIAL}" for name in (later, theirs))


def test_a_copy_under_another_name_takes_no_place_and_stays(place: LocalPlace) -> None:
    names = [lay(place, step, ME, metrics={"loss": step}) for step in (20, 30, 40)]
    copies = [CheckpointName(35, ME), CheckpointName(90, ME), CheckpointName(20, ME, save=2)]
    for copy in copies:
        shutil.copytree(place.path(names[0]), place.path(copy))
    assert prune(place, names[-1], Retention(2, best=("loss", "min", 1))) == []
    assert prune(place, names[-1], Retention(2)) == [names[0]]
    assert place.checkpoints() == sorted([*names[1:], *copies, CheckpointName(10, OTHER)])


def test_a_folder_of_another_place_takes_no_place_and_stays(place: LocalPlace) -> None:
    *names, copied = [lay(place, step, ME) for step in (20, 30, 40, 35)]
    for name in (*names, copied):
        manifest = replace(load_manifest(place, name), place="b" * 32 if name == copied else "a" * 32)
        (place.path(name) / MANIFEST).write_bytes(manifest.to_bytes())
    assert prune(place, names[-1], Retention(2)) == [names[0]]
    assert copied in place.checkpoints()


def test_of_equal_values_the_checkpoint_after_the_report_is_the_best(place: LocalPlace) -> None:
    for step, value in ((20, 0.5), (30, 0.5), (40, 0.7), (50, 0.7)):
        newest = lay(place, step, ME, metrics={"loss": value})
        prune(place, newest, Retention(1, best=("loss", "min", 1)))
    assert steps(place) == [(1, 10), (2, 20), (2, 50)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "0.1", None, True])
def test_what_is_no_finite_number_is_never_the_best(place: LocalPlace, value: Any) -> None:
    for step, loss in ((20, 0.5), (30, value), (40, 0.6)):
        newest = lay(place, step, ME, metrics={"loss": loss})
        prune(place, newest, Retention(1, best=("loss", "max" if value is True else "min", 1)))
    assert steps(place) == [(1, 10), *((2, step) for step in ((30, 40) if value is True else (20, 40)))]


def test_a_damaged_manifest_neither_raises_nor_counts_as_measured(place: LocalPlace) -> None:
    broken = lay(place, 20, ME, metrics={"loss": -1.0})
    (place.path(broken) / "manifest.json").write_bytes(b'{"body": {"metrics"')
    lay(place, 30, ME, metrics={"loss": 0.5})
    newest = lay(place, 40, ME, metrics={"loss": 0.9})
    assert prune(place, newest, Retention(1, best=("loss", "min", 1))) == [broken]


def test_a_damaged_manifest_still_names_the_folders_it_shares(place: LocalPlace) -> None:
    name = lay(place, 20, ME, bases=[BASE])
    path = place.path(name) / "manifest.json"
    path.write_bytes(path.read_bytes()[:-3])
    assert summarize(place, name).bases == {BASE}
    assert not summarize(place, name).readable


def test_a_manifest_that_could_not_be_read_is_tried_again(place: LocalPlace) -> None:
    name = lay(place, 20, ME, metrics={"loss": 1.0})
    path = place.path(name) / "manifest.json"
    path.rename(path.with_name("away"))
    assert not summarize(place, name).readable
    path.with_name("away").rename(path)
    assert summarize(place, name).metrics == {"loss": 1.0}


@pytest.mark.parametrize(
    "values",
    [
        {"keep": 0}, {"keep": -1}, {"keep": 1.5}, {"keep": True}, {"keep": None}, {"keep_every": 0},
        {"keep_every": "1k"},
        {"best": ("loss", "least", 1)}, {"best": ("loss", "min", 0)}, {"best": ("", "min", 1)}, {"best": "loss"},
        {"best": ("loss", "min")}, {"best": (1, "min", 1)}, {"best": ("loss", "min", True)},
    ],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="keep"):
        Retention(**values)


@given(
    st.builds(
        Retention,
        st.integers(1, 9),
        st.none() | st.integers(1, 9),
        st.none() | st.tuples(st.text(min_size=1), st.sampled_from(["min", "max"]), st.integers(1, 9)),
    )
)
def test_rules_survive_json(retention: Retention) -> None:
    assert Retention.from_json(json.loads(json.dumps(retention.to_json()))) == retention


def test_what_is_needed_after_all_gets_its_name_back(place: LocalPlace) -> None:
    name = lay(place, 20, ME)
    seen: list[bool] = []
    assert not discard(place, str(name), lambda: seen.append(place.path(name).exists()) is None)
    assert seen == [False]
    assert summarize(place, name).readable
    assert discard(place, str(name)) and not discard(place, str(name))
