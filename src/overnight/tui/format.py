"""How values look on screen. Every function returns ``rich.text.Text`` built from sanitised text, never markup."""

import json
from datetime import datetime
from typing import Any

from rich.text import Text

from overnight.core.enums import DeviceState, PriorityClass, TrialState
from overnight.core.text import sanitize

STATE_LOOK: dict[TrialState, tuple[str, str]] = {
    TrialState.HELD: ("‖", "yellow"),
    TrialState.QUEUED: ("·", "bright_black"),
    TrialState.STARTING: ("▸", "cyan"),
    TrialState.RUNNING: ("▶", "green"),
    TrialState.YIELDING: ("◂", "yellow"),
    TrialState.STOPPING: ("■", "yellow"),
    TrialState.COMPLETED: ("✓", "green"),
    TrialState.PRUNED: ("✂", "bright_black"),
    TrialState.FAILED: ("✗", "red"),
    TrialState.CANCELLED: ("∅", "bright_black"),
}
"""A sign and a colour per state: colour is never the only carrier."""

DEVICE_LOOK: dict[DeviceState, tuple[str, str]] = {
    DeviceState.HEALTHY: ("●", "green"),
    DeviceState.SUSPECT: ("●", "yellow"),
    DeviceState.QUARANTINED: ("✗", "red"),
    DeviceState.PROBATION: ("◐", "yellow"),
    DeviceState.DRAINING: ("◌", "yellow"),
    DeviceState.BUSY: ("◍", "bright_black"),
    DeviceState.LOST: ("?", "red"),
}

CLASS_LOOK = {
    PriorityClass.URGENT: "bold magenta",
    PriorityClass.NORMAL: "",
    PriorityClass.EXPLORATORY: "bright_black",
}


def plain(value: object, limit: int = 200) -> Text:
    """Foreign text on one line, harmless."""
    return Text(sanitize(str(value), limit=limit, one_line=True), no_wrap=True)


def state(value: TrialState) -> Text:
    """A trial's state with its sign."""
    sign, colour = STATE_LOOK[value]
    return Text(f"{sign} {value}", style=colour, no_wrap=True)


def priority(value: PriorityClass) -> Text:
    """A trial's class."""
    return Text(str(value), style=CLASS_LOOK[value], no_wrap=True)


def number(value: float | None, digits: int = 4) -> Text:
    """An objective, or a dash."""
    return Text("-" if value is None else f"{value:.{digits}g}", no_wrap=True)


def duration(seconds: float) -> str:
    """``45s``, ``3m05s``, ``2h14m``, ``3d04h``."""
    whole = int(max(0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def elapsed(start: datetime | None, end: datetime | None, now: datetime) -> Text:
    """Running time so far, or in all."""
    if start is None:
        return Text("-")
    return Text(duration(((end or now) - start).total_seconds()), no_wrap=True)


def params(values: dict[str, Any], limit: int = 200) -> Text:
    """Params as ``name=value`` words, numbers short."""
    words = []
    for key, value in values.items():
        if isinstance(value, float):
            shown = f"{value:.3g}"
        elif isinstance(value, (dict, list)):
            shown = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        else:
            shown = str(value)
        words.append(f"{key}={shown}")
    return plain("  ".join(words), limit)
