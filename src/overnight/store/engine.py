"""One store per process: snapshots for readers, and one writer thread that commits many requests together."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from overnight.core.clock import Clock
from overnight.store import migrations
from overnight.store.backends import Backend, Fault, backend_for, to_error
from overnight.store.writer import RETRY_DELAYS_SECONDS, Topics, Writer, touch

__all__ = ["Connection", "Store", "Topics", "touch"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Store:
    """The database of one process. Thread-safe; made by :meth:`open`.

    A function given to :meth:`write` and its kin gets a connection inside a transaction. It must not commit, must not
    wait for anything else, and must have no effect but on the database: when the database was busy it runs again.

    Attributes:
        url: The database's URL, with a password hidden.
        clock: What the process asks the time of.
    """

    def __init__(self, backend: Backend, url: str, clock: Clock, retry_delays: Sequence[float]) -> None:
        self.url = url
        self.clock = clock
        self._backend = backend
        self._readers = backend.reader()
        self._callbacks: list[Callable[[Topics], None]] = []
        self._callbacks_lock = threading.Lock()
        self._writer = Writer(backend, self._notify, retry_delays)

    @classmethod
    def open(
        cls, url: str, clock: Clock, migrate: bool = True, *, retry_delays: Sequence[float] = RETRY_DELAYS_SECONDS
    ) -> Self:
        """Opens, and with ``migrate`` brings the schema to head.

        Args:
            url: ``sqlite:////absolute/path.db`` or ``postgresql://...``.
            clock: See :class:`Clock`.
            migrate: False for the second and later processes of a home.
            retry_delays: Pauses between tries while the database is busy, in seconds.

        Raises:
            InvalidSpecError: The URL is none of the two.
            NetworkFilesystemError: An SQLite file on a network file system.
            StoreFullError: No space for the database.
            StoreBusyError: The database is locked or does not answer.
            SetupError: It cannot be opened, is damaged, or has the schema of another version.
        """
        backend = backend_for(url)
        backend.prepare()
        try:
            if migrate:
                migrations.upgrade(backend)
            else:
                migrations.require_head(backend)
        except sa.exc.DBAPIError as error:
            raise to_error(backend, error) from error
        return cls(backend, sa.make_url(url).render_as_string(hide_password=True), clock, retry_delays)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A snapshot of one moment, read-only. Keep it short: the write-ahead log grows meanwhile.

        Raises:
            StoreBusyError: The database does not answer.
        """
        try:
            with self._readers.connect() as conn, conn.begin():
                yield conn
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            is_away = isinstance(error, sa.exc.TimeoutError) or self._backend.fault(error) is not Fault.OWN
            raise to_error(self._backend, error) if is_away else error from error

    def write(self, fn: Callable[[sa.Connection], T]) -> T:
        """Runs ``fn(conn)`` in the writer thread and returns its value after the commit that made it durable.

        Raises:
            StoreFullError, StoreBusyError: Nothing was changed.
            Exception: Whatever ``fn`` raised; what it had written is undone.
        """
        if self._writer.is_current_thread:
            raise RuntimeError("a subscriber or a write must not wait for another write; use submit()")
        return self._writer.submit(fn).result()

    async def awrite(self, fn: Callable[[sa.Connection], T]) -> T:
        """:meth:`write` for asyncio. Cancelled before its turn, the write does not happen."""
        return await asyncio.wrap_future(self._writer.submit(fn))

    def submit(self, fn: Callable[[sa.Connection], T]) -> "concurrent.futures.Future[T]":
        """Queues ``fn``; the future is done after the commit."""
        return self._writer.submit(fn)

    def subscribe(self, callback: Callable[[Topics], None]) -> Callable[[], None]:
        """Calls ``callback(topics)`` from the writer thread after each commit that touched something.

        It must be quick and must not write; errors are logged. Commits of other processes are not heard of.

        Returns:
            What unsubscribes.
        """
        with self._callbacks_lock:
            self._callbacks = [*self._callbacks, callback]

        def unsubscribe() -> None:
            with self._callbacks_lock:
                self._callbacks = [kept for kept in self._callbacks if kept is not callback]

        return unsubscribe

    def _notify(self, topics: Topics) -> None:
        for callback in self._callbacks:
            try:
                callback(topics)
            except Exception:
                _log.exception("a subscriber of the store failed")

    def check(self) -> list[str]:
        """What is wrong with the database itself: damaged pages, rows that point nowhere. Reads all of it."""
        with self.read() as conn:
            return self._backend.check(conn)

    def close(self) -> None:
        """Finishes what is queued, then closes. A write that comes later raises StoreBusyError."""
        self._writer.close()
        self._readers.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
