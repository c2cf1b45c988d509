"""Silence, measured on our own clock: a counter that has not moved for a period, seen by somebody who was awake."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Seen:
    value: Hashable
    since: float


class SilenceWatch:
    """Watches the counters of many keys.

    A stored time is never compared with now: clocks of machines differ and jump. Only a value that stays the same
    through a whole period in which this watcher itself looked regularly counts as silence.

    Args:
        period_seconds: Silence after which a key is reported.
    """

    def __init__(self, period_seconds: float) -> None:
        self._period_seconds = period_seconds
        self._seen: dict[str, _Seen] = {}
        self._looked_at: float | None = None

    def look(self, values: Mapping[str, Hashable], now: float) -> list[str]:
        """Takes note of the present values and returns the keys that have been silent for a period.

        After a pause of the watcher (it was suspended, or too busy to look for half a period) every key gets a full
        period again: what was sent meanwhile may not have arrived.
        """
        paused = self._looked_at is None or now - self._looked_at > self._period_seconds / 2
        self._looked_at = now
        self._seen = {key: seen for key, seen in self._seen.items() if key in values}
        silent = []
        for key, value in values.items():
            seen = self._seen.get(key)
            if seen is None or paused or seen.value != value:
                self._seen[key] = _Seen(value, now)
            elif now - seen.since >= self._period_seconds:
                silent.append(key)
        return silent
