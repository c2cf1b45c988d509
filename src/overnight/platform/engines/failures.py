"""How often devices fail, from what has happened on them: by this the trainer decides how often to checkpoint."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from overnight.core.clock import Clock
from overnight.store.engine import Store
from overnight.store.failures import History, histories

log = logging.getLogger(__name__)

PRIOR_SECONDS = 12 * 3600.0
"""What is assumed before anything was seen counts as one fault in so many seconds, as the trainer assumes by itself."""

WINDOW = timedelta(days=30)
REFRESH_SECONDS = 600.0


def mean_seconds(histories: Iterable[History]) -> float:
    """Mean time between failures of one of some devices: time seen and assumed, over faults seen and assumed."""
    seen = list(histories)
    faults = sum(history.faults for history in seen)
    return (PRIOR_SECONDS + sum(history.seconds for history in seen)) / (1 + faults)


class FailureRates:
    """Remembers what the store knows, so that no launch has to count attempts.

    Args:
        store: Where it looks.
        clock: For the beginning of the window.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._histories: Mapping[str, History] = {}

    def mtbf_seconds(self, device_ids: Iterable[str]) -> float:
        """Mean time between failures of one of these devices."""
        known = self._histories
        return mean_seconds(known[device] for device in device_ids if device in known)

    async def run(self) -> None:
        """Looks again now and then, for ever."""
        while True:
            try:
                self._histories = await asyncio.to_thread(self._look, self._clock.now() - WINDOW)
            except Exception:
                log.exception("the failures of devices could not be counted")
            await asyncio.sleep(REFRESH_SECONDS)

    def _look(self, since: datetime) -> dict[str, History]:
        with self._store.read() as conn:
            return histories(conn, since)
