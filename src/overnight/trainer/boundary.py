"""What may happen between two updates, and who wants it: signals that ask to leave, intervals that ask to save."""

import math
import re
import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

from overnight.core.errors import BadInputError

MTBF_SECONDS = 3600.0
"""Assumed mean time between failures of one rank, for ``every="auto"``."""

FIRST_SECONDS = 5.0
AUTO_RANGE_SECONDS = (2.0, 600.0)

_EVERY_HINT = 'Like every=500, "30s", "epoch", "auto" or None.'
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Leave(IntEnum):
    """Whether to leave, and how; the greatest wish of any rank wins."""

    NO = 0
    YIELD = 1
    INTERRUPT = 2
    STOP = 3


class Signals:
    """Turns SIGTERM, SIGUSR1 and SIGINT into flags; the second SIGINT kills as usual.

    Installed in the main thread only: elsewhere Python cannot, and signals keep their meaning.
    """

    def __init__(self) -> None:
        self.leave = Leave.NO
        self.received: float | None = None
        self._alone = True
        self._before: dict[int, Any] = {}

    def install(self, *, alone: bool) -> None:
        """Takes the signals over.

        Args:
            alone: Nobody supervises the run: Ctrl-C saves and ends it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._alone = alone
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        wish = Leave.INTERRUPT if number == signal.SIGINT and self._alone else Leave.YIELD
        self.leave = max(self.leave, wish)
        self.received = self.received or time.monotonic()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Policy:
    """When to checkpoint without being asked.

    Args:
        every: Updates (int), time (``"30s"``, ``"5m"``), ``"epoch"``, ``"auto"``, or None for never.
        world_size: Number of ranks; failures grow with it.
        monotonic: Seconds on a clock that never jumps.

    Raises:
        BadInputError: ``every`` is none of these.
    """

    def __init__(
        self, every: int | str | None, world_size: int = 1, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._mtbf_seconds = MTBF_SECONDS / world_size
        self._updates = every if isinstance(every, int) and not isinstance(every, bool) else None
        self._epochs = every == "epoch"
        self._auto = every == "auto"
        self._seconds = FIRST_SECONDS if self._auto else None
        if isinstance(every, str) and not (self._epochs or self._auto):
            self._seconds = parse_seconds(every)
        if isinstance(every, bool) or (self._updates is not None and self._updates < 1):
            raise BadInputError(f"every={every!r} is no interval", hint=_EVERY_HINT)
        self._saved_at = monotonic()
        self._is_asked = False

    def due_by_count(self, step: int, *, epoch_end: bool) -> bool:
        """Whether updates or epochs call for a save; the same on all ranks."""
        return (self._updates is not None and step % self._updates == 0) or (self._epochs and epoch_end)

    def due_by_time(self) -> bool:
        """Whether the clock calls for a save; rank 0 decides for all. True once per save: an answer takes a round."""
        if self._is_asked or self._seconds is None or self._monotonic() - self._saved_at < self._seconds:
            return False
        self._is_asked = True
        return True

    def saved(self, cost_seconds: float) -> None:
        """Learns from a save: how much it held up the loop.

        ``"auto"`` takes Young's interval, sqrt(2 x cost x mean time between failures) (Young 1974, CACM 17(9)).
        """
        self._saved_at = self._monotonic()
        self._is_asked = False
        if self._auto:
            low, high = AUTO_RANGE_SECONDS
            self._seconds = min(high, max(low, math.sqrt(2 * cost_seconds * self._mtbf_seconds)))


def parse_seconds(text: str) -> float:
    """Seconds in ``"30s"``, ``"5m"`` or ``"1.5h"``.

    Raises:
        BadInputError: Another form, or no positive time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) <= 0:
        raise BadInputError(f"every={text!r} is no interval", hint=_EVERY_HINT)
    return float(match[1]) * _UNITS[match[2]]
