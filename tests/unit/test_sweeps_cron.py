"""Cron lines as crontab(5) means them, across weekdays and daylight saving, with explicit datetimes."""

import pickle
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.errors import InvalidSpecError
from overnight.core.models.spec import Schedule
from overnight.platform.sweeps.cron import CrontabTrigger, trigger_of

ZURICH = ZoneInfo("Europe/Zurich")


def fires(cron: str, start: str, count: int, zone: str = "Europe/Zurich") -> list[str]:
    trigger = trigger_of(Schedule(cron=cron, tz=zone))
    now = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone))
    found = []
    for _ in range(count):
        at = trigger.get_next_fire_time(None, now)
        assert at is not None
        found.append(at.isoformat(timespec="minutes"))
        now = at.astimezone(UTC) + timedelta(microseconds=1)
    return found


def test_weekdays_are_those_of_crontab() -> None:
    # 2026-11-27 is a Friday.
    assert fires("0 22 * * 1-5", "2026-11-27T00:00", 3) == [
        "2026-11-27T22:00+01:00",
        "2026-11-30T22:00+01:00",
        "2026-12-01T22:00+01:00",
    ]


@pytest.mark.parametrize(
    ("weekday", "expected"),
    [
        ("0", "2026-11-29"),
        ("7", "2026-11-29"),
        ("sun", "2026-11-29"),
        ("6", "2026-11-28"),
        ("fri-mon", "2026-11-27"),
        ("5-7", "2026-11-27"),
        ("MON,WED", "2026-11-30"),
        ("1-6/2", "2026-11-27"),
        ("*/6", "2026-11-28"),
    ],
)
def test_weekday_notations(weekday: str, expected: str) -> None:
    assert fires(f"0 0 * * {weekday}", "2026-11-27T00:00", 1)[0].startswith(expected)


def test_day_and_weekday_together_mean_either() -> None:
    found = fires("0 0 1 * 1", "2026-11-28T00:00", 3)
    assert [at[:10] for at in found] == ["2026-11-30", "2026-12-01", "2026-12-07"]


def test_a_time_that_the_clocks_skip_runs_as_if_they_had_not() -> None:
    assert fires("30 2 * * *", "2026-03-28T12:00", 2) == ["2026-03-29T02:30+01:00", "2026-03-30T02:30+02:00"]
    trigger = trigger_of(Schedule(cron="30 2 * * *", tz="Europe/Zurich"))
    at = trigger.get_next_fire_time(None, datetime(2026, 3, 28, 12, tzinfo=ZURICH))
    assert at is not None
    assert at.astimezone(UTC) == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)  # 03:30 on the new clock


def test_a_time_that_comes_twice_runs_once() -> None:
    assert fires("30 2 * * *", "2026-10-24T12:00", 2) == ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    assert fires("0 22 * * *", "2026-10-24T12:00", 2) == ["2026-10-24T22:00+02:00", "2026-10-25T22:00+01:00"]


def test_every_half_hour_follows_the_elapsed_time() -> None:
    utc = [datetime.fromisoformat(at).astimezone(UTC) for at in fires("*/30 * * * *", "2026-10-25T01:00", 8)]
    assert [b - a for a, b in pairwise(utc)] == [timedelta(minutes=30)] * 7


def test_a_start_inside_the_doubled_hour_does_not_run_again() -> None:
    trigger = trigger_of(Schedule(cron="30 2 * * *", tz="Europe/Zurich"))
    second = datetime(2026, 10, 25, 2, 10, tzinfo=ZURICH, fold=1)
    at = trigger.get_next_fire_time(None, second)
    assert at is not None
    assert at.isoformat(timespec="minutes") == "2026-10-26T02:30+01:00"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["0 22 * * 1-5", "30 2 * * *", "*/15 * * * *", "0 0 1 * 1", "5 4 * 2 sun", "@daily"]),
    st.sampled_from(["Europe/Zurich", "America/New_York", "Australia/Lord_Howe", "UTC", "Asia/Kolkata"]),
    st.datetimes(datetime(2025, 1, 1), datetime(2027, 12, 31)),
)
def test_the_next_time_is_always_later_and_survives_pickling(cron: str, zone: str, start: datetime) -> None:
    trigger = trigger_of(Schedule(cron=cron, tz=zone))
    now = start.replace(tzinfo=UTC)
    at = trigger.get_next_fire_time(None, now)
    assert at is not None
    assert at.astimezone(UTC) >= now
    again = pickle.loads(pickle.dumps(trigger))
    assert again.get_next_fire_time(None, now) == at


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "61 * * * *", "* * * * 8", "* * * * mon-", "x * * * *", "0 0 31 2 *", "* * * * */0", "@often"],
)
def test_what_is_no_cron_line_is_refused(cron: str) -> None:
    with pytest.raises(InvalidSpecError):
        trigger_of(Schedule(cron=cron, tz="UTC"))


def test_unknown_zones_are_refused() -> None:
    for zone in ("Mars/Olympus", "../etc/passwd", ""):
        with pytest.raises(InvalidSpecError, match="time zone"):
            trigger_of(Schedule(cron="0 0 * * *", tz=zone))


def test_no_zone_is_the_servers_own() -> None:
    assert isinstance(trigger_of(Schedule(cron="0 0 * * *")), CrontabTrigger)
