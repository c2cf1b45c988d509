"""From rows to events: what the store says, compared with what the scheduler's state believes.

Comparing makes every notice level-triggered: a commit that was missed, or heard of twice, changes nothing. The caller
applies each event before it takes the next.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from overnight.core.enums import CLASS_ORDER, DirectiveAction, LeaseState, Outcome, TrialState
from overnight.core.models.api import Device
from overnight.platform.scheduler.core import State
from overnight.platform.scheduler.events import (
    CheckpointCommitted,
    Demand,
    DeviceChanged,
    DeviceGone,
    DeviceView,
    Event,
    LeaseClean,
    LeaseReleasing,
    Phase,
    ResumableChanged,
    TrialGone,
    TrialQueued,
    TrialStarted,
    TrialStopping,
    TrialYielding,
    Waiting,
)
from overnight.store import attempts, devices, events, trials
from overnight.store.attempts import LiveAttempt
from overnight.store.trials import SchedTrial

if TYPE_CHECKING:
    from overnight.store.engine import Connection

MAX_BACKOFF_SECONDS = 600.0
"""A stored time of a clock that jumped must not keep a trial back for years."""

BIND_MARGIN_SECONDS = 60.0
"""How much longer than the grace freed devices are kept for a pre-emptor."""


_FAULTS = frozenset({Outcome.INFRA_FAULT, Outcome.VANISHED})


@dataclass(frozen=True)
class Times:
    """One moment on both clocks."""

    now: datetime
    monotonic: float

    def monotonic_at(self, at: datetime) -> float:
        """A stored wall time on the scheduler's own clock."""
        return self.monotonic + (at - self.now).total_seconds()


@dataclass
class Facts:
    """Rows behind the state, by id, for the words of causes and explanations."""

    trials: dict[str, SchedTrial] = field(default_factory=dict)
    attempts: dict[str, LiveAttempt] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)

    def trial_name(self, trial_id: str) -> str:
        """What people call it."""
        trial = self.trials.get(trial_id)
        return trial.name if trial is not None else trial_id


def device_events(conn: "Connection", state: State, facts: Facts) -> Iterator[Event]:
    """Every difference in the devices."""
    facts.devices = {device.id: device for device in devices.list_(conn)}
    for device in facts.devices.values():
        view = DeviceView(device.id, device.node_id, device.index, device.type, device.state)
        if state.fleet.devices.get(device.id) != view:
            yield DeviceChanged(view)
    for device_id in [known for known in state.fleet.devices if known not in facts.devices]:
        yield DeviceGone(device_id)


def lease_events(conn: "Connection", state: State, facts: Facts, times: Times) -> Iterator[Event]:
    """Every difference in the attempts whose devices are not clean. Their trials' rows must be in ``facts``."""
    facts.attempts = {attempt.id: attempt for attempt in attempts.live(conn)}
    missing = {a.trial_id for a in facts.attempts.values()} - facts.trials.keys()
    if missing:
        facts.trials.update({trial.id: trial for trial in trials.schedulable(conn, missing)})
    for attempt_id in [known for known in state.live if known not in facts.attempts]:
        yield LeaseClean(attempt_id)
    for attempt in facts.attempts.values():
        trial = facts.trials.get(attempt.trial_id)
        if attempt.id not in state.live:
            yield _started(attempt, trial, times)
        if attempt.ended_at is not None or attempt.lease_state is not LeaseState.ACTIVE:
            live = state.live.get(attempt.id)
            if live is None or live.phase is not Phase.RELEASING:
                yield LeaseReleasing(attempt.id)
        elif trial is not None:
            yield from _running_events(state, attempt.id, trial, times)


def trial_events(
    conn: "Connection", state: State, facts: Facts, times: Times, trial_ids: Collection[str] | None
) -> Iterator[Event]:
    """Every difference in the trials: all, or those of ``trial_ids``."""
    rows = {trial.id: trial for trial in trials.schedulable(conn, trial_ids)}
    gone = (facts.trials.keys() if trial_ids is None else set(trial_ids)) - rows.keys()
    facts.trials.update(rows)
    for trial_id in sorted(gone):
        facts.trials.pop(trial_id, None)
        if trial_id in state.line.trials:
            yield TrialGone(trial_id)
    current = {live.trial_id: live.attempt_id for live in state.live.values() if live.phase is not Phase.RELEASING}
    for trial in rows.values():
        if trial.state is TrialState.QUEUED:
            known = state.line.trials.get(trial.id)
            waiting = _waiting(conn, trial, known, facts, times)
            if waiting != known:
                yield TrialQueued(waiting)
            continue
        if trial.id in state.line.trials:
            yield TrialGone(trial.id)
        if (attempt_id := current.get(trial.id)) is not None:
            yield from _running_events(state, attempt_id, trial, times)
    if trial_ids is None:
        yield from _binding_events(conn, state, facts, times)


def _binding_events(conn: "Connection", state: State, facts: Facts, times: Times) -> Iterator[Event]:
    """For whom victims yield, which a state that was built anew does not know. The time to start begins again."""
    for attempt in facts.attempts.values():
        live, directive = state.live.get(attempt.id), attempt.directive
        if live is None or live.for_trial_id is not None or directive.action is not DirectiveAction.YIELD:
            continue
        yielding = TrialState.YIELDING.value
        recorded = events.data_of_last(conn, trial_id=attempt.trial_id, attempt_id=attempt.id, after=yielding)
        for_trial_id = recorded.get("for_trial")
        if for_trial_id in state.line.trials:
            until = times.monotonic + directive.grace_seconds + BIND_MARGIN_SECONDS
            yield TrialYielding(attempt.id, for_trial_id, until)


def _started(attempt: LiveAttempt, trial: SchedTrial | None, times: Times) -> TrialStarted:
    since = attempt.created_at
    if trial is not None and trial.last_commit_at is not None:
        since = max(since, trial.last_commit_at)
    return TrialStarted(
        attempt.id,
        attempt.trial_id,
        attempt.device_ids,
        priority_index(trial),
        trial is not None and is_resumable(trial),
        min(times.monotonic, times.monotonic_at(since)),
    )


def priority_index(trial: SchedTrial | None) -> int:
    """Place of the trial's class in CLASS_ORDER; 0, never a victim, if the trial is unknown."""
    return CLASS_ORDER.index(trial.priority) if trial is not None else 0


def is_resumable(trial: SchedTrial) -> bool:
    """Whether it can go on later where it stopped: it says how, the trainer tracks its state, or it has committed."""
    return trial.resume is not None or trial.tracked or trial.last_commit_at is not None


def _running_events(state: State, attempt_id: str, trial: SchedTrial, times: Times) -> Iterator[Event]:
    live = state.live.get(attempt_id)
    if live is None or live.is_resumable != is_resumable(trial):
        yield ResumableChanged(attempt_id, is_resumable(trial))
    if trial.last_commit_at is not None and live is not None:
        at = min(times.monotonic, times.monotonic_at(trial.last_commit_at))
        if at > live.since + 0.001:
            yield CheckpointCommitted(attempt_id, at)
    phase = live.phase if live is not None else Phase.RUNNING
    if trial.state is TrialState.YIELDING and phase is Phase.RUNNING:
        yield TrialYielding(attempt_id, None, times.monotonic)
    elif trial.state is TrialState.STOPPING and phase in (Phase.RUNNING, Phase.YIELDING):
        yield TrialStopping(attempt_id)


def _waiting(conn: "Connection", trial: SchedTrial, known: Waiting | None, facts: Facts, times: Times) -> Waiting:
    new = Waiting(
        trial.id,
        priority_index(trial),
        trial.rank,
        trial.place,
        Demand.of(trial.compute),
        _avoid(conn, trial, facts) if trial.retries_used else frozenset(),
    )
    if trial.not_before is None or trial.not_before <= times.now:
        return new
    delay_seconds = min(MAX_BACKOFF_SECONDS, (trial.not_before - times.now).total_seconds())
    not_before = times.monotonic + delay_seconds
    if known is not None and abs(known.not_before - not_before) < 1.0:
        not_before = known.not_before
    return Waiting(new.trial_id, new.priority, new.rank, new.place, new.demand, new.avoid, not_before)


def _avoid(conn: "Connection", trial: SchedTrial, facts: Facts) -> frozenset[str]:
    """Devices of its faulty attempts since the last progress. A CPU slot is no part of a machine that can break."""
    recent = [a for a in attempts.of_trial(conn, trial.id) if a.outcome in _FAULTS][-trial.retries_used :]
    found = {device_id for attempt in recent for device_id in attempt.devices}
    return frozenset(d for d in found if (device := facts.devices.get(d)) is not None and device.kind != "cpu")
