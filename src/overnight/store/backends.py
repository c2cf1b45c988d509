"""What differs between SQLite and PostgreSQL: connections, what an error means, and nothing else."""

import contextlib
import os
import sqlite3
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from overnight.core.errors import (
    InvalidSpecError,
    MissingExtraError,
    OvernightError,
    SetupError,
    StoreBusyError,
    StoreFullError,
)
from overnight.store.filesystems import require_local

BUSY_TIMEOUT_SECONDS = 2.0
"""How long one try waits for a lock; the writer tries again after it."""

MIN_FREE_BYTES = 1 << 20
IDLE_IN_TRANSACTION_SECONDS = 60


class Fault(Enum):
    """What a database error says about the transaction it happened in."""

    OWN = auto()  # the statement's own fault; the transaction can go on from a savepoint
    BUSY = auto()  # the transaction is gone; the same again may work
    LOST = auto()  # the connection is gone
    FULL = auto()
    BROKEN = auto()  # damaged, read-only, or no database


class Backend(Protocol):
    """One kind of database at one URL."""

    def prepare(self) -> None:
        """Checks what can be checked before the first connection; raises SetupError and its kind."""

    def reader(self) -> sa.Engine:
        """Pooled connections whose transactions are read-only snapshots."""

    def writer(self) -> sa.Engine:
        """Unpooled connections whose transactions hold the write lock from the start where there is one."""

    def migrator(self) -> sa.Engine:
        """As :meth:`writer`, for schema changes."""

    def fault(self, error: BaseException) -> Fault:
        """Classifies an error."""

    def check(self, conn: sa.Connection) -> list[str]:
        """What is wrong with the database's own structure; empty when nothing is."""

    def mark(self, conn: sa.Connection) -> str | None:
        """A mark of the open transaction by which :meth:`landed` knows it again; None if it needs none."""

    def landed(self, conn: sa.Connection, mark: str) -> bool | None:
        """Whether a transaction, whose connection was lost during COMMIT, was committed; None: cannot be known."""


def backend_for(url: str) -> Backend:
    """The backend of a URL.

    Raises:
        InvalidSpecError: Neither SQLite (a file) nor PostgreSQL.
        MissingExtraError: PostgreSQL without its driver.
    """
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise InvalidSpecError(f"the store URL {url!r} is none", hint=_URL_HINT) from None
    match parsed.get_backend_name():
        case "sqlite":
            return SqliteBackend(parsed)
        case "postgresql" | "postgres":
            return PostgresBackend(parsed)
    raise InvalidSpecError(f"the store cannot be kept in {parsed.get_backend_name()!r}", hint=_URL_HINT)


_URL_HINT = "Use sqlite:////absolute/path.db or postgresql://user@host/database."


class SqliteBackend:
    """A database file on a local disk: write-ahead log, one writer, durable at every commit."""

    def __init__(self, url: sa.URL) -> None:
        if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
            raise InvalidSpecError("the store needs a file: memory would be lost with the process", hint=_URL_HINT)
        self.path = Path(url.database).absolute()

    def prepare(self) -> None:
        """Makes the folder (0700) and the file (0600: trials' environments are in it)."""
        require_local(self.path.parent)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_space()
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._use_wal()
        except OSError as error:
            raise SetupError(
                f"the database {self.path} cannot be opened: {error.strerror}",
                hint="Set OVERNIGHT_HOME to a folder that you can write to.",
            ) from None
        except sqlite3.Error as error:
            raise to_error(self, error) from None

    def _require_space(self) -> None:
        space = os.statvfs(self.path.parent)
        if space.f_bavail * space.f_frsize < MIN_FREE_BYTES:
            raise StoreFullError(
                f"{self.path.parent} has less than {MIN_FREE_BYTES >> 20} MiB left", hint="Make room on that disk."
            )

    def _use_wal(self) -> None:
        with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_SECONDS)) as conn:
            mode = conn.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise SetupError(
                f"{self.path} is on a file system without shared memory (journal mode {mode})",
                hint="Set OVERNIGHT_HOME to a local disk.",
            )

    def reader(self) -> sa.Engine:
        """Up to 40 connections with ``query_only``."""
        return self._engine("BEGIN", ("query_only=ON",), pool_size=8, max_overflow=32, pool_timeout=30)

    def writer(self) -> sa.Engine:
        """``BEGIN IMMEDIATE``: a transaction that reads and then writes would fail at once when another wrote."""
        pragmas = ("foreign_keys=ON", "synchronous=FULL", "journal_size_limit=67108864")
        return self._engine("BEGIN IMMEDIATE", pragmas, poolclass=sa.NullPool)

    def migrator(self) -> sa.Engine:
        """Without foreign keys: a table is changed by making a new one; the keys are checked at the end."""
        pragmas = ("foreign_keys=OFF", "synchronous=FULL")
        return self._engine("BEGIN IMMEDIATE", pragmas, poolclass=sa.NullPool)

    def _engine(self, begin: str, pragmas: tuple[str, ...], **options: Any) -> sa.Engine:
        engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(self.path)),
            connect_args={"timeout": BUSY_TIMEOUT_SECONDS, "check_same_thread": False},
            **options,
        )

        @sa.event.listens_for(engine, "connect")
        def _connect(raw: sqlite3.Connection, _record: object) -> None:
            raw.isolation_level = None  # the driver would begin transactions of its own
            for pragma in pragmas:
                raw.execute(f"PRAGMA {pragma}")

        @sa.event.listens_for(engine, "begin")
        def _begin(conn: sa.Connection) -> None:
            conn.exec_driver_sql(begin)

        return engine

    def fault(self, error: BaseException) -> Fault:
        """By SQLite's primary result code (https://www.sqlite.org/rescode.html)."""
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
        if code is None:
            return Fault.OWN
        match code & 0xFF:
            case sqlite3.SQLITE_FULL:
                return Fault.FULL
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_PROTOCOL:
                return Fault.BUSY
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN:
                return Fault.FULL if self._has_no_space() else Fault.LOST
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return Fault.BROKEN
        return Fault.OWN

    def _has_no_space(self) -> bool:
        try:
            space = os.statvfs(self.path.parent)
        except OSError:
            return False
        return space.f_bavail * space.f_frsize < 64 * 1024

    def check(self, conn: sa.Connection) -> list[str]:
        """``PRAGMA integrity_check``, then rows that point nowhere."""
        problems = [str(row[0]) for row in conn.exec_driver_sql("PRAGMA integrity_check") if row[0] != "ok"]
        broken = conn.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        return problems + [f"row {row[1]} of {row[0]} points to a missing row of {row[2]}" for row in broken]

    def mark(self, conn: sa.Connection) -> str | None:
        """None: a failed COMMIT of SQLite is rolled back."""
        return None

    def landed(self, conn: sa.Connection, mark: str) -> bool | None:
        """Never asked."""
        return None


class PostgresBackend:
    """A PostgreSQL server, 13 or later."""

    def __init__(self, url: sa.URL) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise MissingExtraError("A store in PostgreSQL", "postgres") from None
        self.url = url.set(drivername="postgresql+psycopg")

    def prepare(self) -> None:
        """Nothing: the first connection tells."""

    def reader(self) -> sa.Engine:
        """``REPEATABLE READ``, so that one reader sees one moment."""
        settings = {"default_transaction_isolation": r"repeatable\ read", "default_transaction_read_only": "on"}
        return self._engine(settings, pool_size=8, max_overflow=32, pool_timeout=30, pool_pre_ping=True)

    def writer(self) -> sa.Engine:
        """``READ COMMITTED``: repositories lock the rows whose state they decide on."""
        settings = {"lock_timeout": f"{BUSY_TIMEOUT_SECONDS:.0f}s", "synchronous_commit": "on"}
        return self._engine(settings, poolclass=sa.NullPool)

    def migrator(self) -> sa.Engine:
        """Waits for locks as long as it takes."""
        return self._engine({}, poolclass=sa.NullPool)

    def _engine(self, settings: dict[str, str], **options: Any) -> sa.Engine:
        given = str(self.url.query.get("options", ""))
        settings = {"idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_SECONDS}s", **settings}
        words = " ".join(f"-c {name}={value}" for name, value in settings.items())
        return sa.create_engine(
            self.url.difference_update_query(["options"]),
            connect_args={"options": f"{given} {words}".strip(), "connect_timeout": 10},
            **options,
        )

    def fault(self, error: BaseException) -> Fault:
        """By SQLSTATE (https://www.postgresql.org/docs/current/errcodes-appendix.html); without one, no server."""
        if isinstance(error, sa.exc.TimeoutError):
            return Fault.BUSY
        if not isinstance(error, sa.exc.DBAPIError):
            return Fault.OWN
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            is_lost = error.connection_invalidated or isinstance(
                error, (sa.exc.OperationalError, sa.exc.InterfaceError)
            )
            return Fault.LOST if is_lost else Fault.OWN
        if state in {"53100", "53200"}:
            return Fault.FULL
        if state in {"40001", "40P01", "55P03", "53300"}:
            return Fault.BUSY
        if state[:2] in {"08", "57"} or state == "25P03":
            return Fault.LOST
        return Fault.BROKEN if state in {"25006", "XX001", "XX002"} else Fault.OWN

    def check(self, conn: sa.Connection) -> list[str]:
        """Nothing: the server looks after itself."""
        return []

    def mark(self, conn: sa.Connection) -> str | None:
        """The transaction's id."""
        return str(conn.exec_driver_sql("SELECT pg_current_xact_id()::text").scalar_one())

    def landed(self, conn: sa.Connection, mark: str) -> bool | None:
        """Asks the server's commit log."""
        status = conn.exec_driver_sql("SELECT pg_xact_status(%s::xid8)", (mark,)).scalar_one()
        return {"committed": True, "aborted": False}.get(status)


def to_error(backend: Backend, error: BaseException) -> OvernightError:
    """The error that callers of the store see for a fault of the database itself."""
    text = str(getattr(error, "orig", error)).strip() or type(error).__name__
    match backend.fault(error):
        case Fault.FULL:
            return StoreFullError(
                f"there is no space left for the database: {text}",
                hint="Nothing was changed. Make room on its disk; then it goes on by itself.",
            )
        case Fault.BROKEN:
            return SetupError(
                f"the database is damaged, read-only or none: {text}",
                hint="Check the file's owner, mode and disk. If it is damaged, put a copy in its place that "
                "`overnight db backup` made.",
            )
        case _:
            return StoreBusyError(
                f"the database is locked or away: {text}", hint="Nothing was changed. Try again in a moment."
            )
