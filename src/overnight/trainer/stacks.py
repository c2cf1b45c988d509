"""Tells the supervisor where this process is stuck: the stacks of all its threads, whatever Python waits for.

The supervisor sends :data:`SIGNAL` to ranks that make no progress and reads the answer from the attempt's folder. The
signal's own handler writes it, so that a process answers that is stuck in C or holds the interpreter's lock.
"""

import faulthandler
import signal
from typing import BinaryIO

from overnight.trainer.environment import Environment

SIGNAL = signal.SIGUSR2

_file: BinaryIO | None = None
"""Referenced for ever: the handler writes to its descriptor."""


def answer_with_stacks(environment: Environment) -> None:
    """Has the signal write ``stacks.R.txt`` into the attempt's folder; a handler of the script's own is left alone."""
    global _file
    if environment.alone or environment.attempt_dir is None or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    try:
        _file = (environment.attempt_dir / f"stacks.{environment.rank}.txt").open("ab", buffering=0)
    except OSError:
        return  # a folder that is gone or full costs the answer, not the run
    faulthandler.register(SIGNAL, file=_file, all_threads=True)
