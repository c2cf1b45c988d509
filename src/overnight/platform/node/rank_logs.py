"""The output files of an attempt's ranks: where each is, that none fills the disk, and where the newest start begins.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from overnight.platform.node.output import BoundedOutput
from overnight.platform.node.tail import last_lines


class RankLogs:
    """The logs of the ranks on this node.

    Args:
        folder: The attempt's.
        ranks: Those that run here.
    """

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._outputs = [BoundedOutput(self.path(rank)) for rank in ranks]
        self._starts: dict[int, int] = {}

    def path(self, rank: int) -> Path:
        """The file to which a rank writes; it may not exist yet."""
        return self._folder / ("out.log" if rank == 0 else f"out.{rank}.log")

    def bound(self) -> None:
        """Drops the middle of those that have outgrown their bounds."""
        for output in self._outputs:
            with contextlib.suppress(OSError):
                output.bound()

    def begin(self, line: str) -> None:
        """Says in each log that another start of the ranks begins there."""
        for rank in self._ranks:
            with contextlib.suppress(OSError), self.path(rank).open("ab") as log:
                log.write(f"overnight: {line}\n".encode())
                self._starts[rank] = log.tell()

    def last_lines(self, rank: int) -> list[str]:
        """What a rank wrote last since its newest start, newest line last."""
        return last_lines(self.path(rank), since=self._starts.get(rank, 0))
