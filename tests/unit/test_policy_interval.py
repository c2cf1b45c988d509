"""When to save: intervals of all kinds, and the one that is learnt from what saves cost."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overnight.core.errors import BadInputError
from overnight.trainer.boundary import Policy
from overnight.trainer.interval import (
    ASSUMED_SLOWDOWN,
    FIRST_SECONDS,
    MAX_SHARE,
    MIN_SAMPLES,
    RANGE_SECONDS,
    AutoInterval,
    Slowdown,
    optimal_seconds,
)

seconds = st.floats(1e-4, 1e4)
mtbf = st.floats(1e2, 1e9)


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def loss(interval: float, cost: float, mtbf_seconds: float) -> float:
    """Expected wall time per useful second, restart aside, with exponential failures (Daly 2006, equation 20)."""
    return mtbf_seconds * math.expm1((interval + cost) / mtbf_seconds) / interval


@given(cost=seconds, mtbf_seconds=mtbf)
def test_no_other_interval_loses_noticeably_less(cost: float, mtbf_seconds: float) -> None:
    assume(cost < mtbf_seconds / 2)
    best = optimal_seconds(cost, mtbf_seconds)
    least = min(loss(best * 1.03**k, cost, mtbf_seconds) for k in range(-100, 101))
    assert loss(best, cost, mtbf_seconds) <= least * 1.01


@given(cost=seconds, more=st.floats(1, 10), mtbf_seconds=mtbf)
def test_rarer_when_it_costs_more_or_fails_less(cost: float, more: float, mtbf_seconds: float) -> None:
    def interval(cost: float, mtbf_seconds: float) -> float:
        auto = AutoInterval(mtbf_seconds, Slowdown(Ticks()))
        auto.staged(cost)
        return auto.seconds

    assume(cost * more < mtbf_seconds / 10)
    assert interval(cost, mtbf_seconds) <= interval(cost * more, mtbf_seconds) * (1 + 1e-9)
    assert interval(cost, mtbf_seconds) <= interval(cost, mtbf_seconds * more) * (1 + 1e-9)


@given(stall=seconds, write=seconds, mtbf_seconds=mtbf)
def test_bounds_hold_and_give_way_only_to_what_saves_cost(stall: float, write: float, mtbf_seconds: float) -> None:
    auto = AutoInterval(mtbf_seconds, Slowdown(Ticks()))
    auto.staged(stall)
    auto.committed(write)
    cost = stall + ASSUMED_SLOWDOWN * write
    assert auto.cost_seconds == pytest.approx(cost)
    assert auto.seconds >= max(RANGE_SECONDS[0], write)
    assert auto.seconds <= max(RANGE_SECONDS[1], write, cost / MAX_SHARE)


def test_until_something_was_measured_the_first_save_comes_soon() -> None:
    clock = Ticks()
    policy = Policy("auto", 1, clock)
    clock.now = FIRST_SECONDS - 0.01
    assert not policy.due_by_time()
    clock.now = FIRST_SECONDS
    assert policy.due_by_time()


def test_failures_that_the_platform_has_seen_count() -> None:
    calm, shaky = Policy("auto", 1, Ticks(), mtbf_seconds=86400.0), Policy("auto", 1, Ticks(), mtbf_seconds=600.0)
    for policy in (calm, shaky):
        policy.saved(0.5)
    assert shaky.seconds == pytest.approx(math.sqrt(2 * 0.5 * 600), rel=0.05)
    assert calm.seconds == pytest.approx(math.sqrt(2 * 0.5 * 86400), rel=0.05)


@given(idle=st.floats(0.001, 10), factor=st.floats(1, 20), evaluations=st.integers(0, MIN_SAMPLES // 2 - 1))
def test_what_a_write_takes_from_updates_is_measured(idle: float, factor: float, evaluations: int) -> None:
    clock = Ticks()
    slowdown = Slowdown(clock)
    slowdown.updated(writing=False)
    for number in range(2 * MIN_SAMPLES):
        clock.now += idle * (1000 if number < evaluations else 1)  # a few rounds with an evaluation inside
        slowdown.updated(writing=False)
    assert slowdown.share == ASSUMED_SLOWDOWN
    for _ in range(MIN_SAMPLES):
        clock.now += idle * factor
        slowdown.updated(writing=True)
    assert slowdown.share == pytest.approx(1 - 1 / factor, abs=1e-6)


def test_the_save_itself_is_not_taken_for_an_update() -> None:
    clock = Ticks()
    slowdown = Slowdown(clock)
    for writing in (False, True) * 2 * MIN_SAMPLES:
        clock.now += 100.0
        slowdown.interrupted()
        slowdown.updated(writing=writing)
        clock.now += 1.0
        slowdown.updated(writing=writing)
    assert slowdown.share == 0.0


def test_a_write_that_slows_everything_down_makes_saves_rare() -> None:
    def interval(factor: float) -> float:
        clock = Ticks()
        policy = Policy("auto", 1, clock, mtbf_seconds=3600.0)
        for writing in (False, True):
            for _ in range(20):
                clock.now += factor if writing else 1.0
                policy.updated(writing=writing)
        policy.saved(0.005)
        policy.committed(10.0)
        return policy.seconds

    assert interval(1.0) == pytest.approx(max(10.0, math.sqrt(2 * 0.005 * 3600)), rel=0.05)
    assert interval(2.0) == pytest.approx(math.sqrt(2 * 5.005 * 3600), rel=0.05)


@given(
    every=st.lists(st.one_of(st.integers(1, 50), st.sampled_from(["epoch", "10s", "1m"])), min_size=1, max_size=4),
    steps=st.integers(1, 120),
)
def test_several_policies_are_due_when_any_is(every: list[int | str], steps: int) -> None:
    clock = Ticks()
    both, each = Policy(every, 1, clock), [Policy(one, 1, clock) for one in every]
    for step in range(1, steps):
        clock.now += 0.7
        end = step % 7 == 0
        assert both.due_by_count(step, epoch_end=end) == any(one.due_by_count(step, epoch_end=end) for one in each)
        due = [one.due_by_time() for one in each]
        assert both.due_by_time() == any(due)
        if any(due):
            for one in (both, *each):
                one.saved(0.0)


def test_auto_beside_a_time_never_waits_longer_than_that() -> None:
    policy = Policy(("auto", "30s"), 1, Ticks())
    policy.saved(60.0)
    assert policy.seconds == 30.0


@pytest.mark.parametrize("every", [(), [500, "soon"], ["auto", 0], [None], [["5s"]], {"5s"}, 2.5])
def test_several_of_which_one_is_none_are_refused(every: object) -> None:
    with pytest.raises(BadInputError, match="interval"):
        Policy(every)  # type: ignore[arg-type]


def test_a_wish_that_came_to_nothing_is_repeated_an_interval_later() -> None:
    clock = Ticks()
    policy = Policy("10s", 1, clock)
    asked = []
    for clock.now in range(0, 35):
        if policy.due_by_time():
            asked.append(clock.now)
    assert asked == [10, 20, 30]
