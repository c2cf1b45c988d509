"""Rules: when a sweep ends, and what is cancelled then."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from overnight.core.enums import Mode, ProposalStatus, SweepState, TrialState
from overnight.core.models.spec import Distribution, Objective, StopRules, SweepConfig
from overnight.platform.sweeps.rules import Progress, consecutive_failures, deadline_after, ending
from overnight.store.searches import Asked, SearchTrial

START = datetime(2026, 1, 1, tzinfo=UTC)
ACCURACY = Objective(metric="acc", mode=Mode.MAX)


def config(trials: int = 10, **stop: object) -> SweepConfig:
    return SweepConfig(
        space={"x": Distribution(kind="range", low=0, high=1)}, trials=trials, stop=StopRules.model_validate(stop)
    )


def trial(number: int, state: TrialState, value: float | None = None, attempts: int = 1) -> SearchTrial:
    ended = START + timedelta(minutes=number) if state in (TrialState.FAILED, TrialState.COMPLETED) else None
    if state in (TrialState.PRUNED, TrialState.CANCELLED):
        ended = START + timedelta(minutes=number)
    return SearchTrial(f"t{number}", f"e-{number}", "swp", {"x": number}, state, "boom", value, attempts, ended)


def progress(*trials: SearchTrial) -> Progress:
    return Progress.of("swp", [Asked(n, ProposalStatus.ACCEPTED, "", t) for n, t in enumerate(trials)])


def decide(sweep: SweepConfig, done: Progress, seconds: float = 0, deadline: datetime | None = None):
    return ending(sweep, ACCURACY, done, seconds, START + timedelta(hours=1), deadline)


F, C, P, X = TrialState.FAILED, TrialState.COMPLETED, TrialState.PRUNED, TrialState.CANCELLED


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([F, F, F], 3),
        ([F, C, F, F], 2),
        ([F, F, P], 0),
        ([F, X, F], 2),
        ([], 0),
        ([F, TrialState.RUNNING, F], 2),
    ],
)
def test_failures_in_a_row(states: list[TrialState], expected: int) -> None:
    assert len(consecutive_failures([trial(n, s) for n, s in enumerate(states)])) == expected


def test_failures_are_in_order_of_ending_not_of_number() -> None:
    late, early = trial(9, C), trial(1, F)
    assert consecutive_failures([late, early]) == []


def test_the_breaker_names_the_last_failure_and_drops_what_never_started() -> None:
    trials = [trial(0, F), trial(1, F), trial(2, TrialState.QUEUED, attempts=0), trial(3, TrialState.QUEUED)]
    end = decide(config(consecutive_failures=2), progress(*trials, trial(4, TrialState.RUNNING)))
    assert end is not None
    assert end.state is SweepState.BROKEN
    assert end.cause == "2 trials in a row failed, the last was e-1: boom"
    assert end.dropped(trials) == ["t2"]


def test_a_target_stops_what_runs() -> None:
    trials = [trial(0, C, 0.97), trial(1, TrialState.RUNNING), trial(2, TrialState.QUEUED, attempts=0)]
    end = decide(config(target=0.95), progress(*trials))
    assert end is not None
    assert end.cause == "e-0 reached 0.97, the target was at least 0.95"
    assert end.dropped(trials) == ["t1", "t2"]
    assert decide(config(target=0.98), progress(*trials)) is None


def test_a_budget_lets_what_runs_finish() -> None:
    trials = [trial(0, TrialState.RUNNING), trial(1, TrialState.QUEUED, attempts=0)]
    assert decide(config(gpu_hours=1), progress(*trials), seconds=3599) is None
    end = decide(config(gpu_hours=1), progress(*trials), seconds=3600)
    assert end is not None
    assert end.cause == "the budget of 1 device-hours is spent"
    assert end.dropped(trials) == ["t1"]


def test_all_trials_are_waited_for() -> None:
    trials = [trial(0, TrialState.QUEUED, attempts=0), trial(1, C)]
    assert decide(config(trials=3), progress(*trials)) is None
    end = decide(config(trials=2), progress(*trials))
    assert end is not None
    assert end.dropped(trials) == []


def test_a_duplicate_counts_neither_as_accepted_nor_as_open() -> None:
    other = SearchTrial("o", "e-o", "another", {}, TrialState.RUNNING, "", None, 1, None)
    found = Progress.of("swp", [Asked(0, ProposalStatus.DUPLICATE, "", other)])
    assert (found.num_accepted, found.num_open, found.trials) == (0, 0, ())


ZURICH = ZoneInfo("Europe/Zurich")


@pytest.mark.parametrize(
    ("started", "until", "expected"),
    [
        ("2026-01-10T22:00+01:00", "08:00", "2026-01-11T08:00+01:00"),
        ("2026-01-10T07:00+01:00", "08:00", "2026-01-10T08:00+01:00"),
        ("2026-01-10T08:00+01:00", "08:00", "2026-01-11T08:00+01:00"),
        ("2026-03-28T22:00+01:00", "08:00", "2026-03-29T08:00+02:00"),  # an hour shorter that night
        ("2026-10-24T22:00+02:00", "08:00", "2026-10-25T08:00+01:00"),
    ],
)
def test_until_is_a_time_of_day_of_the_zone(started: str, until: str, expected: str) -> None:
    found = deadline_after(datetime.fromisoformat(started).astimezone(UTC), until, ZURICH)
    assert found == datetime.fromisoformat(expected)


def test_a_deadline_ends_the_sweep() -> None:
    deadline = datetime(2026, 1, 1, 2, 0, tzinfo=ZURICH)  # 01:00 UTC
    end = decide(config(), progress(), deadline=deadline)
    assert end is not None
    assert end.cause == "no new trials after 02:00 CET"
    assert decide(config(), progress(), deadline=deadline + timedelta(seconds=1)) is None
