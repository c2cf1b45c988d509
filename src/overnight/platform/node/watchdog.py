"""When silence is a hang: a clock that learns how long each thing that ranks do takes. Pure: it is told the time.

A gang hangs when *every* rank of it has been silent for longer than the patience with what it does. One that waits in a
collective for a peer that evaluates alone is silent for the peer's reason; one that is stopped makes its peers wait
until they are silent too. So nothing is ended while any rank goes on.

The patience with something is the floor, or ten times the longest that it took so far, whichever is longer. What has
hardly been seen yet (a first step compiles, a first evaluation may take an hour) is given six times the floor.

Standard library only: runs in the user's interpreter too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

FACTOR = 10.0
"""Patience, in multiples of the longest that the same took before."""

FIRST_FACTOR = 6.0
"""Patience with what was seen fewer than :data:`MIN_SEEN` times, in multiples of the floor."""

MIN_SEEN = 3

PAUSE_SECONDS = 5.0
"""Looks further apart mean that the looker itself stood still: what it did not see is held against nobody."""


@dataclass
class _Clock:
    """How long one thing took so far."""

    seen: int = 0
    longest_seconds: float = 0.0


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is; it makes progress when any of this changes.

    Attributes:
        step: Updates done.
        phase: What its script calls what it does; empty between phases.
        doing: Category of its ledger, such as ``compute``, ``data_wait`` or ``checkpoint``.
        beats: How often it has gone from one of these to another.
    """

    step: int | None = None
    phase: str = ""
    doing: str = "start"
    beats: int = 0

    @property
    def clock(self) -> str:
        """The name of the clock that it goes by."""
        return self.doing if self.phase in ("", self.doing) else f"{self.phase} ({self.doing})"


@dataclass
class _Rank:
    """What was last heard of a rank, and when."""

    where: Whereabouts
    since: float


class Watchdog:
    """Watches the ranks of one attempt.

    Args:
        floor_seconds: The least silence that is a hang; 0 turns the watchdog off.
    """

    def __init__(self, floor_seconds: float) -> None:
        self._floor_seconds = floor_seconds
        self._clocks: dict[str, _Clock] = {}
        self._ranks: dict[int, _Rank] = {}
        self._looked_at: float | None = None

    def restart(self) -> None:
        """Other ranks begin; what was learned stays."""
        self._ranks.clear()

    def heard(self, rank: int, now: float, **told: Any) -> None:
        """A rank said something; from the first word on it is watched.

        Args:
            rank: Which.
            now: Monotonic seconds.
            **told: Fields of :class:`Whereabouts` that it told; the others are as before.
        """
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(replace(Whereabouts(), **told), now)
            return
        where = replace(known.where, **told)
        if where != known.where:
            clock = self._clocks.setdefault(known.where.clock, _Clock())
            clock.seen += 1
            clock.longest_seconds = max(clock.longest_seconds, now - known.since)
            self._ranks[rank] = _Rank(where, now)

    def patience_seconds(self, where: Whereabouts) -> float:
        """How long a rank may be silent there."""
        clock = self._clocks.get(where.clock, _Clock())
        least = self._floor_seconds * (FIRST_FACTOR if clock.seen < MIN_SEEN else 1.0)
        return max(least, FACTOR * clock.longest_seconds)

    def hangs(self, living: Iterable[int], now: float, patience: float = 1.0) -> bool:
        """Whether every living rank that was ever heard has been silent for too long. To be asked about once a second.

        Args:
            living: Ranks that have not ended.
            now: Monotonic seconds.
            patience: Multiplies all patience.
        """
        self._forgive_pause(now)
        watched = [self._ranks[rank] for rank in living if rank in self._ranks]
        return bool(watched and self._floor_seconds) and all(
            now - rank.since > patience * self.patience_seconds(rank.where) for rank in watched
        )

    def describe(self, rank: int, now: float) -> str:
        """What a rank was last heard to do, in words."""
        known = self._ranks.get(rank)
        if known is None:
            return "never heard"
        at = "" if known.where.step is None else f" at step {known.where.step}"
        return f"silent for {now - known.since:.1f} s in {known.where.clock}{at}"

    def _forgive_pause(self, now: float) -> None:
        if self._looked_at is not None and now - self._looked_at > PAUSE_SECONDS:
            for rank in self._ranks.values():
                rank.since += now - self._looked_at
        self._looked_at = now
