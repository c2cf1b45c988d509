"""A wall clock that jumps by days, back and forth, each time that somebody looks at it; monotonic clocks do not.

It is that of this process alone, as far as Python code can ask it. Started as a program, this is a writer process on
such a clock; as the real one, it imports no torch.
"""

import datetime
import itertools
import sys
import time
from pathlib import Path

DAY_SECONDS = 86400.0
_DAYS = (30, -30, 1, -1, 0, 2)


class _Clock:
    def __init__(self) -> None:
        self._true_time = time.time
        self._jumps = itertools.cycle(_DAYS)

    def time(self) -> float:
        return self._true_time() + DAY_SECONDS * next(self._jumps)


def jump() -> None:
    """Replaces the wall clock. Modules that have ``datetime`` or ``time()`` by name already keep the true one."""
    clock = _Clock()

    class JumpingDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "JumpingDatetime":
            return cls.fromtimestamp(clock.time(), tz)

    time.time = clock.time
    time.time_ns = lambda: int(clock.time() * 1e9)
    datetime.datetime = JumpingDatetime  # type: ignore[misc]


def writer_command() -> list[str]:
    """The command line of a writer process on such a clock, without its arguments."""
    return [sys.executable, "-P", str(Path(__file__))]


if __name__ == "__main__":
    jump()
    from overnight.trainer.checkpoint.writing import process

    process.main(sys.argv[1:])
