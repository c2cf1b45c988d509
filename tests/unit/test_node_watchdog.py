"""The watchdog's clock, without processes: it never fires on ranks that go on, and always on ranks that do not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.platform.node import stacks
from overnight.platform.node.restarts import Restarts
from overnight.platform.node.watchdog import FACTOR, FIRST_FACTOR, MIN_SEEN, PAUSE_SECONDS, Watchdog
from overnight.trainer import stacks as trainer_stacks

FLOOR = 10.0


def stepping(watchdog: Watchdog, rank: int, times: list[float], first_step: int = 1, **told: Any) -> None:
    for number, now in enumerate(times):
        watchdog.heard(rank, now, step=first_step + number, **told)


def look(watchdog: Watchdog, living: list[int], since: float, until: float, **patience: float) -> float | None:
    """Looks once a second; when it fires."""
    now = since
    while now <= until:
        if watchdog.hangs(living, now, **patience):
            return now
        now += 1.0
    return None


def test_what_has_hardly_been_seen_is_given_more_time() -> None:
    watchdog = Watchdog(FLOOR)
    watchdog.heard(0, 0.0)
    fired = look(watchdog, [0], 0.0, 1000.0)
    assert fired is not None and FIRST_FACTOR * FLOOR < fired <= FIRST_FACTOR * FLOOR + 1


def test_after_some_steps_the_floor_or_ten_times_the_longest_counts() -> None:
    quick, slow = Watchdog(FLOOR), Watchdog(FLOOR)
    stepping(quick, 0, [float(t) for t in range(MIN_SEEN + 2)], doing="compute")
    assert look(quick, [0], 4.0, 1000.0) == pytest.approx(4.0 + FLOOR + 1)
    stepping(slow, 0, [7.0 * t for t in range(MIN_SEEN + 2)], doing="compute")
    assert look(slow, [0], 28.0, 1000.0) == pytest.approx(28.0 + FACTOR * 7.0 + 1)


def test_each_phase_has_a_clock_of_its_own() -> None:
    watchdog = Watchdog(FLOOR)
    stepping(watchdog, 0, [float(t) for t in range(10)], doing="compute")
    watchdog.heard(0, 10.0, phase="eval", doing="eval")
    assert look(watchdog, [0], 10.0, 10.0 + FIRST_FACTOR * FLOOR) is None, "a first evaluation may take long"
    watchdog.heard(0, 71.0, phase="", doing="compute")
    assert look(watchdog, [0], 71.0, 1000.0) == pytest.approx(71.0 + FLOOR + 1), "training may not"


def test_one_that_waits_for_a_peer_is_not_to_blame() -> None:
    watchdog = Watchdog(FLOOR)
    for rank in (0, 1):
        stepping(watchdog, rank, [float(t) for t in range(10)], doing="compute")
    watchdog.heard(0, 10.0, phase="eval", doing="eval")
    assert look(watchdog, [0, 1], 10.0, 69.0) is None, "rank 1 waits in a collective while rank 0 evaluates"
    assert look(watchdog, [1], 70.0, 80.0) == 70.0, "once rank 0 has ended, nobody is left to wait for"


def test_ranks_that_never_spoke_are_not_watched_and_zero_turns_it_off() -> None:
    assert look(Watchdog(FLOOR), [0, 1], 0.0, 10_000.0) is None
    off = Watchdog(0.0)
    off.heard(0, 0.0)
    assert look(off, [0], 0.0, 10_000.0) is None


def test_a_pause_of_the_looker_is_held_against_nobody() -> None:
    watchdog = Watchdog(FLOOR)
    stepping(watchdog, 0, [float(t) for t in range(10)], doing="compute")
    assert not watchdog.hangs([0], 10.0)
    assert not watchdog.hangs([0], 10_000.0), "it was stopped itself: what was said meanwhile is not read yet"
    assert look(watchdog, [0], 10_001.0, 20_000.0) == pytest.approx(10_000.0 + FLOOR, abs=1.5)


def test_the_same_said_again_is_no_progress_and_a_beat_is() -> None:
    watchdog = Watchdog(FLOOR)
    stepping(watchdog, 0, [float(t) for t in range(10)], doing="compute")
    for now in range(10, 30):
        watchdog.heard(0, float(now), step=10, doing="compute")
    assert look(watchdog, [0], 20.0, 1000.0) == 20.0
    watchdog.heard(0, 30.0, beats=5)
    assert not watchdog.hangs([0], 30.0)


def test_what_hung_before_is_given_more_time_when_it_starts_again() -> None:
    watchdog = Watchdog(FLOOR)
    stepping(watchdog, 0, [float(t) for t in range(10)], doing="compute")
    watchdog.restart()
    assert look(watchdog, [0], 10.0, 500.0) is None, "the new rank has not spoken yet"
    watchdog.heard(0, 500.0, doing="compute")
    assert look(watchdog, [0], 500.0, 1000.0, patience=4.0) == pytest.approx(500.0 + 4 * FLOOR + 1)


SAID = st.lists(
    st.tuples(
        st.integers(0, 2),  # rank
        st.floats(0.0, FLOOR * 0.9),  # seconds later
        st.sampled_from(["compute", "data_wait", "eval"]),
        st.booleans(),  # whether a step further
    ),
    min_size=1,
    max_size=60,
)


@given(SAID, st.floats(1.0, 8.0))
def test_it_never_fires_before_everyone_was_silent_for_the_floor_and_always_fires_in_the_end(
    said: list[tuple[int, float, str, bool]], patience: float
) -> None:
    watchdog = Watchdog(FLOOR)
    now, steps, progress = 0.0, [0, 0, 0], [0.0, 0.0, 0.0]
    known: dict[int, tuple[int, str]] = {}
    gaps: list[float] = []
    for rank, later, doing, is_step in said:
        before, now = now, now + later
        fired = look(watchdog, [0, 1, 2], before, now, patience=patience)
        assert fired is None or all(fired - progress[one] > FLOOR for one in known), "someone had just got on"
        steps[rank] += is_step
        watchdog.heard(rank, now, step=steps[rank], doing=doing)
        if known.get(rank) != (steps[rank], doing):
            gaps += [now - progress[rank]] if rank in known else []
            known[rank], progress[rank] = (steps[rank], doing), now
    longest = patience * max([FIRST_FACTOR * FLOOR, *(FACTOR * gap for gap in gaps)])
    pauses = PAUSE_SECONDS + now  # looks are as far apart as what was said: each gap may be forgiven once
    assert look(watchdog, [0, 1, 2], now, now + longest + pauses + 2) is not None


@given(st.lists(st.sampled_from(["fail", "commit", "again"]), max_size=60), st.integers(1, 4))
def test_restarts_in_a_row_are_bounded_by_progress_alone(said: list[str], limit: int) -> None:
    restarts = Restarts(limit)
    step, in_vain = 0, 0
    for what in said:
        if what == "fail":
            assert restarts.allowed is (in_vain < limit)
            if restarts.allowed:
                restarts.note("rank 0 was ended by SIGKILL")
                restarts.forked(step)
                in_vain += 1
        else:
            step += what == "commit"
            in_vain = 0 if what == "commit" else in_vain
            restarts.committed(step)
    assert restarts.in_vain == in_vain and len(restarts.causes) <= 50


def test_a_checkpoint_that_was_there_before_is_no_progress() -> None:
    restarts = Restarts(limit=2)
    restarts.forked(6)
    restarts.note("x")
    restarts.committed(6)
    assert restarts.in_vain == 1
    restarts.committed(7)
    assert restarts.in_vain == 0


def test_supervisor_and_trainer_mean_the_same_signal() -> None:
    assert stacks.SIGNAL == trainer_stacks.SIGNAL
