"""How long each device has worked, and how often that ended by a fault of the infrastructure."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from overnight.core.enums import Outcome
from overnight.store import models

_ATTEMPTS, _HELD = models.attempts, models.lease_devices
_FAULTS = {Outcome.INFRA_FAULT.value, Outcome.VANISHED.value}
_ENDED = (
    sa.select(_ATTEMPTS.c.id, _ATTEMPTS.c.started_at, _ATTEMPTS.c.ended_at, _ATTEMPTS.c.outcome, _HELD.c.device_id)
    .join(_HELD, _HELD.c.attempt_id == _ATTEMPTS.c.id)
    .where(_ATTEMPTS.c.ended_at >= sa.bindparam("since"), _ATTEMPTS.c.started_at.is_not(None))
)


@dataclass(frozen=True)
class History:
    """What a device has gone through.

    Attributes:
        seconds: In which attempts ran on it.
        faults: Attempts that ended by a fault of the infrastructure, each shared by the devices that it had.
    """

    seconds: float
    faults: float


def histories(conn: sa.Connection, since: datetime) -> dict[str, History]:
    """By device, from the attempts that have ended since then."""
    seconds: dict[str, float] = defaultdict(float)
    faulty: dict[str, list[str]] = defaultdict(list)
    for row in conn.execute(_ENDED, {"since": since}):
        seconds[row.device_id] += max(0.0, (row.ended_at - row.started_at).total_seconds())
        if row.outcome in _FAULTS:
            faulty[row.id].append(row.device_id)
    faults: dict[str, float] = defaultdict(float)
    for devices in faulty.values():
        for device in devices:
            faults[device] += 1 / len(devices)
    return {device: History(spent, faults[device]) for device, spent in seconds.items()}
