"""Asking a remote store again: a cut cable is waited for, a refusal is not."""

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_FINAL = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError),
)
_FINAL_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG}


def is_transient(error: Exception) -> bool:
    """Whether the same request may work later. Drivers raise all sorts of errors; what is not known to be final may."""
    return not isinstance(error, _FINAL) and getattr(error, "errno", None) not in _FINAL_NUMBERS


@dataclass(frozen=True)
class Patience:
    """How long, and how often, to ask again.

    Attributes:
        seconds: No new try after that long.
        first_pause_seconds, longest_pause_seconds: The pause doubles from try to try; up to as much again is random, so
            that ranks do not come back in step.
        progress: Called before each pause.
    """

    seconds: float = 20.0
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 5.0
    progress: Callable[[], None] = lambda: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def call(self, request: Callable[[], T]) -> T:
        """What the request returns at last.

        Raises:
            Exception: The request's own error: a final one, or the last of those for which there was patience.
        """
        deadline = self.clock() + self.seconds
        pause = self.first_pause_seconds
        while True:
            try:
                return request()
            except Exception as error:
                if not is_transient(error) or self.clock() + pause > deadline:
                    raise
            self.progress()
            self.sleep(pause * (1 + random.random()))  # for spreading alone, no part of any result
            pause = min(2 * pause, self.longest_pause_seconds)
