"""What a screen shows at one moment, and where it comes from.

Screens draw a :class:`Snapshot` and nothing else; a :class:`Source` makes snapshots. That keeps the drawing testable
without a server, and the server untouched by how often somebody scrolls.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from overnight.agents.client import AsyncClient
from overnight.core.enums import TrialState
from overnight.core.errors import OvernightError, UnavailableError
from overnight.core.models.api import Device, Status, Sweep, Trial
from overnight.core.states import END_STATES

REFRESH_SECONDS = 0.5
"""A refresh at most twice a second: faster is not readable and costs the server and the terminal."""

IDLE_REFRESH_SECONDS = 5.0
"""With no event for this long the screen asks all the same: steps and values move without events."""


@dataclass(frozen=True)
class Snapshot:
    """All that the queue screen needs.

    Attributes:
        running: Trials with a live attempt, in the order of their devices.
        queued: The head of the queue, in the order in which trials would start.
        ended: The newest finished trials, newest first.
        problem: Why the snapshot is not fresh, in words for a person; empty when it is.
    """

    status: Status | None = None
    running: tuple[Trial, ...] = ()
    queued: tuple[Trial, ...] = ()
    ended: tuple[Trial, ...] = ()
    problem: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, by node and index."""
        return self.status.devices if self.status else ()

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """The sweeps that the server names as current."""
        return self.status.sweeps if self.status else ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The rows of the table: what runs, what waits, what has ended."""
        return self.running + self.queued + self.ended

    def count(self, *states: TrialState) -> int:
        """How many trials are in one of the states."""
        by_state = self.status.trials_by_state if self.status else {}
        return sum(by_state.get(state, 0) for state in states)


class Source(Protocol):
    """Makes snapshots."""

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yields a snapshot at once and then after every change, at most one each half second, for ever."""
        ...


@dataclass
class ServerSource:
    """Snapshots of a running server: events say when to look, the API says what is there.

    A server that is away or restarting is not an error: the last snapshot stays, with the problem named.
    """

    client: AsyncClient
    queue_rows: int = 200
    ended_rows: int = 100
    _last: Snapshot = field(default_factory=Snapshot)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """See :class:`Source`."""
        watcher = asyncio.create_task(self._watch())
        try:
            while True:
                self._changed.clear()
                self._last = await self._look()
                yield self._last
                await asyncio.sleep(REFRESH_SECONDS)
                try:
                    await asyncio.wait_for(self._changed.wait(), IDLE_REFRESH_SECONDS - REFRESH_SECONDS)
                except TimeoutError:
                    continue
        finally:
            watcher.cancel()

    async def _look(self) -> Snapshot:
        try:
            status, queued, ended = await asyncio.gather(
                self.client.status(),
                self.client.queue(limit=self.queue_rows),
                self.client.trials(state=END_STATES, limit=self.ended_rows),
            )
        except OvernightError as error:
            last = self._last
            return Snapshot(last.status, last.running, last.queued, last.ended, error.message)
        running = tuple(sorted(status.running, key=lambda trial: (trial.devices, trial.name)))
        return Snapshot(status, running, queued.items, ended.items)

    async def _watch(self) -> None:
        while True:
            try:
                async for _ in self.client.events():
                    self._changed.set()
            except UnavailableError:
                self._changed.set()
            await asyncio.sleep(REFRESH_SECONDS)
