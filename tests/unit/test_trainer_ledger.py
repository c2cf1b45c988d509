"""The ledger's categories sum to the wall clock, and are sent once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.trainer.phases import CATEGORIES, Ledger, Reached, seconds_since_launch


class Ticks:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


moves = st.lists(st.tuples(st.sampled_from(CATEGORIES), st.floats(0, 1000), st.booleans(), st.booleans()), max_size=30)


@given(moves, st.floats(0, 50))
def test_categories_sum_to_the_wall_clock_however_they_nest(steps: list, launched: float) -> None:
    clock = Ticks()
    ledger = Ledger(clock, launched)
    taken: dict[str, float] = {}
    for category, seconds, nested, take in steps:
        if nested:
            with ledger.within(category):
                clock.now += seconds
        else:
            ledger.switch(category)
            clock.now += seconds
        if take:
            for name, amount in ledger.take()["seconds"].items():
                taken[name] = taken.get(name, 0.0) + amount
    for name, amount in ledger.take()["seconds"].items():
        taken[name] = taken.get(name, 0.0) + amount
    wall = clock.now - 100.0 + launched
    assert sum(ledger.seconds().values()) == pytest.approx(wall)
    assert sum(taken.values()) == pytest.approx(wall)


def test_an_exception_inside_restores_the_category() -> None:
    ledger = Ledger(Ticks())
    ledger.switch("compute")
    with pytest.raises(KeyError), ledger.within("eval"):
        raise KeyError
    assert ledger.category == "compute"


def test_unknown_categories_are_refused() -> None:
    with pytest.raises(ValueError, match="coffee"):
        Ledger(Ticks()).switch("coffee")


def test_counts_are_taken_once() -> None:
    ledger = Ledger(Ticks())
    ledger.count("updates")
    ledger.count("updates", 2)
    assert ledger.take()["counts"] == {"updates": 3}
    assert ledger.take()["counts"] == {}


def test_a_warm_process_counts_from_its_launch(tmp_path: Path) -> None:
    whole = seconds_since_launch()
    (tmp_path / "launch.lock").touch()
    assert 0 <= seconds_since_launch(tmp_path) <= whole
    assert seconds_since_launch(tmp_path / "none") >= whole


def test_reached_is_the_maximum_over_attempts(tmp_path: Path) -> None:
    for number, step in (("0001", 40), ("0002", 12)):
        folder = tmp_path / "attempts" / number
        Reached(tmp_path, folder).note(step)
    (tmp_path / "attempts" / "0002" / "reached").write_text("torn")
    assert Reached(tmp_path, tmp_path / "attempts" / "0003").step == 40
