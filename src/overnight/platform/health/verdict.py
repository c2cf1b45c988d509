"""What a report makes of a device: a pure judgement from the report, the device's state and its history."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from overnight.core.enums import DeviceState
from overnight.core.models.node import DeviceReport
from overnight.platform.health.causes import CauseAction, CauseTable

S = DeviceState


@dataclass(frozen=True)
class History:
    """What is remembered of a device between two reports.

    Attributes:
        state: What the platform thinks of it.
        cause: Why.
        until: When that ends by itself; None is until somebody or a report says otherwise.
        suspicion: Weight of its soft causes at ``suspicion_at``; halves every half-life.
        soft: The soft cause in the report before: only its appearance counts, not its presence.
    """

    state: DeviceState
    cause: str = ""
    until: datetime | None = None
    suspicion: float = 0.0
    suspicion_at: datetime | None = None
    soft: str | None = None

    def suspicion_now(self, now: datetime, half_life_hours: float) -> float:
        """The suspicion after its decay. A clock that went back does not make it grow."""
        if self.suspicion_at is None:
            return 0.0
        hours = max(0.0, (now - self.suspicion_at).total_seconds() / 3600)
        return float(self.suspicion * 0.5 ** (hours / half_life_hours))

    @classmethod
    def load(cls, state: DeviceState, cause: str, until: datetime | None, evidence: Mapping[str, Any]) -> "History":
        """From what a verdict's evidence keeps."""
        kept = evidence.get("history") or {}
        at = kept.get("at")
        suspicion_at = datetime.fromisoformat(at) if at else None
        return cls(state, cause, until, float(kept.get("suspicion", 0.0)), suspicion_at, kept.get("soft"))


@dataclass(frozen=True)
class Verdict:
    """What is to be thought of a device from now on.

    Attributes:
        cause: For people: a cause of the table and what it means.
        evidence: The report's, and the history that the next judgement needs.
        until: When it ends by itself.
    """

    state: DeviceState
    cause: str
    evidence: dict[str, Any] = field(default_factory=dict)
    until: datetime | None = None


def preflight(report: DeviceReport) -> str | None:
    """Why a device must not be leased after this report, whatever was thought of it before; None if it may."""
    if report.fatal is not None:
        return report.fatal
    return "another program uses it" if report.busy else None


def judge(report: DeviceReport, history: History, now: datetime, table: CauseTable) -> Verdict | None:
    """The verdict that follows from a report; None if everything stays as it is.

    A fatal cause quarantines at once and for as long as it is seen. A soft one adds suspicion when it appears; causes
    that are most often a program's fault never quarantine by themselves. A stranger's process makes a device ``busy``,
    never suspicious. What a person has decided (a quarantine without end, a drain) only a fatal cause or a person
    changes.
    """
    if report.fatal is not None:
        return _condemn(report, history, now, table)
    suspicion = _suspicion(report, history, now, table)
    after = _after(report, history, now, table, suspicion)
    if after is history.state and (report.soft == history.soft or after in (S.QUARANTINED, S.DRAINING)):
        return None
    cause, until = _explain(report, after, suspicion, now, table)
    return Verdict(after, cause, _evidence(report, suspicion, now), until)


def judge_neighbour(
    report: DeviceReport, history: History, culprit: str, now: datetime, table: CauseTable
) -> Verdict | None:
    """The verdict on a device without a fatal cause while another one of its node shows one that condemns the node.

    It drains: what runs on it goes on, since nothing is wrong with it yet, and nothing new starts. That ends by itself
    some time after the last report of the kind, unless a person has said the same, or worse was known before.

    Args:
        report: Of the neighbour.
        history: Of the neighbour.
        culprit: The cause, for people, with the id of the device that shows it.
        now: Wall time.
        table: What signals mean.
    """
    if history.state is S.QUARANTINED and (history.until is None or history.until > now):
        return None
    if history.state is S.DRAINING:
        by_a_person = history.until is None
        if by_a_person or (history.cause == culprit and history.until is not None and history.until > now):
            return None
    until = now + timedelta(hours=table.quarantine_hours)
    return Verdict(S.DRAINING, culprit, _evidence(report, _suspicion(report, history, now, table), now), until)


def _suspicion(report: DeviceReport, history: History, now: datetime, table: CauseTable) -> float:
    """The suspicion after a report: a soft cause adds to it when it appears."""
    suspicion = history.suspicion_now(now, table.half_life_hours)
    if report.soft is not None and report.soft != history.soft:
        suspicion += table.get(report.soft).weight
    return suspicion


def _condemn(report: DeviceReport, history: History, now: datetime, table: CauseTable) -> Verdict | None:
    assert report.fatal is not None
    cause = f"{report.fatal}: {table.get(report.fatal).meaning}"
    if history.state is S.QUARANTINED:
        by_a_person = history.until is None
        if by_a_person or (history.cause == cause and history.until is not None and history.until > now):
            return None
    until = now + timedelta(hours=table.quarantine_hours)
    suspicion = history.suspicion_now(now, table.half_life_hours)
    return Verdict(S.QUARANTINED, cause, _evidence(report, suspicion, now), until)


def _after(report: DeviceReport, history: History, now: datetime, table: CauseTable, suspicion: float) -> DeviceState:
    """The state after a report without a fatal cause."""
    if history.state is S.QUARANTINED and (history.until is None or history.until > now):
        return S.QUARANTINED
    if history.state is S.DRAINING and (history.until is None or history.until > now):
        return S.DRAINING
    if report.busy:
        return S.BUSY
    only_programs = report.soft is None or table.get(report.soft).action is CauseAction.APPLICATION
    if suspicion >= table.quarantine_at and not only_programs:
        return S.QUARANTINED
    if suspicion >= table.suspect_at:
        return S.SUSPECT
    return S.PROBATION if history.state is S.PROBATION else S.HEALTHY


def _explain(
    report: DeviceReport, after: DeviceState, suspicion: float, now: datetime, table: CauseTable
) -> tuple[str, datetime | None]:
    soft = f"{report.soft}: {table.get(report.soft).meaning}" if report.soft is not None else ""
    if after is S.BUSY:
        return "another program uses it", None
    if after is S.QUARANTINED:
        return soft, now + timedelta(hours=table.quarantine_hours)
    if after is S.SUSPECT:
        hours = table.half_life_hours * math.log2(suspicion / table.suspect_at)
        return soft or "earlier signals", now + timedelta(hours=hours)
    return soft, None


def _evidence(report: DeviceReport, suspicion: float, now: datetime) -> dict[str, Any]:
    history = {"suspicion": round(suspicion, 6), "at": now.isoformat(), "soft": report.soft}
    return {"report": report.evidence, "history": history}
