"""Brings a database's schema to this version's, once, whole or not at all.

Alembic is imported only when there is something to do: it costs half a second, and a restarted server has none.
"""

import threading
from typing import Any

import sqlalchemy as sa

from overnight.core.errors import SetupError
from overnight.store.backends import Backend

HEAD = "0003"
"""The newest migration. A test compares it with the scripts."""

ADVISORY_LOCK = 0x6F766572  # "over"
_alembic_lock = threading.Lock()  # alembic keeps its context in module globals


def current(conn: sa.Connection) -> str | None:
    """The schema's version, None for an empty database."""
    if not sa.inspect(conn).has_table("alembic_version"):
        return None
    version: str | None = conn.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return version


def require_head(backend: Backend) -> None:
    """Refuses a database that another version made.

    Raises:
        SetupError: Its version is not this one's.
    """
    engine = backend.reader()
    try:
        with engine.connect() as conn:
            found = current(conn)
    finally:
        engine.dispose()
    if found != HEAD:
        raise SetupError(
            f"the database has schema {found or 'none'}, this version of overnight needs {HEAD}",
            hint="Start the server of this version first: it migrates.",
        )


def upgrade(backend: Backend) -> None:
    """Migrates to head in one transaction; nothing when it is there.

    Raises:
        SetupError: A newer version of overnight made the database, or its rows contradict each other.
    """
    engine = backend.migrator()
    try:
        with engine.begin() as conn:
            if conn.dialect.name == "postgresql":
                conn.exec_driver_sql(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")
            if current(conn) != HEAD:
                _run_alembic(conn)
                _check_keys(conn)
    finally:
        engine.dispose()


def config(**attributes: Any) -> Any:
    """Alembic's configuration for the scripts inside this package (an ``alembic.config.Config``)."""
    from alembic.config import Config

    made = Config()
    made.set_main_option("script_location", "overnight:alembic")
    made.set_main_option("path_separator", "os")
    made.attributes.update(attributes)
    return made


def _run_alembic(conn: sa.Connection) -> None:
    from alembic import command
    from alembic.util import CommandError

    with _alembic_lock:
        try:
            command.upgrade(config(connection=conn), "head")
        except CommandError as error:
            raise SetupError(
                f"the database cannot be migrated: {error}",
                hint="A newer overnight made it: install that version or a later one. The database is unchanged.",
            ) from error


def _check_keys(conn: sa.Connection) -> None:
    if conn.dialect.name != "sqlite":
        return
    broken = conn.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        raise SetupError(
            f"{len(broken)} rows point to rows that are not there, first in table {broken[0][0]}",
            hint="The database is unchanged. Restore a copy, or report this with the file.",
        )
