"""A clock that moves when it is told to, so that tests of timeouts take no time."""

from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeClock:
    """Wall and monotonic time under the test's control.

    Args:
        now: Wall time at the start, aware UTC.
    """

    def __init__(self, now: datetime = START) -> None:
        if now.tzinfo is None:
            raise ValueError(f"{now!r} has no time zone; times are aware UTC")
        self._now = now
        self._monotonic_seconds = 1_000.0

    def now(self) -> datetime:
        """Aware UTC wall time."""
        return self._now

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return self._monotonic_seconds

    def advance(self, seconds: float) -> None:
        """Lets time pass on both clocks.

        Raises:
            ValueError: ``seconds`` is negative; monotonic time cannot go back.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s; use jump() for the wall clock")
        self._now += timedelta(seconds=seconds)
        self._monotonic_seconds += seconds

    def jump(self, seconds: float) -> None:
        """Sets the wall clock forward or back, as an administrator or NTP does. Monotonic time does not notice."""
        self._now += timedelta(seconds=seconds)
