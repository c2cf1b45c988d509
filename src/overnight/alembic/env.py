"""Run by alembic: on the connection that the store passes, or for developers on ``-x url=...``.

The command line reads ``[tool.alembic]`` of pyproject.toml: ``alembic -x url=sqlite:////tmp/new.db upgrade head``.
"""

from typing import Any, Literal

import sqlalchemy as sa
from alembic import context
from alembic.autogenerate.api import AutogenContext

from overnight.store import models
from overnight.store.backends import backend_for


def render_plain(kind: str, item: Any, autogen: AutogenContext) -> str | Literal[False]:
    """Writes our types as the column types they are: an old migration must not change with the code."""
    if kind != "type":
        return False
    if isinstance(item, models.UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if isinstance(item, models.JsonText):
        return "sa.Text()"
    return False


def run(connection: sa.Connection) -> None:
    """Runs what the command asked for inside the connection's transaction."""
    context.configure(
        connection=connection,
        target_metadata=models.metadata,
        render_as_batch=True,
        transactional_ddl=True,
        compare_server_default=True,
        render_item=render_plain,
    )
    with context.begin_transaction():
        context.run_migrations()


passed = context.config.attributes.get("connection")
if passed is not None:
    run(passed)
else:
    backend = backend_for(context.get_x_argument(as_dictionary=True)["url"])
    backend.prepare()
    with backend.migrator().begin() as connection:
        run(connection)
