"""Devices: what they are, what the platform thinks of them, and who holds them."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import DeviceState
from overnight.core.models.api import Device
from overnight.core.models.node import DeviceReport


def upsert(conn: sa.Connection, *, node_id: str, reports: Sequence[DeviceReport], now: datetime) -> list[str]:
    """Facts of a probe (never the state, except that a new device is HEALTHY). Returns ids in the reports' order."""
    raise NotImplementedError


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
    """Changes the state and writes an event; False when nothing changed.

    Raises:
        NotFoundError: No such device.
        ConflictError: It is in none of the ``expected`` states.
    """
    raise NotImplementedError


def get(conn: sa.Connection, device_id: str) -> Device:
    """Raises NotFoundError."""
    raise NotImplementedError


def list_(conn: sa.Connection, node_id: str | None = None) -> list[Device]:
    """By node and index, with the holder of each."""
    raise NotImplementedError
