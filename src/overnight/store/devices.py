"""Devices: what they are, what the platform thinks of them, and who holds them."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import DeviceState
from overnight.core.errors import ConflictError, NotFoundError
from overnight.core.models.api import Device
from overnight.core.models.node import DeviceReport, OrderDevice
from overnight.store import events, models
from overnight.store.events import NewEvent
from overnight.store.models import storable
from overnight.store.writer import touch

_TABLE = models.devices
_FACTS = ("kind", "type", "memory_bytes", "uuid")
_NODE_NAME = sa.select(models.nodes.c.name).where(models.nodes.c.id == sa.bindparam("node"))
_OF_NODE = sa.select(_TABLE).where(_TABLE.c.node_id == sa.bindparam("node"))
_EVIDENCE = sa.select(_TABLE.c.id, _TABLE.c.evidence).where(_TABLE.c.node_id == sa.bindparam("node"))
_WITH_HOLDER = (
    sa.select(
        _TABLE,
        models.lease_devices.c.attempt_id,
        models.trials.c.id.label("trial_id"),
        models.trials.c.name.label("trial_name"),
    )
    .join(models.nodes, models.nodes.c.id == _TABLE.c.node_id)
    .outerjoin(
        models.lease_devices,
        (models.lease_devices.c.device_id == _TABLE.c.id) & (models.lease_devices.c.clean == 0),
    )
    .outerjoin(models.attempts, models.attempts.c.id == models.lease_devices.c.attempt_id)
    .outerjoin(models.trials, models.trials.c.id == models.attempts.c.trial_id)
    .order_by(models.nodes.c.name, _TABLE.c.index)
)
_WITH_HOLDER_OF_NODE = _WITH_HOLDER.where(_TABLE.c.node_id == sa.bindparam("node"))
_BRIEF = (
    sa.select(_TABLE.c.id, _TABLE.c.index, _TABLE.c.kind)
    .where(_TABLE.c.node_id == sa.bindparam("node"))
    .order_by(_TABLE.c.index)
)
_ONE_WITH_HOLDER = _WITH_HOLDER.where(_TABLE.c.id == sa.bindparam("device"))


def upsert(conn: sa.Connection, *, node_id: str, reports: Sequence[DeviceReport], now: datetime) -> list[str]:
    """Facts of a probe; a new device is HEALTHY, the state of a known one is for others to change.

    Returns:
        Ids, such as ``node1:0``, in the reports' order.

    Raises:
        NotFoundError: No such node.
    """
    name = conn.scalar(_NODE_NAME, {"node": node_id})
    if name is None:
        raise NotFoundError(f"there is no node {node_id[:200]!r}", hint="`overnight nodes` shows what there is.")
    known = {row._mapping["index"]: row for row in conn.execute(_OF_NODE, {"node": node_id})}
    for report in reports:
        facts = _facts(report)
        row = known.get(report.index)
        if row is None:
            _insert(conn, f"{name}:{report.index}", node_id, report.index, facts, now)
        elif facts != {fact: getattr(row, fact) for fact in _FACTS}:
            conn.execute(sa.update(_TABLE).where(_TABLE.c.id == row.id).values(facts))
            event = NewEvent("device.changed", row.id, "node", "it reports other facts than before", data=facts)
            events.append(conn, now, event)
            touch(conn, "devices")
    return [f"{name}:{report.index}" for report in reports]


def _facts(report: DeviceReport) -> dict[str, Any]:
    return {
        "kind": storable(report.kind, 32),
        "type": storable(report.type, 100),
        "memory_bytes": report.memory_bytes,
        "uuid": storable(report.uuid, 100),
    }


def _insert(
    conn: sa.Connection, device_id: str, node_id: str, index: int, facts: dict[str, Any], now: datetime
) -> None:
    values = {
        "id": device_id,
        "node_id": node_id,
        "index": index,
        "state": DeviceState.HEALTHY.value,
        "cause": "",
        "evidence": {},
        "since": now,
        **facts,
    }
    conn.execute(sa.insert(_TABLE), values)
    event = NewEvent("device.state", device_id, "node", "first seen", after=DeviceState.HEALTHY.value, data=facts)
    events.append(conn, now, event)
    touch(conn, "devices")


def set_state(
    conn: sa.Connection,
    *,
    device_id: str,
    state: DeviceState,
    cause: str,
    now: datetime,
    actor: str,
    until: datetime | None = None,
    evidence: dict[str, Any] | None = None,
    expected: Collection[DeviceState] | None = None,
) -> bool:
    """Changes the state and writes an event; False when it has that state, cause and ``until`` already.

    ``since`` moves only when the state itself changes.

    Raises:
        NotFoundError: No such device.
        ConflictError: It is in none of the ``expected`` states.
    """
    row = conn.execute(sa.select(_TABLE).where(_TABLE.c.id == storable(device_id)).with_for_update()).one_or_none()
    if row is None:
        raise _no_device(device_id)
    before = DeviceState(row.state)
    if expected is not None and before not in expected:
        raise ConflictError(f"device {device_id} is {before.value}: {row.cause}", device=device_id, state=before.value)
    if (before, row.cause, row.until) == (state, cause, until):
        return False
    values = {
        "state": state.value,
        "cause": cause,
        "until": until,
        "evidence": evidence or {},
        "since": row.since if before is state else now,
    }
    conn.execute(sa.update(_TABLE).where(_TABLE.c.id == device_id).values(values))
    data = {"evidence": evidence or {}, "until": None if until is None else until.isoformat()}
    event = NewEvent("device.state", device_id, actor, cause, before=before.value, after=state.value, data=data)
    events.append(conn, now, event)
    touch(conn, "devices", f"device:{device_id}")
    return True


def _no_device(device_id: str) -> NotFoundError:
    return NotFoundError(f"there is no device {device_id[:200]!r}", hint="`overnight devices` shows what there is.")


def get(conn: sa.Connection, device_id: str) -> Device:
    """By id.

    Raises:
        NotFoundError: There is none.
    """
    found = [_to_wire(row) for row in conn.execute(_ONE_WITH_HOLDER, {"device": storable(device_id)})]
    if not found:
        raise _no_device(device_id)
    return found[0]


def evidence(conn: sa.Connection, node_id: str) -> dict[str, dict[str, Any]]:
    """What was kept with the newest change of each device of a node, by device id."""
    rows = conn.execute(_EVIDENCE, {"node": node_id})
    return {row.id: row.evidence or {} for row in rows}


def list_(conn: sa.Connection, node_id: str | None = None) -> list[Device]:
    """By node and index, with the holder of each."""
    found = conn.execute(_WITH_HOLDER) if node_id is None else conn.execute(_WITH_HOLDER_OF_NODE, {"node": node_id})
    return [_to_wire(row) for row in found]


def for_orders(conn: sa.Connection, node_id: str) -> list[OrderDevice]:
    """What an order says of the devices of a node, by index: a launch waits for this, so it asks for no more."""
    return [OrderDevice(id=id_, index=index, kind=kind) for id_, index, kind in conn.execute(_BRIEF, {"node": node_id})]


def _to_wire(row: sa.Row[Any]) -> Device:
    return Device(
        id=row.id,
        node_id=row.node_id,
        index=row._mapping[_TABLE.c.index],
        kind=row.kind,
        type=row.type,
        memory_bytes=row.memory_bytes,
        state=DeviceState(row.state),
        cause=row.cause,
        until=row.until,
        trial_id=row.trial_id,
        trial_name=row.trial_name,
        attempt_id=row.attempt_id,
        since=row.since,
    )
