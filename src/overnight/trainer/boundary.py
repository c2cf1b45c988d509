"""What may happen between two updates, and who wants it: signals that ask to leave, intervals that ask to save."""

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any

from overnight.core.errors import BadInputError
from overnight.trainer.interval import MTBF_SECONDS, AutoInterval, Slowdown
from overnight.trainer.owner import Owner

Every = int | str | Sequence[int | str] | None
"""When to save without being asked, as scripts say it."""

_EVERY_HINT = 'Like every=500, "30s", "epoch", "auto", several of these in a tuple, or None.'
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
        self._owner = Owner()
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
        if not self._owner.is_here:  # a forked child has no boundary at which it would leave
            self.restore()
            signal.raise_signal(number)
            return
        wish = Leave.INTERRUPT if number == signal.SIGINT and self._alone else Leave.YIELD
        self.leave = max(self.leave, wish)
        self.received = self.received or time.monotonic()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


class Policy:
    """When to checkpoint without being asked.

    Whatever updates and epochs call for is the same on all ranks. Of clocks, rank 0's decides for all.

    Args:
        every: Updates (int), time (``"30s"``, ``"5m"``), ``"epoch"``, ``"auto"``, several of these, or None for never.
        world_size: Number of ranks; failures grow with it.
        monotonic: Seconds on a clock that never jumps.
        mtbf_seconds: Mean time between failures of one rank, as the platform knows it; an assumption if None.

    Raises:
        BadInputError: ``every`` is none of these.
    """

    def __init__(
        self,
        every: Every,
        world_size: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
        mtbf_seconds: float | None = None,
    ) -> None:
        self._monotonic = monotonic
        intervals = [_interval(one) for one in _each(every)]
        self._updates = tuple(one for one in intervals if isinstance(one, int))
        self._epochs = "epoch" in intervals
        self._seconds = min((one for one in intervals if isinstance(one, float)), default=math.inf)
        self._slowdown = Slowdown(monotonic)
        auto = AutoInterval((mtbf_seconds or MTBF_SECONDS) / world_size, self._slowdown)
        self._auto = auto if "auto" in intervals else None
        self._since = monotonic()

    @property
    def seconds(self) -> float:
        """Time between saves; infinite if the clock calls for none."""
        return self._seconds if self._auto is None else min(self._seconds, self._auto.seconds)

    def due_by_count(self, step: int, *, epoch_end: bool) -> bool:
        """Whether updates or epochs call for a save; the same on all ranks."""
        return (self._epochs and epoch_end) or any(step % updates == 0 for updates in self._updates)

    def due_by_time(self) -> bool:
        """Whether the clock calls for a save. True once per interval, since the ranks' answer takes a round."""
        now = self._monotonic()
        if now - self._since < self.seconds:
            return False
        self._since = now
        return True

    def updated(self, *, writing: bool) -> None:
        """An update is over. Learns how much slower they are while a checkpoint is written (``writing``)."""
        if self._auto is not None:
            self._slowdown.updated(writing=writing)

    def saved(self, stall_seconds: float) -> None:
        """A save has begun and held up the loop for so long: the next is an interval away."""
        self._since = self._monotonic()
        self._slowdown.interrupted()
        if self._auto is not None:
            self._auto.staged(stall_seconds)

    def committed(self, write_seconds: float) -> None:
        """A save was written behind training, and that took so long."""
        if self._auto is not None:
            self._auto.committed(write_seconds)


def _each(every: Every) -> tuple[int | str, ...]:
    if every is None:
        return ()
    if isinstance(every, int | str):
        return (every,)
    if isinstance(every, Sequence) and every:
        return tuple(every)
    raise BadInputError(f"every={every!r} is no interval", hint=_EVERY_HINT)


def _interval(every: Any) -> int | float | str:
    """Updates as int, seconds as float, or the words that are left."""
    if every in ("epoch", "auto"):
        return str(every)
    if isinstance(every, str):
        return parse_seconds(every)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise BadInputError(f"every={every!r} is no interval", hint=_EVERY_HINT)
    return every


def parse_seconds(text: str) -> float:
    """Seconds in ``"30s"``, ``"5m"`` or ``"1.5h"``.

    Raises:
        BadInputError: Another form, or no positive time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) <= 0:
        raise BadInputError(f"every={text!r} is no interval", hint=_EVERY_HINT)
    return float(match[1]) * _UNITS[match[2]]
