"""Reads the objective from what a command prints: a JSON line, or a pattern.

Standard library only: runs in the user's interpreter too.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overnight.platform.node.tail import Tail

MAX_PATTERN_LINE = 2_000
"""Longer lines are not matched: a pattern with backtracking must not stop the supervisor."""

STEP_NAMES = ("step", "global_step", "iteration", "epoch")


Report = tuple[int, dict[str, float | str]]
"""Step, and values by name."""


class PrintedObjective:
    """Follows the output of a rank for what it reports there.

    Args:
        log: The rank's output.
        objective: The ``objective`` of an order; None, or one that is reported by call, finds nothing.
    """

    def __init__(self, log: Path, objective: Mapping[str, Any] | None) -> None:
        is_printed = objective is not None and objective["source"] != "report"
        self._tail = Tail(log) if is_printed else None
        self._reader = ObjectiveReader(objective) if objective is not None and is_printed else None

    def read(self) -> list[Report]:
        """What has come since the last time."""
        return self._found(self._tail.read()) if self._tail is not None else []

    def finish(self) -> list[Report]:
        """The rest, with a last line that has no end."""
        return self._found(self._tail.finish()) if self._tail is not None else []

    def _found(self, lines: list[str]) -> list[Report]:
        found = [self._reader.feed(line) for line in lines] if self._reader is not None else []
        return [report for report in found if report is not None]


class ObjectiveReader:
    """Finds reports in lines of output.

    Args:
        objective: The ``objective`` of an order, with source ``json`` or ``pattern``.
    """

    def __init__(self, objective: Mapping[str, Any]) -> None:
        self._metric = str(objective["metric"])
        self._pattern = re.compile(objective["pattern"]) if objective["source"] == "pattern" else None
        self._count = 0

    def feed(self, line: str) -> Report | None:
        """A report (step, values) if the line has the objective in it. Without a step, reports are counted from 1."""
        found = self._by_json(line) if self._pattern is None else self._by_pattern(line)
        if found is None:
            return None
        step, value = found
        self._count += 1
        return (self._count if step is None else step), {self._metric: value}

    def _by_json(self, line: str) -> tuple[int | None, float | str] | None:
        text = line.strip()
        if not text.startswith("{") or self._metric not in text:
            return None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or self._metric not in values:
            return None
        step = next((values[name] for name in STEP_NAMES if isinstance(values.get(name), int)), None)
        return step, as_value(values[self._metric])

    def _by_pattern(self, line: str) -> tuple[int | None, float | str] | None:
        match = self._pattern.search(line[:MAX_PATTERN_LINE]) if self._pattern else None
        if match is None:
            return None
        groups = match.groupdict()
        step = groups.get("step") or ""
        return int(step) if step.isdecimal() else None, as_value(groups.get("value") or match.group(1))


def as_value(value: Any) -> float | str:
    """A finite number, or the text ``nan``, ``inf``, ``-inf``, or what it was, shortened."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return str(value)[:200]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            return "inf" if value > 0 else "-inf"
        if math.isfinite(number):
            return number
        return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return str(value)[:200]
