"""Where checkpoints lie on a node on their way to a store, and how the rest of a killed attempt is removed from there.

The folder is the trial's, and each name in it says whose it is: so the next start finds what an earlier one has left,
and a node what its dead attempts have.
"""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

STAGING = "staging"
"""Folder below the trial's."""

_STAGED = re.compile(r"step-\d+\.attempt-(\d+)\.(\d+)(?:\.again-\d+)?\.rank-(\d+)")


def staged_name(checkpoint: str, rank: int) -> str:
    """Folder, in :data:`STAGING`, of what one rank sends of a checkpoint ``step-N.attempt-K.G``."""
    return f"{checkpoint}.rank-{rank}"


def clear_staging(folder: Path, is_over: Callable[[int, int, int], bool]) -> None:
    """Removes what will never be sent; a folder that cannot be removed costs space, nothing else.

    Args:
        folder: The trial's :data:`STAGING`, which need not exist.
        is_over: Whether nobody sends the files of an attempt, a generation and a rank any more.
    """
    with contextlib.suppress(OSError):
        for staged in list(folder.iterdir()):
            match = _STAGED.fullmatch(staged.name)
            if match is not None and is_over(*map(int, match.groups())):
                shutil.rmtree(staged, ignore_errors=True)
