"""The waiting line: trials grouped by what they ask for, each group in order.

If the first of a group cannot start, no other of it can: so a decision looks at groups, not at ten thousand trials.
"""

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from overnight.platform.scheduler.events import EXPLORATORY, Demand, QueueKey, Waiting


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that the same devices suit. A trial that devices are bound to is a group of its own."""

    priority: int
    demand: Demand
    avoid: frozenset[str]
    bound_trial_id: str | None

    @property
    def takes_canaries(self) -> bool:
        """Devices on probation get exploratory trials of one device only."""
        return self.priority == EXPLORATORY and self.demand.max_devices == 1


class Line:
    """All queued trials."""

    def __init__(self) -> None:
        self.trials: dict[str, Waiting] = {}
        self._groups: dict[Group, list[QueueKey]] = {}
        self._group_of: dict[str, Group] = {}
        self._delayed: list[tuple[float, str]] = []
        self._bound: set[str] = set()

    def put(self, trial: Waiting, now: float) -> None:
        """Adds a trial or replaces what is known of it. One whose time has not come waits aside."""
        self.remove(trial.trial_id)
        self.trials[trial.trial_id] = trial
        if trial.not_before > now:
            heapq.heappush(self._delayed, (trial.not_before, trial.trial_id))
        else:
            self._join(trial)

    def remove(self, trial_id: str) -> None:
        """Forgets a trial."""
        trial = self.trials.pop(trial_id, None)
        if trial is not None:
            self._leave(trial)

    def bind(self, trial_id: str, bound: bool) -> None:
        """Makes the trial a group of its own, or lets it join the others of its kind again."""
        (self._bound.add if bound else self._bound.discard)(trial_id)
        trial = self.trials.get(trial_id)
        if trial is not None and trial_id in self._group_of:
            self._leave(trial)
            self._join(trial)

    def admit(self, now: float) -> bool:
        """Lets the delayed trials whose time has come join; whether there were any."""
        found = False
        while self._delayed and self._delayed[0][0] <= now:
            not_before, trial_id = heapq.heappop(self._delayed)
            trial = self.trials.get(trial_id)
            if trial is not None and trial.not_before == not_before and trial_id not in self._group_of:
                self._join(trial)
                found = True
        return found

    def next_admission(self) -> float | None:
        """When the next delayed trial may start."""
        while self._delayed:
            not_before, trial_id = self._delayed[0]
            trial = self.trials.get(trial_id)
            if trial is not None and trial.not_before == not_before and trial_id not in self._group_of:
                return not_before
            heapq.heappop(self._delayed)
        return None

    def heads(self) -> "Heads":
        """A walk over the groups, in the order of their first trials."""
        return Heads(self._groups)

    def ordered(self, limit: int | None = None) -> Iterator[str]:
        """Trial ids in the order in which they would start; delayed ones at the end."""
        ready = (key[3] for key in heapq.merge(*self._groups.values()))
        later = (t.trial_id for t in sorted(self._later(), key=lambda t: (t.not_before, t.key)))
        return islice((trial_id for part in (ready, later) for trial_id in part), limit)

    def position(self, trial_id: str) -> int | None:
        """Place of a trial in that order, from 1."""
        trial = self.trials.get(trial_id)
        if trial is None:
            return None
        if trial_id in self._group_of:
            return 1 + sum(bisect.bisect_left(keys, trial.key) for keys in self._groups.values())
        mine = (trial.not_before, trial.key)
        return 1 + len(self._group_of) + sum((t.not_before, t.key) < mine for t in self._later())

    def _later(self) -> list[Waiting]:
        return [trial for trial_id, trial in self.trials.items() if trial_id not in self._group_of]

    def _join(self, trial: Waiting) -> None:
        bound = trial.trial_id if trial.trial_id in self._bound else None
        group = Group(trial.priority, trial.demand, trial.avoid, bound)
        bisect.insort(self._groups.setdefault(group, []), trial.key)
        self._group_of[trial.trial_id] = group

    def _leave(self, trial: Waiting) -> None:
        group = self._group_of.pop(trial.trial_id, None)
        if group is None:
            return
        keys = self._groups[group]
        del keys[bisect.bisect_left(keys, trial.key)]
        if not keys:
            del self._groups[group]


class Heads:
    """Visits trials in the order of the line; a group that is left out is not visited again.

    Iterate, and call :meth:`go_on` for the trial just visited to have the next of its group visited too.
    """

    def __init__(self, groups: dict[Group, list[QueueKey]]) -> None:
        self._heap = [(keys[0], i, 0) for i, keys in enumerate(groups.values())]
        self._groups = list(groups.items())
        self._last: tuple[int, int] | None = None
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[tuple[str, Group]]:
        while self._heap:
            key, which, cursor = heapq.heappop(self._heap)
            self._last = (which, cursor)
            yield key[3], self._groups[which][0]

    def go_on(self) -> None:
        """Queues the next trial of the group just visited."""
        if self._last is None:
            return
        which, cursor = self._last
        keys = self._groups[which][1]
        if cursor + 1 < len(keys):
            heapq.heappush(self._heap, (keys[cursor + 1], which, cursor + 1))
