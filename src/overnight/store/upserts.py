"""``INSERT … ON CONFLICT``, which SQLite and PostgreSQL spell alike and SQLAlchemy builds from two classes."""

from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql


def upsert(conn: sa.Connection, table: sa.Table) -> "postgresql.Insert | sqlite.Insert":
    """The insert of the connection's database that has ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    return insert_for(conn.dialect.name, table)


def insert_for(dialect: str, table: sa.Table) -> "postgresql.Insert | sqlite.Insert":
    """:func:`upsert` by the dialect's name, for statements that are built once."""
    if dialect != "postgresql":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # a server on SQLite starts sooner without it

    return postgresql.insert(table)
