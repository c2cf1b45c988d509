"""Time is passed in: wall time for people, monotonic time for decisions."""

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What the platform asks the time of."""

    def now(self) -> datetime:
        """Aware UTC wall time. For records and people; never compared to decide an expiry."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps. Only differences inside one process mean anything."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Aware UTC wall time."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()
