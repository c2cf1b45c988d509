"""Reports of nodes become facts and verdicts in the store."""

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from overnight.core.enums import DeviceState
from overnight.core.models.node import DeviceReport
from overnight.platform.health.causes import CauseTable, shipped_causes
from overnight.platform.health.verdict import History, Verdict, judge, judge_neighbour
from overnight.store import devices

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

ACTOR = "health"


class Health:
    """Judges every report. Keeps nothing in memory: what it must remember is evidence in the store.

    Args:
        causes: What the signals mean; the shipped table if None.
    """

    def __init__(self, causes: CauseTable | None = None) -> None:
        self._causes = causes or shipped_causes()

    def observe(
        self, conn: "Connection", node_id: str, reports: Sequence[DeviceReport], now: datetime
    ) -> list[tuple[str, Verdict]]:
        """Takes a node's reports, inside a store write.

        Returns:
            What is thought anew, with the id of its device.

        Raises:
            NotFoundError: No such node.
        """
        if not reports:
            return []
        device_ids = devices.upsert(conn, node_id=node_id, reports=reports, now=now)
        known = {device.id: device for device in devices.list_(conn, node_id)}
        kept = devices.evidence(conn, node_id)
        culprit = self._culprit(device_ids, reports)
        changed: list[tuple[str, Verdict]] = []
        for device_id, report in zip(device_ids, reports, strict=True):
            device = known[device_id]
            history = History.load(device.state, device.cause, device.until, kept.get(device_id, {}))
            if culprit is not None and report.fatal is None:
                verdict = judge_neighbour(report, history, culprit, now, self._causes)
            else:
                verdict = judge(report, history, now, self._causes)
            if verdict is not None and self._record(conn, device_id, verdict, now):
                changed.append((device_id, verdict))
        return changed

    def _culprit(self, device_ids: Sequence[str], reports: Sequence[DeviceReport]) -> str | None:
        """What condemns the whole node, in words; None if nothing does."""
        for device_id, report in zip(device_ids, reports, strict=True):
            if report.fatal is not None and (cause := self._causes.get(report.fatal)).condemns_node:
                return f"{cause.name} on {device_id}: {cause.meaning}"
        return None

    def _record(self, conn: "Connection", device_id: str, verdict: Verdict, now: datetime) -> bool:
        if verdict.state in (DeviceState.QUARANTINED, DeviceState.DRAINING):
            log.warning("%s is %s: %s", device_id, verdict.state.value, verdict.cause)
        return devices.set_state(
            conn,
            device_id=device_id,
            state=verdict.state,
            cause=verdict.cause,
            now=now,
            actor=ACTOR,
            until=verdict.until,
            evidence=verdict.evidence,
        )
