"""The writer thread: many requests, one commit.

A commit costs one flush to disk whatever is in it, so requests that arrive while one is being written share the
next. Each runs in a savepoint of its own: its error is its caller's alone. What hits the transaction as a whole
(disk full, locked, connection lost) hits all of its callers, with nothing half done.
"""

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from overnight.core.errors import ConflictError, StoreBusyError
from overnight.store.backends import Backend, Fault, to_error

T = TypeVar("T")
Topics = frozenset[str]

MAX_GROUP = 256
"""Requests in one commit: bounds how long the first of them waits for the last."""

MAX_QUEUED = 20_000
"""Requests that may wait; more are refused as busy, so that memory stays bounded."""

RETRY_DELAYS_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0)

_TOPICS = "overnight.topics"
_log = logging.getLogger(__name__)


def touch(conn: sa.Connection, *topics: str) -> None:
    """Names what a write changed: ``trials``, ``trial:ID``, ``attempt:ID``, ``devices``, ``events`` …

    Subscribers hear of it after the commit, and not at all if the write fails.
    """
    conn.info.setdefault(_TOPICS, set()).update(topics)


@dataclass(frozen=True, slots=True)
class _Job:
    fn: Callable[[sa.Connection], Any]
    future: "concurrent.futures.Future[Any]"


@dataclass(frozen=True, slots=True)
class _Done:
    value: Any = None
    error: BaseException | None = None


class _UnknownOutcomeError(Exception):
    """The connection was lost during COMMIT and the database cannot be asked."""


class Writer:
    """Owns the one writing connection. Made and closed by the store.

    Args:
        backend: The database.
        on_commit: Called after each commit with what it changed, before its callers go on.
        retry_delays: Pauses between tries when the database is busy, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        on_commit: Callable[[Topics], None],
        retry_delays: Sequence[float] = RETRY_DELAYS_SECONDS,
    ) -> None:
        self._backend = backend
        self._engine = backend.writer()
        self._conn: sa.Connection | None = None
        self._on_commit = on_commit
        self._delays = tuple(retry_delays)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="overnight-store-writer", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[sa.Connection], T]) -> "concurrent.futures.Future[T]":
        """Queues ``fn``.

        Raises:
            StoreBusyError: The store is closed, or too many requests wait.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._closing.is_set():
                raise StoreBusyError("the store is closed")
            if self._queue.qsize() >= MAX_QUEUED:
                raise StoreBusyError(f"{MAX_QUEUED} writes are waiting already", hint="Try again in a moment.")
            self._queue.put(_Job(fn, future))
        return future

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is the writer thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Finishes what is queued, without waiting for a busy database, and ends the thread."""
        with self._lock:
            if not self._closing.is_set():
                self._closing.set()
                self._queue.put(None)
        if not self.is_current_thread:
            self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            jobs, is_open = self._next_group()
            jobs = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if jobs:
                self._finish(jobs, *self._serve(jobs))
        self._drop_connection()
        self._engine.dispose()

    def _next_group(self) -> tuple[list[_Job], bool]:
        jobs: list[_Job] = []
        while len(jobs) < MAX_GROUP:
            try:
                job = self._queue.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                return jobs, False
            jobs.append(job)
        return jobs, True

    def _finish(self, jobs: Sequence[_Job], done: Iterable[_Done], topics: Topics) -> None:
        if topics:
            try:
                self._on_commit(topics)
            except Exception:
                _log.exception("a subscriber of the store failed")
        for job, result in zip(jobs, done, strict=True):
            if result.error is not None:
                job.future.set_exception(result.error)
            else:
                job.future.set_result(result.value)

    def _serve(self, jobs: Sequence[_Job]) -> tuple[list[_Done], Topics]:
        """Commits a group, trying again while the database is busy or away; never raises."""
        for delay in (*self._delays, None):
            try:
                return self._commit(jobs)
            except _UnknownOutcomeError as error:
                self._drop_connection()
                return [_Done(error=_unknown(error)) for _ in jobs], frozenset()
            except sa.exc.SQLAlchemyError as error:
                self._drop_connection()
                can_retry = self._backend.fault(error) in {Fault.BUSY, Fault.LOST} and delay is not None
                if can_retry and not self._closing.wait(delay):
                    continue
                return [_Done(error=to_error(self._backend, error)) for _ in jobs], frozenset()
            except Exception as error:
                _log.exception("the store's writer failed")
                self._drop_connection()
                return [_Done(error=error) for _ in jobs], frozenset()
        raise AssertionError("the last delay is None")

    def _commit(self, jobs: Sequence[_Job]) -> tuple[list[_Done], Topics]:
        if self._conn is None:
            self._conn = self._engine.connect()
        conn = self._conn
        topics: set[str] = set()
        transaction = conn.begin()  # whatever is raised from here on drops the connection, and so rolls back
        if len(jobs) == 1:
            done = [self._run_alone(conn, transaction, jobs[0], topics)]
        else:
            done = [self._run_in_savepoint(conn, job, topics) for job in jobs]
        if transaction.is_active:
            mark = self._backend.mark(conn)
            try:
                transaction.commit()
            except sa.exc.DBAPIError as error:
                if not self._has_landed(error, mark):
                    raise
                self._drop_connection()
        return done, frozenset(topics)

    def _run_alone(self, conn: sa.Connection, transaction: sa.RootTransaction, job: _Job, topics: set[str]) -> _Done:
        done = self._call(conn, job, topics)
        if done.error is not None:
            transaction.rollback()
        return done

    def _run_in_savepoint(self, conn: sa.Connection, job: _Job, topics: set[str]) -> _Done:
        conn.exec_driver_sql("SAVEPOINT job")
        done = self._call(conn, job, topics)
        if done.error is not None:
            conn.exec_driver_sql("ROLLBACK TO SAVEPOINT job")
        conn.exec_driver_sql("RELEASE SAVEPOINT job")
        return done

    def _call(self, conn: sa.Connection, job: _Job, topics: set[str]) -> _Done:
        """Runs a job; raises only what ends the whole transaction."""
        conn.info[_TOPICS] = touched = set[str]()
        try:
            value = job.fn(conn)
        except sa.exc.DBAPIError as error:
            if self._backend.fault(error) is not Fault.OWN:
                raise
            return _Done(error=_conflict(error) if isinstance(error, sa.exc.IntegrityError) else error)
        except BaseException as error:
            return _Done(error=error)
        topics |= touched
        return _Done(value)

    def _has_landed(self, error: sa.exc.DBAPIError, mark: str | None) -> bool:
        """Whether a COMMIT whose connection broke was carried out: running it again would do it twice."""
        if mark is None or self._backend.fault(error) is not Fault.LOST:
            return False
        for delay in (*self._delays, 0.0):
            self._closing.wait(delay)
            try:
                with self._engine.connect() as conn:
                    landed = self._backend.landed(conn, mark)
            except sa.exc.DBAPIError:
                continue
            if landed is not None:
                return landed
        raise _UnknownOutcomeError(str(error.orig)) from error

    def _drop_connection(self) -> None:
        conn, self._conn = self._conn, None
        if conn is None:
            return
        try:
            conn.invalidate()
            conn.close()
        except sa.exc.SQLAlchemyError:
            _log.debug("closing a broken connection failed", exc_info=True)


def _conflict(error: sa.exc.IntegrityError) -> ConflictError:
    return ConflictError(
        f"the database refused it: {error.orig}", hint="Something else was written first: look again, then retry."
    )


def _unknown(error: BaseException) -> StoreBusyError:
    return StoreBusyError(
        f"the connection was lost while committing: {error}",
        hint="Whether it was written is not known. Look before trying again; a key makes trying again safe.",
    )
