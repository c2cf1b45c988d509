"""How often to checkpoint: the interval at which saving and redoing cost least together.

A save costs what training feels of it: the time that it holds up the loop, and what the write behind training takes
away from the updates meanwhile (cores, memory bandwidth). Both are measured in the run itself, so that a save that
nobody feels happens often and an expensive one seldom.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

MTBF_SECONDS = 12 * 3600.0
"""Assumed mean time between failures of one rank. Hardware alone fails far less often (Llama 3: 419 interruptions in 54
days on 16,384 GPUs, one in 50,000 GPU hours); people, reboots and full memories end runs more often than it does."""

FIRST_SECONDS = 5.0
RANGE_SECONDS = (2.0, 600.0)
MAX_SHARE = 0.05
"""Of the run's time that saves may cost before the upper bound of the interval gives way."""

ASSUMED_SLOWDOWN = 0.2
NUM_SAMPLES = 64
MIN_SAMPLES = 8
SMOOTHING = 0.3


def optimal_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """The interval between saves with the least expected loss.

    Young's first-order optimum sqrt(2 x cost x MTBF) (Young 1974, CACM 17(9)) with Daly's higher-order correction (Daly
    2006, FGCS 22(3), equation 37), which matters when a save costs as much as failures are apart.

    Args:
        cost_seconds: Of one save.
        mtbf_seconds: Mean time between failures of the whole run.
    """
    ratio = cost_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    young = math.sqrt(2 * cost_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


class Slowdown:
    """How much longer updates take while a checkpoint is written behind them: medians of what was measured.

    Args:
        monotonic: Seconds on a clock that never jumps.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last: float | None = None
        self._busy: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._idle: deque[float] = deque(maxlen=NUM_SAMPLES)

    def updated(self, *, writing: bool) -> None:
        """An update is over; ``writing``: a checkpoint was written meanwhile."""
        now = self._monotonic()
        if self._last is not None:
            (self._busy if writing else self._idle).append(now - self._last)
        self._last = now

    def interrupted(self) -> None:
        """What comes next is no plain update: the time until its end says nothing."""
        self._last = None

    @property
    def share(self) -> float:
        """Lost share of the time of writing, 0 to 1; an assumption while too little was seen."""
        if min(len(self._busy), len(self._idle)) < MIN_SAMPLES:
            return ASSUMED_SLOWDOWN
        busy, idle = statistics.median(self._busy), statistics.median(self._idle)
        return max(0.0, 1 - idle / busy) if busy > 0 else 0.0


class AutoInterval:
    """Seconds between saves, learnt from what saves cost.

    Args:
        mtbf_seconds: Mean time between failures of the whole run.
        slowdown: Of updates while a checkpoint is written.

    Attributes:
        seconds: The interval.
        cost_seconds: Of one save: what training loses by it.
    """

    def __init__(self, mtbf_seconds: float, slowdown: Slowdown) -> None:
        self._mtbf_seconds = mtbf_seconds
        self._slowdown = slowdown
        self._stall: float | None = None
        self._write: float | None = None
        self.seconds = FIRST_SECONDS
        self.cost_seconds = 0.0

    def staged(self, stall_seconds: float) -> None:
        """A save held up the loop for so long."""
        self._stall = _smooth(self._stall, stall_seconds)
        self._update()

    def committed(self, write_seconds: float) -> None:
        """A save was written, behind training, in so long."""
        self._write = _smooth(self._write, write_seconds)
        self._update()

    def _update(self) -> None:
        """Never shorter than a write takes: saves would only wait for each other."""
        write = self._write or 0.0
        self.cost_seconds = (self._stall or 0.0) + self._slowdown.share * write
        low = max(RANGE_SECONDS[0], write)
        high = max(RANGE_SECONDS[1], low, self.cost_seconds / MAX_SHARE)
        self.seconds = min(high, max(low, optimal_seconds(self.cost_seconds, self._mtbf_seconds)))


def _smooth(before: float | None, now: float) -> float:
    """Follows what is measured, but not every outlier at once: a cold cache, a busy disk."""
    return now if before is None else before + SMOOTHING * (now - before)
