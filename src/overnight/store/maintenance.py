"""Looking after a database from outside the server: ``overnight db upgrade check backup info``."""

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from overnight.core.errors import InvalidSpecError, SetupError
from overnight.store import migrations
from overnight.store.backends import Backend, SqliteBackend, backend_for, to_error
from overnight.store.models import metadata

MAX_PROBLEMS = 20


def _open(url: str) -> Backend:
    """The backend of a database that exists; a look must not make one.

    Raises:
        SetupError: There is no database yet.
    """
    backend = backend_for(url)
    if isinstance(backend, SqliteBackend) and not backend.path.is_file():
        raise SetupError(f"there is no database {backend.path} yet", hint="The first 'overnight up' makes it.")
    return backend


def upgrade(url: str) -> tuple[str | None, str]:
    """Brings the schema to this version's; returns the versions before and after.

    Raises:
        SetupError: A newer version of overnight made it, or it cannot be opened.
    """
    backend = backend_for(url)
    backend.prepare()
    before = _version(backend)
    try:
        migrations.upgrade(backend)
    except sa.exc.DBAPIError as error:
        raise to_error(backend, error) from error
    return before, migrations.HEAD


def _version(backend: Backend) -> str | None:
    engine = backend.reader()
    try:
        with engine.connect() as conn:
            return migrations.current(conn)
    except sa.exc.DBAPIError as error:
        raise to_error(backend, error) from error
    finally:
        engine.dispose()


def info(url: str) -> dict[str, Any]:
    """Where the database is, its schema, its size in bytes, and the number of rows of each table.

    Raises:
        SetupError: There is none, or it cannot be read.
    """
    backend = _open(url)
    version = _version(backend)
    engine = backend.reader()
    try:
        with engine.connect() as conn:
            names = set(sa.inspect(conn).get_table_names())
            tables = [table for table in metadata.sorted_tables if table.name in names]
            rows = {table.name: conn.scalar(sa.select(sa.func.count()).select_from(table)) for table in tables}
    except sa.exc.DBAPIError as error:
        raise to_error(backend, error) from error
    finally:
        engine.dispose()
    path = backend.path if isinstance(backend, SqliteBackend) else None
    return {
        "url": sa.make_url(url).render_as_string(hide_password=True),
        "schema": version,
        "schema_needed": migrations.HEAD,
        "bytes": path.stat().st_size if path else None,
        "rows": rows,
    }


def check(url: str) -> list[str]:
    """What is wrong with the database; empty if nothing is.

    Raises:
        SetupError: There is none, or it cannot be opened at all.
    """
    backend = _open(url)
    version = _version(backend)
    problems = [] if version == migrations.HEAD else [f"schema is {version or 'none'}, needed is {migrations.HEAD}"]
    if isinstance(backend, SqliteBackend):
        problems += _check_sqlite(backend)
    return problems


def _check_sqlite(backend: SqliteBackend) -> list[str]:
    try:
        with contextlib.closing(_readonly(backend.path)) as conn:
            found = [str(row[0]) for row in conn.execute(f"PRAGMA integrity_check({MAX_PROBLEMS})")]
            keys = [
                f"{row[0]}: row {row[1]} refers to a missing {row[2]}"
                for row in conn.execute("PRAGMA foreign_key_check")
            ]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [text for text in found if text != "ok"] + keys[:MAX_PROBLEMS]


def _readonly(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30.0)


def backup(url: str, target: Path) -> int:
    """Copies an SQLite database, also while a server writes to it (https://www.sqlite.org/backup.html).

    Args:
        url: The store.
        target: The new file; it appears only when it is whole.

    Returns:
        Its size in bytes.

    Raises:
        InvalidSpecError: The target exists.
        SetupError: The store is no SQLite database, or cannot be read.
    """
    backend = _open(url)
    if not isinstance(backend, SqliteBackend):
        raise SetupError("only SQLite databases are copied by this command", hint="Use pg_dump for PostgreSQL.")
    if target.exists():
        raise InvalidSpecError(f"{target} exists already", hint="Name a new file, or remove that one.")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".overnight-backup-") as folder:
        copy = Path(folder) / "copy.db"
        try:
            with contextlib.closing(_readonly(backend.path)) as source, contextlib.closing(sqlite3.connect(copy)) as to:
                source.backup(to)
        except sqlite3.Error as error:
            raise to_error(backend, error) from error
        copy.chmod(0o600)
        size = copy.stat().st_size
        copy.rename(target)
    return size
