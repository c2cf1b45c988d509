"""One store per process: snapshots for readers, and one writer thread that commits many requests together."""

import concurrent.futures
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

import sqlalchemy as sa

from overnight.core.clock import Clock

T = TypeVar("T")
Topics = frozenset[str]


def touch(conn: sa.Connection, *topics: str) -> None:
    """Names what a write changed: ``trials``, ``trial:ID``, ``attempt:ID``, ``devices``, ``events`` ..."""
    raise NotImplementedError


class Store:
    """The database of one process. Thread-safe; made by :meth:`open`."""

    @classmethod
    def open(cls, url: str, clock: Clock, migrate: bool = True) -> Self:
        """Opens, and with ``migrate`` brings the schema to head.

        Raises:
            NetworkFilesystemError, StoreFullError, StoreBusyError, SetupError.
        """
        raise NotImplementedError

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A snapshot, read-only."""
        raise NotImplementedError

    def write(self, fn: Callable[[sa.Connection], T]) -> T:
        """Runs ``fn(conn)`` in the writer thread; returns after the commit. ``fn`` may run again after a retry."""
        raise NotImplementedError

    async def awrite(self, fn: Callable[[sa.Connection], T]) -> T:
        """:meth:`write` for asyncio."""
        raise NotImplementedError

    def submit(self, fn: Callable[[sa.Connection], T]) -> "concurrent.futures.Future[T]":
        """Queues ``fn``; the future is done after the commit."""
        raise NotImplementedError

    def subscribe(self, callback: Callable[[Topics], None]) -> Callable[[], None]:
        """``callback(topics)`` after each commit, from the writer thread; returns what unsubscribes."""
        raise NotImplementedError

    def close(self) -> None:
        """Finishes what is queued, then closes."""
        raise NotImplementedError
