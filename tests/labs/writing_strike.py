"""A writer process that does something to itself at a point of its work. As the real one, it imports no torch."""

import errno
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

ALWAYS = "-"
"""As a mark: every process does it."""


def strike(point: str, number: int, deed: str, mark: Path) -> None:
    """Replaces a function by one that strikes first. See ``writing_lab.strikes`` for the arguments."""
    module_name, _, path = point.partition(":")
    prefix = "" if module_name in ("os", "mmap") else "overnight.trainer.checkpoint."
    owner: Any = importlib.import_module(prefix + module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and (str(mark) == ALWAYS or not mark.exists()):
            if str(mark) != ALWAYS:
                mark.touch()
            if deed == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif deed == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise OSError(getattr(errno, deed), os.strerror(getattr(errno, deed)))
        return original(*args, **kwargs)

    setattr(owner, name, struck)


if __name__ == "__main__":
    from overnight.trainer.checkpoint.writing import process

    strike(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    process.main(sys.argv[5:])
