"""Nodes: machines whose daemons have said hello."""

import re
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.errors import NotFoundError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Node
from overnight.core.models.node import NodeHello
from overnight.store import devices, events, models
from overnight.store.events import NewEvent
from overnight.store.models import storable
from overnight.store.writer import touch

_TABLE = models.nodes
_ONE = sa.select(_TABLE).where((_TABLE.c.id == sa.bindparam("ref")) | (_TABLE.c.name == sa.bindparam("ref"))).limit(1)
_UPDATE = sa.update(_TABLE).where(_TABLE.c.id == sa.bindparam("which"))


def hello(conn: sa.Connection, *, ids: IdFactory, now: datetime, hello: NodeHello) -> Node:
    """The node of that name, new or again, with its devices; connected.

    The name becomes part of device ids and of URLs: what does not fit there becomes a dash.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", hello.name)[:100].strip("-.") or "node"
    row = conn.execute(sa.select(_TABLE).where(_TABLE.c.name == name).with_for_update()).one_or_none()
    facts = {
        "pid": hello.pid,
        "boot_id": storable(hello.boot_id, 64),
        "version": storable(hello.version, 64),
        "connected": True,
        "seen_at": now,
    }
    if row is None:
        node_id = ids("node")
        conn.execute(sa.insert(_TABLE), {"id": node_id, "name": name, "created_at": now, **facts})
    else:
        node_id = row.id
        conn.execute(sa.update(_TABLE).where(_TABLE.c.id == node_id).values(facts))
    if row is None or not row.connected or (row.pid, row.boot_id) != (facts["pid"], facts["boot_id"]):
        cause = "first seen" if row is None else "rebooted" if row.boot_id != facts["boot_id"] else "said hello"
        _record(conn, name, now, "node.connected", cause, "node", pid=hello.pid)
    devices.upsert(conn, node_id=node_id, reports=hello.devices, now=now)
    touch(conn, "nodes", f"node:{node_id}")
    return get(conn, node_id)


def _record(conn: sa.Connection, name: str, now: datetime, kind: str, cause: str, actor: str, **data: Any) -> None:
    events.append(conn, now, NewEvent(kind, name, actor, cause, data=data))


def seen(conn: sa.Connection, *, node_id: str, now: datetime) -> None:
    """It spoke. Connects it again when it was silent, with an event.

    Raises:
        NotFoundError: There is none.
    """
    row = _row(conn, node_id)
    conn.execute(_UPDATE, {"which": row.id, "seen_at": now, "connected": True})
    if not row.connected:
        _record(conn, row.name, now, "node.connected", "it speaks again", "node")
        touch(conn, "nodes", f"node:{row.id}")


def disconnect(conn: sa.Connection, *, node_id: str, cause: str, now: datetime, actor: str = "scheduler") -> bool:
    """It is silent; whether that is news.

    Raises:
        NotFoundError: There is none.
    """
    row = _row(conn, node_id)
    if not row.connected:
        return False
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == row.id).values(connected=False))
    _record(conn, row.name, now, "node.silent", cause, actor)
    touch(conn, "nodes", f"node:{row.id}")
    return True


def _row(conn: sa.Connection, ref: str) -> sa.Row[Any]:
    row = conn.execute(_ONE, {"ref": storable(ref)}).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no node {ref[:200]!r}", hint="`overnight nodes` shows what there is.")
    return row


def is_connected(conn: sa.Connection, ref: str) -> bool:
    """Whether a node, by id or name, counts as there.

    Raises:
        NotFoundError: There is none.
    """
    return bool(_row(conn, ref).connected)


def get(conn: sa.Connection, ref: str) -> Node:
    """By id or name.

    Raises:
        NotFoundError: There is none.
    """
    row = _row(conn, ref)
    return _to_wire(conn, [row])[0]


def list_(conn: sa.Connection) -> list[Node]:
    """By name."""
    return _to_wire(conn, list(conn.execute(sa.select(_TABLE).order_by(_TABLE.c.name))))


def _to_wire(conn: sa.Connection, rows: list[sa.Row[Any]]) -> list[Node]:
    table = models.devices
    query = sa.select(table.c.node_id, table.c.id).where(table.c.node_id.in_([row.id for row in rows]))
    found: dict[str, list[str]] = {row.id: [] for row in rows}
    for line in conn.execute(query.order_by(table.c.node_id, table.c.index)):
        found[line.node_id].append(line.id)
    return [
        Node(
            id=row.id,
            name=row.name,
            pid=row.pid,
            boot_id=row.boot_id,
            connected=row.connected,
            seen_at=row.seen_at,
            devices=tuple(found[row.id]),
        )
        for row in rows
    ]
