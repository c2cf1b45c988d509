"""``INSERT … ON CONFLICT``, which SQLite and PostgreSQL spell alike and SQLAlchemy builds from two classes."""

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def upsert(conn: sa.Connection, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """The insert of the connection's database that has ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    return postgresql.insert(table) if conn.dialect.name == "postgresql" else sqlite.insert(table)
