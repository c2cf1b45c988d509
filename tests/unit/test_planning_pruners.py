"""Pruners and judgement: rungs, resumed curves, values that are no numbers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.core.enums import Mode
from overnight.core.models.spec import Prune
from overnight.planning import judgement
from overnight.planning.pruners import decide

ASHA = Prune(kind="asha", min_step=1, reduction=3)
MEDIAN = Prune(kind="median", min_step=2)


def at_step(step: int, values: list[float]) -> dict[str, list[tuple[int, float]]]:
    return {f"t{i}": [(step, value)] for i, value in enumerate(values)}


def test_asha_keeps_one_in_three_of_those_seen() -> None:
    curves = at_step(3, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    stopped = [name for name in curves if decide(ASHA, Mode.MIN, curves, name, 3).stop]
    assert stopped == ["t2", "t3", "t4", "t5"]


def test_asha_turns_round_for_max() -> None:
    curves = at_step(3, [0.1, 0.2, 0.3])
    decisions = {name: decide(ASHA, Mode.MAX, curves, name, 3) for name in curves}
    assert [name for name, d in decisions.items() if not d.stop] == ["t2"]
    assert decisions["t0"].reason == "asha: 0.1 at rung 3 is not among the best 1 of 3 (needed 0.3)"


def test_asha_never_stops_the_first_and_never_waits() -> None:
    assert not decide(ASHA, Mode.MIN, at_step(9, [5.0]), "t0", 9).stop


def test_asha_decides_once_a_rung() -> None:
    curves = {"a": [(1, 0.1), (3, 0.1), (4, 0.1)], "b": [(1, 0.05), (3, 0.2), (4, 9.0)]}
    assert decide(ASHA, Mode.MIN, curves, "b", 3).stop
    assert not decide(ASHA, Mode.MIN, curves, "b", 4).stop  # the next look is at step 9


def test_asha_takes_the_first_report_after_a_rung() -> None:
    curves = {"a": [(10, 0.1), (20, 0.1)], "b": [(11, 0.2)]}
    assert decide(Prune(min_step=9), Mode.MIN, curves, "b", 11).stop
    assert not decide(Prune(min_step=12), Mode.MIN, curves, "b", 11).stop


def test_a_resumed_trial_is_counted_once_and_its_newest_report_of_a_step_counts() -> None:
    peers = at_step(3, [0.1, 0.2, 0.3, 0.4, 0.5])
    once = {**peers, "r": [(1, 9.0), (3, 0.05)]}
    again = {**peers, "r": [(1, 9.0), (3, 9.0), (1, 9.0), (3, 0.05)]}
    assert decide(ASHA, Mode.MIN, once, "r", 3) == decide(ASHA, Mode.MIN, again, "r", 3)
    assert not decide(ASHA, Mode.MIN, again, "r", 3).stop
    assert decide(ASHA, Mode.MIN, again, "t1", 3).stop


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("prune", [ASHA, MEDIAN])
def test_what_is_not_finite_is_the_worst(bad: float, prune: Prune) -> None:
    curves = at_step(3, [0.1] * 6 + [bad])
    assert decide(prune, Mode.MIN, curves, "t6", 3).stop
    assert decide(prune, Mode.MAX, curves, "t6", 3).stop
    assert not decide(prune, Mode.MIN, curves, "t0", 3).stop


def test_median_needs_peers_and_compares_the_best_so_far() -> None:
    peers = {f"p{i}": [(1, 1.0), (2, 0.8), (3, 0.6)] for i in range(5)}
    assert decide(MEDIAN, Mode.MIN, {**peers, "x": [(3, 0.9)]}, "x", 3).stop
    assert not decide(MEDIAN, Mode.MIN, {**peers, "x": [(2, 0.5), (3, 0.9)]}, "x", 3).stop
    assert not decide(MEDIAN, Mode.MIN, {**peers, "x": [(1, 2.0)]}, "x", 1).stop
    del peers["p0"]
    assert not decide(MEDIAN, Mode.MIN, {**peers, "x": [(3, 0.9)]}, "x", 3).stop


def test_a_report_that_the_curve_does_not_hold_decides_nothing() -> None:
    assert not decide(ASHA, Mode.MIN, at_step(3, [0.1, 0.2]), "t1", 9).stop
    assert not decide(ASHA, Mode.MIN, {}, "gone", 9).stop


curves_of = st.dictionaries(
    st.sampled_from("abcdefgh"), st.lists(st.tuples(st.integers(0, 30), st.floats()), max_size=12), max_size=8
)


@given(curves_of, st.sampled_from("abc"), st.integers(0, 30), st.sampled_from([ASHA, MEDIAN]), st.sampled_from(Mode))
def test_repeated_reports_change_no_decision(curves, trial, step, prune, mode) -> None:
    doubled = {name: [point for point in curve for _ in range(2)] for name, curve in curves.items()}
    assert decide(prune, mode, doubled, trial, step) == decide(prune, mode, curves, trial, step)


def test_asha_spends_less_and_keeps_the_best() -> None:
    source = random.Random(0)
    quality = {f"t{i}": source.random() for i in range(60)}
    curves: dict[str, list[tuple[int, float]]] = {}
    steps = 0
    for name, final in quality.items():
        curves[name] = []
        for step in range(1, 28):
            curves[name].append((step, final + 1 / step))
            steps += 1
            if decide(ASHA, Mode.MIN, curves, name, step).stop:
                break
    best = min(quality, key=quality.__getitem__)
    assert curves[best][-1][0] == 27
    assert steps < 0.5 * 60 * 27


def test_judgement_puts_what_is_not_finite_last_and_keeps_ties_in_order() -> None:
    rows = [("a", None), ("b", 2.0), ("c", math.nan), ("d", 1.0), ("e", 2.0), ("f", math.inf)]
    assert [n for n, _ in judgement.leaderboard(rows, Mode.MIN, lambda r: r[1])] == list("dbeacf")
    assert [n for n, _ in judgement.leaderboard(rows, Mode.MAX, lambda r: r[1])] == list("bedacf")


def test_judgement_reduces() -> None:
    values = [3.0, math.nan, 1.0, None, 2.0, -math.inf]
    assert judgement.reduce(values, Mode.MIN, "best") == 1.0
    assert judgement.reduce(values, Mode.MAX, "best") == 3.0
    assert judgement.reduce(values, Mode.MIN, "last") is None
    assert judgement.reduce(values[:-1], Mode.MIN, "last") == 2.0
    assert judgement.reduce([], Mode.MIN, "last") is None
    assert judgement.reduce([math.nan], Mode.MIN, "best") is None


def test_judgement_compares() -> None:
    assert judgement.better(1.0, None, Mode.MIN)
    assert judgement.better(1.0, math.nan, Mode.MAX)
    assert not judgement.better(math.nan, 1.0, Mode.MAX)
    assert not judgement.better(1.0, 1.0, Mode.MIN)
    assert judgement.reaches(0.95, 0.95, Mode.MAX)
    assert not judgement.reaches(math.inf, 0.95, Mode.MAX)
