"""Nodes: machines whose daemons have said hello."""

from datetime import datetime

import sqlalchemy as sa

from overnight.core.ids import IdFactory
from overnight.core.models.api import Node
from overnight.core.models.node import NodeHello


def hello(conn: sa.Connection, *, ids: IdFactory, now: datetime, hello: NodeHello) -> Node:
    """The node of that name, new or again, with its devices; connected."""
    raise NotImplementedError


def seen(conn: sa.Connection, *, node_id: str, now: datetime) -> None:
    """It spoke. Connects it again when it was silent (an event). Raises NotFoundError."""
    raise NotImplementedError


def disconnect(conn: sa.Connection, *, node_id: str, cause: str, now: datetime, actor: str = "scheduler") -> bool:
    """It is silent; whether that is news."""
    raise NotImplementedError


def get(conn: sa.Connection, ref: str) -> Node:
    """By id or name. Raises NotFoundError."""
    raise NotImplementedError


def list_(conn: sa.Connection) -> list[Node]:
    """By name."""
    raise NotImplementedError
