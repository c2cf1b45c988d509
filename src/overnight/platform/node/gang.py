"""The ranks of one generation: their processes, what they said, and who of them failed first, and why.

A rank that is lost takes its peers along: each of them raises something about a closed connection. So the first that
failed is not always the first that was seen to end, and what its peers say is no error of the user's.

Standard library only: runs in the user's interpreter too.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from overnight.platform.node import evidence
from overnight.platform.node.rank import Seat


class Gang:
    """The processes of one generation.

    Args:
        seats: A forked rank by number, in order.

    Attributes:
        pids: Of each rank.
        statuses: Exit codes of those that have ended; negative for a signal.
        listeners: Ranks whose trainer has said hello.
        left: What ranks said when they left on a directive.
        error: The first exception that a rank told, with its ``rank``; None so far.
        failed_rank: Whose failure came first; None so far.
        hung: How they hang, in words, if they do.
    """

    def __init__(self, seats: dict[int, Seat]) -> None:
        self._seats = seats
        self.pids = {rank: seat.pid for rank, seat in seats.items()}
        self.statuses: dict[int, int] = {}
        self.listeners: set[int] = set()
        self.left: dict[int, dict[str, Any]] = {}
        self.error: dict[str, Any] | None = None
        self.failed_rank: int | None = None
        self.hung: str | None = None
        self._sent: set[int] = set()
        self._shot: set[int] = set()
        self._unjudged: list[int] = []
        self._changed = asyncio.Event()

    def start(self, order_of: Callable[[int, int], dict[str, Any]]) -> None:
        """Gives each rank its order; ``order_of`` takes the global and the local rank."""
        for local_rank, (rank, seat) in enumerate(self._seats.items()):
            with contextlib.suppress(OSError):  # a rank that is gone already shows by its exit
                seat.send(order_of(rank, local_rank))

    # -- how they end

    def record(self, pid: int, status: int) -> None:
        """Takes note of a child that has ended; one that is no rank is an orphan that some rank left behind."""
        rank = next((rank for rank, known in self.pids.items() if known == pid), None)
        if rank is None or rank in self.statuses:
            return
        code = os.waitstatus_to_exitcode(status)
        self.statuses[rank] = code
        if code < 0 and -code not in self._sent:
            self._shot.add(rank)
        self._unjudged.append(rank)
        self._changed.set()

    def judge(self, obeyed: int | None) -> bool:
        """Looks at the ranks that have ended since the last time.

        Args:
            obeyed: The exit code with which a rank may end because it was told to.

        Returns:
            Whether it is news that the gang has failed, or whose failure it is.
        """
        ended, self._unjudged = self._unjudged, []
        failed = [rank for rank in ended if not self._ended_well(rank, obeyed)]
        shot = next((rank for rank in failed if rank in self._shot), None)
        if failed and self.failed_rank is None:
            self.failed_rank = failed[0] if shot is None else shot
            return True
        if shot is not None and self.failed_rank not in self._shot and evidence.is_peer_loss(self.error):
            self.failed_rank = shot
            return True
        return False

    def _ended_well(self, rank: int, obeyed: int | None) -> bool:
        """Whether a rank ended as it should: of itself without error, or because it was told to leave."""
        return self.statuses[rank] in (0, obeyed) or rank in self.left

    @property
    def lost_rank(self) -> int | None:
        """The rank that a signal of nobody here took away, if that, and no exception, is why the gang failed."""
        rank = self.failed_rank
        if rank is None or rank not in self._shot:
            return None
        is_blameless = self.error is None or (self.error["rank"] != rank and evidence.is_peer_loss(self.error))
        return rank if is_blameless else None

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, or all of them hang."""
        return self.failed_rank is not None or self.hung is not None

    def report(
        self, killed: str | None, directive: dict[str, Any], obeyed: int | None, lines: list[str]
    ) -> dict[str, Any]:
        """How they ended, for the ``exit`` event.

        Args:
            killed: Why the supervisor killed them, or None.
            directive: The current one.
            obeyed: As in :meth:`judge`.
            lines: The last of the failed rank's output.
        """
        error = self.error
        if error is None and self.failed_rank is not None:
            error = evidence.error_from_log(lines)
            error = error and {**error, "rank": self.failed_rank}
        is_told = directive["action"] in ("yield", "stop")
        has_obeyed = obeyed is not None and killed is None and all(code == obeyed for code in self.statuses.values())
        left = str(directive["action"]) if has_obeyed else None
        return {
            "exit_codes": [self.statuses.get(rank) for rank in self.pids],
            "left": next((str(said["why"]) for said in self.left.values()), left),
            "saved": (bool(self.left) or has_obeyed) and all(said["saved"] for said in self.left.values()),
            "killed": killed or ("hung" if self.hung else None),
            "error": error,
            "last_lines": lines,
            "failed_rank": self.failed_rank,
            "directive": directive if is_told else None,
        }

    @property
    def living(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in self.pids if rank not in self.statuses]

    @property
    def all_gone(self) -> bool:
        """Whether every rank has ended."""
        return len(self.statuses) == len(self.pids)

    async def gone(self, seconds: float | None = None) -> bool:
        """Waits until no rank is left, at most ``seconds``. Returns whether none is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.all_gone:
                    self._changed.clear()
                    await self._changed.wait()
        return self.all_gone

    # -- signals

    def signal(self, number: int) -> None:
        """Signals the ranks that live, and nobody else of their processes."""
        self._sent.add(number)
        for rank in self.living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def about_to_kill(self) -> None:
        """What ends by SIGKILL from now on was killed by the supervisor."""
        self._sent.add(signal.SIGKILL)
