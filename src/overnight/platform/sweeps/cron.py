"""Cron expressions as crontab(5) means them, on top of APScheduler, which means something else in two places.

APScheduler counts weekdays from Monday, crontab from Sunday (``1-5`` is Monday to Friday there and Tuesday to Saturday
here); APScheduler wants day and weekday to match both, crontab either when both are given.

Daylight saving: a time of day that the clocks skip runs as if they had not been changed (02:30 runs at 03:30); one that
comes twice runs once, the first time. Expressions with ``*`` hours simply follow the elapsed hours.
"""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.util import astimezone
from tzlocal import get_localzone

from overnight.core.errors import InvalidSpecError
from overnight.core.models.spec import Schedule

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_WEEKDAY = re.compile(r"(\*|\w+)(?:-(\w+))?(?:/(\d+))?")
_DOUBLED_MINUTES = 61
_INSTANT = timedelta(microseconds=1)
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class CrontabTrigger(BaseTrigger):  # type: ignore[misc]
    """When a crontab line fires.

    Args:
        expression: Five fields, or a nickname such as ``@daily``.
        zone: Whose time of day.
    """

    def __init__(self, expression: str, zone: tzinfo) -> None:
        fields = _NICKNAMES.get(expression.strip(), expression).split()
        if len(fields) != 5:
            raise ValueError(f"{len(fields)} fields instead of 5")
        minute, hour, day, month, weekday = fields
        weekdays = _weekdays(weekday)
        both = not day.startswith("*") and not weekday.startswith("*")
        pairs = [(day, "*"), ("*", weekdays)] if both else [(day, weekdays)]
        self.expression = expression
        self.fixed_hour = not hour.startswith("*")
        self.parts = [
            CronTrigger(minute=minute, hour=hour, day=d, month=month.lower(), day_of_week=w, timezone=zone)
            for d, w in pairs
        ]

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The first moment from ``now`` on and after ``previous_fire_time``."""
        # In UTC, because adding to a zoned datetime moves the hands of its clock and loses which of two hours it is.
        start = now.astimezone(UTC)
        if previous_fire_time is not None:
            start = max(start, previous_fire_time.astimezone(UTC) + _INSTANT)
        for _ in range(_DOUBLED_MINUTES):
            times = [part.get_next_fire_time(None, start) for part in self.parts]
            found: datetime | None = min((at for at in times if at is not None), default=None)
            if found is None or not (self.fixed_hour and found.fold):
                return found
            start = found.astimezone(UTC) + _INSTANT
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {"expression": self.expression, "fixed_hour": self.fixed_hour, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __str__(self) -> str:
        return f"cron[{self.expression}]"


def zone_of(schedule: Schedule) -> tzinfo:
    """The schedule's time zone; the server's own if it names none.

    Raises:
        InvalidSpecError: There is no such zone.
    """
    if schedule.tz is None:
        return get_localzone()
    try:
        return ZoneInfo(schedule.tz)
    except (KeyError, ValueError, OSError):
        raise InvalidSpecError(
            f"there is no time zone {schedule.tz[:100]!r}", hint="Use an IANA name such as Europe/Zurich or UTC."
        ) from None


def trigger_of(schedule: Schedule) -> CrontabTrigger:
    """The schedule's trigger.

    Raises:
        InvalidSpecError: No crontab expression, no such zone, or one that never fires.
    """
    zone = zone_of(schedule)
    hint = "Write five fields: minute hour day month weekday, such as '0 22 * * 1-5'."
    try:
        trigger = CrontabTrigger(schedule.cron, astimezone(zone))
    except ValueError as error:
        raise InvalidSpecError(f"cannot read the cron expression {schedule.cron[:100]!r}: {error}", hint=hint) from None
    if trigger.get_next_fire_time(None, datetime(2024, 1, 1, tzinfo=zone)) is None:
        raise InvalidSpecError(f"the cron expression {schedule.cron[:100]!r} never fires", hint=hint)
    return trigger


def _weekdays(field: str) -> str:
    """Crontab's weekdays by name. Lists, ranges (also across Sunday) and steps become lists of days."""
    if field == "*":
        return "*"
    days: set[int] = set()
    for part in field.lower().split(","):
        match = _WEEKDAY.fullmatch(part)
        if match is None:
            raise ValueError(f"weekday {part!r}")
        first, last, step = match[1], match[2], int(match[3] or 1)
        if step < 1:
            raise ValueError(f"weekday step {step}")
        low, high = (0, 6) if first == "*" else (_weekday(first), _weekday(last or ("6" if match[3] else first)))
        if high < low:
            high += 7
        days |= {day % 7 for day in range(low, high + 1, step)}
    return ",".join(_DAYS[day] for day in sorted(days))


def _weekday(text: str) -> int:
    if text in _DAYS:
        return _DAYS.index(text)
    if not text.isdecimal() or int(text) > 7:
        raise ValueError(f"weekday {text!r}")
    return int(text)
