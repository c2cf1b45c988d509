"""Wakes long-polls when a commit has changed what they wait for.

The store's writer thread calls :meth:`Hub.publish` after each commit with the topics that it touched. A watcher
registers *before* it reads, so that a commit between its read and its wait is never missed.
"""

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

MAX_WAIT_SECONDS = 60.0
"""Longest wait of one long-poll: proxies and clients give up on silent connections after a minute or more."""


class Watch:
    """Interest in some topics; a context manager. One task waits on it."""

    def __init__(self, hub: "Hub", topics: Iterable[str]) -> None:
        self._hub = hub
        self.topics = frozenset(topics)
        self._event = asyncio.Event()

    def __enter__(self) -> "Watch":
        self._hub._add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hub._remove(self)

    def wake(self) -> None:
        """Ends the current or next wait."""
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """Waits for the next change; False if none came in time or the server is stopping."""
        if self._hub.closing:
            return False
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return not self._hub.closing


class Hub:
    """All watches of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watches: dict[str, set[Watch]] = {}
        self.closing = False

    def watch(self, *topics: str) -> Watch:
        """Interest in ``topics``; enter it before reading."""
        return Watch(self, topics)

    def publish(self, topics: frozenset[str]) -> None:
        """Wakes the watchers of ``topics``. Called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._wake, topics)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def notify(self, *topics: str) -> None:
        """:meth:`publish` for what no commit tells. Called on the event loop."""
        self._wake(frozenset(topics))

    def close(self) -> None:
        """Wakes everybody: the server is stopping, and answers what it has."""
        self.closing = True
        for watches in self._watches.values():
            for watch in watches:
                watch.wake()

    def _wake(self, topics: frozenset[str]) -> None:
        for topic in topics:
            for watch in self._watches.get(topic, ()):
                watch.wake()

    def _add(self, watch: Watch) -> None:
        for topic in watch.topics:
            self._watches.setdefault(topic, set()).add(watch)

    def _remove(self, watch: Watch) -> None:
        for topic in watch.topics:
            watches = self._watches[topic]
            watches.discard(watch)
            if not watches:
                del self._watches[topic]


async def poll(watch: Watch, read: Callable[[], T], ready: Callable[[T], bool], wait_seconds: float) -> T:
    """Reads until ``ready``, waiting for changes in between; the last value read when the time is over.

    Args:
        watch: Already entered.
        read: Reads the current value; short, as it runs on the event loop.
        ready: Whether the value is worth answering.
        wait_seconds: Longest wait; at most :data:`MAX_WAIT_SECONDS`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(wait_seconds, MAX_WAIT_SECONDS)
    while True:
        value = read()
        if ready(value):
            return value
        if not await watch.wait(deadline - loop.time()):
            return value
