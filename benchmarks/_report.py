"""What every benchmark prints: one row per measure, ours beside the peer's, with the goal and whether it was met."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measure. ``goal`` is text such as ``<= 1.2`` (applied to ``ours``), empty when there is none."""

    measure: str
    unit: str
    ours: float | None
    peer: float | None
    peer_name: str
    goal: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return round(self.ours / self.peer, 4) if self.ours is not None and self.peer else None

    @property
    def met(self) -> bool | None:
        """Whether ``ours`` satisfies the goal; None without a goal."""
        if not self.goal:
            return None
        match = re.fullmatch(r"(<=|>=|==)\s*([0-9.]+)", self.goal)
        if match is None:
            raise ValueError(f"no goal: {self.goal!r}")
        if self.ours is None:
            return False
        limit = float(match[2])
        return {"<=": self.ours <= limit, ">=": self.ours >= limit, "==": self.ours == limit}[match[1]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
    }


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def median(values: list[float]) -> float:
    """The median, rounded to what can be told apart."""
    return round(statistics.median(values), 3)


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def publish(name: str, rows: list[Row], *, as_json: bool) -> None:
    """Prints the rows."""
    if as_json:
        json.dump({"name": name, "machine": machine(), "rows": [row.to_dict() for row in rows]}, sys.stdout, indent=1)
        print()
        return
    table = Table(title=name, title_justify="left")
    for title in ("measure", "unit", "ours", "peer", "peer is", "ratio", "goal", "met"):
        table.add_column(title, no_wrap=title not in ("unit", "peer is"), overflow="fold")
    for row in rows:
        shown = [row.measure, row.unit, row.ours, row.peer, row.peer_name, row.ratio, row.goal, row.met]
        table.add_row(*("-" if value is None else str(value) for value in shown))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
