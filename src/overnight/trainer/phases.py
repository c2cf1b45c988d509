"""Where the seconds of this process went: one clock that is always in exactly one category.

Because it only ever switches, the categories sum to the wall clock by construction.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CATEGORIES = (
    "launch",
    "restore",
    "compile",
    "data_wait",
    "compute",
    "recomputed",
    "checkpoint",
    "eval",
    "generation",
    "idle",
    "shutdown",
)
"""The ledger's lines, as ``/v1/push`` carries them."""


def seconds_since_launch(attempt_dir: Path | None = None) -> float:
    """Seconds since this process was launched for its attempt.

    A warm process may have been forked long before it was given work, so the attempt's launch lock, when it is younger
    than the process, is what counts.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    if attempt_dir is not None:
        with suppress(OSError):
            age = min(age, time.time() - (attempt_dir / "launch.lock").stat().st_mtime)
    return max(0.0, age)


class Ledger:
    """Splits the wall clock into categories and counts things.

    Args:
        monotonic: Seconds on a clock that never jumps.
        launched: Seconds that had passed since the launch when this ledger began.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, launched: float = 0.0) -> None:
        self._monotonic = monotonic
        self._since = monotonic()
        self._seconds: dict[str, float] = defaultdict(float, launch=launched)
        self._counts: dict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = defaultdict(float)
        self._taken_counts: dict[str, float] = defaultdict(float)
        self._beats = 0
        self.category = "launch"

    def pulse(self) -> dict[str, Any]:
        """What the process is at, and how often that has changed: a sign of progress. Any thread may ask."""
        return {"doing": self.category, "beats": self._beats}

    def switch(self, category: str) -> str:
        """Enters ``category`` and returns the one before."""
        if category not in CATEGORIES:
            raise ValueError(f"{category!r} is no ledger category: {', '.join(CATEGORIES)}")
        now = self._monotonic()
        before = self.category
        self._seconds[before] += now - self._since
        self._since = now
        self._beats += 1
        self.category = category
        return before

    @contextmanager
    def within(self, category: str) -> Iterator[None]:
        """``category`` for the length of a block, then what it was before."""
        before = self.switch(category)
        try:
            yield
        finally:
            self.switch(before)

    def count(self, name: str, number: float = 1) -> None:
        """Adds to a count such as ``updates`` or ``bytes_staged``."""
        self._counts[name] += number

    def seconds(self) -> dict[str, float]:
        """Seconds by category up to now; they sum to the time since the launch."""
        self.switch(self.category)
        return dict(self._seconds)

    def take(self) -> dict[str, dict[str, float]]:
        """What came on top since the last call, as ``/v1/push`` wants it."""
        self.switch(self.category)
        seconds = {k: v - self._taken[k] for k, v in self._seconds.items() if v != self._taken[k]}
        counts = {k: v - self._taken_counts[k] for k, v in self._counts.items() if v != self._taken_counts[k]}
        self._taken = defaultdict(float, self._seconds)
        self._taken_counts = defaultdict(float, self._counts)
        return {"seconds": seconds, "counts": counts}


class Reached:
    """The highest step that any attempt of a trial has reached, so that work done twice is counted as such.

    Args:
        trial_dir: The trial's folder, with ``attempts/``.
        attempt_dir: This attempt's, in which its own step is noted.
    """

    def __init__(self, trial_dir: Path, attempt_dir: Path) -> None:
        self.step = 0
        for path in trial_dir.glob("attempts/*/reached"):
            with suppress(OSError, ValueError):
                self.step = max(self.step, int(path.read_text()))
        attempt_dir.mkdir(parents=True, exist_ok=True)
        self._path = attempt_dir / "reached"

    def note(self, step: int) -> None:
        """Notes this attempt's step; a full disk costs the note, not the run."""
        with suppress(OSError):
            self._path.write_text(f"{max(step, self.step)}\n")
