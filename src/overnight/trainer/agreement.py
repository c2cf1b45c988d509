"""How all ranks of a gang do the same at the same time: one small maximum at every place where they meet.

Between two updates the maximum is asynchronous, issued at one boundary and read at the next, so that no boundary waits
for the network (a synchronous one costs 0.7 to 1.9 ms). Reports, saves and the end of the run wait for it.

It carries wishes, and beside them what must be equal everywhere (each number also negated, so that the maximum tells
the least one too): the place in the script and a hash of everything logged so far. So a rank that reports alone, or
logs other names than its peers, is an error on all of them instead of a collective that never ends.
"""

from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from overnight.core.errors import RanksDisagreeError
from overnight.trainer.boundary import Leave
from overnight.trainer.journal import Journal

_HINT = (
    "All ranks must call run.log, run.report, run.save and the run's loops alike; only what a script prints or writes "
    "itself may depend on run.rank."
)


_PROBE = 0xDEAD
"""Tag of what is sent to see whether a connection is there."""


class Spot(IntEnum):
    """Where in a script ranks meet."""

    BOUNDARY = 1
    REPORT = 2
    SAVE = 3
    END = 4


_SPOT_TEXT = {
    Spot.BOUNDARY: "between two updates",
    Spot.REPORT: "in run.report()",
    Spot.SAVE: "at a save",
    Spot.END: "at the end of the run",
}


@dataclass(frozen=True)
class Wishes:
    """What one rank wants, or what all ranks have agreed upon.

    Attributes:
        leave: A :class:`overnight.trainer.boundary.Leave`.
        save: 1 to checkpoint now.
        over: Number of the loop whose time is over, 0 for none.
        send: 1 to make one of what all ranks logged.
        busy: 1 while the writer reads the staging memory: no save can begin.
        failed: 1 if a save has failed and nobody was told.
        wait: 1 at a save in the middle of an accumulation of gradients.
    """

    leave: int = Leave.NO
    save: int = 0
    over: int = 0
    send: int = 0
    busy: int = 0
    failed: int = 0
    wait: int = 0


class Agreement:
    """Makes one decision of the wishes of all ranks.

    Args:
        group: A gloo group of all ranks, or None if there is one rank.
        journal: What this rank logs; what all ranks are known to have logged is confirmed there.
    """

    def __init__(self, group: dist.ProcessGroup | None, journal: Journal) -> None:
        self._group = group
        self._journal = journal
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._agreed = Wishes()
        self._probes: list[Any] = []

    def exchange(self, wishes: Wishes, step: int) -> Wishes:
        """Hands in this boundary's wishes; returns the agreed ones of the boundary before (one rank: of this one).

        Raises:
            RanksDisagreeError: The ranks were not all at this boundary, or logged different things before it.
            RuntimeError: A peer has gone.
        """
        if self._group is None:
            return wishes
        agreed = self.drain()
        self._issue(wishes, Spot.BOUNDARY, step)
        return agreed

    def drain(self) -> Wishes:
        """Waits for the exchange under way and returns what came of it.

        Raises:
            RanksDisagreeError, RuntimeError: As with :meth:`exchange`.
        """
        self._read()
        agreed, self._agreed = self._agreed, Wishes()
        return agreed

    def meet(self, spot: Spot, step: int, wishes: Wishes | None = None) -> Wishes:
        """Waits until all ranks are here, and makes sure that they logged the same. Wishes under way are kept.

        Args:
            spot, step: Where this rank is.
            wishes: For this meeting alone.

        Returns:
            The wishes of all ranks for this meeting.

        Raises:
            RanksDisagreeError, RuntimeError: As with :meth:`exchange`.
        """
        wishes = wishes or Wishes()
        if self._group is None:
            return wishes
        self._read()
        kept = self._agreed
        self._issue(wishes, spot, step)
        self._read()
        met, self._agreed = self._agreed, kept
        return met

    def lost(self) -> list[int]:
        """Ranks whose connection is gone: they have ended, or their machine has. Only for a rank on its way out.

        Each is sent a byte for which nobody asks: that waits unread while the connection is there, and fails at once
        when it is not.
        """
        if self._group is None or not dist.is_initialized():
            return []
        others = set(range(dist.get_world_size(self._group))) - {dist.get_rank(self._group)}
        return [rank for rank in sorted(others) if not self._reaches(rank)]

    def _reaches(self, rank: int) -> bool:
        try:
            probe = torch.zeros(1, dtype=torch.uint8)
            self._probes.append((dist.isend(probe, group=self._group, group_dst=rank, tag=_PROBE), probe))
        except RuntimeError:
            return False
        return True

    def _issue(self, wishes: Wishes, spot: Spot, step: int) -> None:
        same = (step * len(Spot) + spot - 1, self._journal.mark())
        tensor = torch.tensor([*astuple(wishes), *same, *(-number for number in same)], dtype=torch.int64)
        self._pending = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True), tensor

    def _read(self) -> None:
        if self._pending is None:
            return
        (work, tensor), self._pending = self._pending, None
        work.wait()
        *wishes, last, logged, negated_first, negated_logged = tensor.tolist()
        if last != -negated_first:
            one, other = _place_text(-negated_first), _place_text(last)
            raise RanksDisagreeError(f"the ranks are not at the same place: one is {one}, another {other}", hint=_HINT)
        if logged != -negated_logged:
            raise RanksDisagreeError(self._difference(), hint=_HINT)
        self._journal.confirm()
        self._agreed = Wishes(*wishes)

    def _difference(self) -> str:
        """In words, what the ranks logged differently. All are at the same place, so they can ask each other."""
        logs: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(logs, self._journal.unconfirmed(), group=self._group)
        for rank, log in enumerate(logs):
            for number in range(max(len(log), len(logs[0]))):
                here = log[number] if number < len(log) else "nothing"
                there = logs[0][number] if number < len(logs[0]) else "nothing"
                if here != there:
                    return f"the ranks logged different things: rank 0 {there}, rank {rank} {here}"
        return "the ranks logged different things"


def _place_text(place: int) -> str:
    step, spot = divmod(place, len(Spot))
    return f"{_SPOT_TEXT[Spot(spot + 1)]} (step {step})"
