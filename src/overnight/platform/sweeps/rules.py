"""When a sweep ends by itself: pure decisions from what its trials have come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Literal

from overnight.core.enums import Mode, ProposalStatus, SweepState, TrialState
from overnight.core.models.spec import Objective, SweepConfig
from overnight.core.states import END_STATES, LIVE_STATES
from overnight.planning import judgement
from overnight.store.searches import Asked, SearchTrial

SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True)
class Ending:
    """That a sweep proposes no more, and why.

    Attributes:
        state: What it becomes once its trials have ended; at once when it breaks.
        cause: One sentence for people.
        drops: Which of its trials are cancelled: ``none``, those that have never started (``new``), or ``all``.
    """

    state: SweepState
    cause: str
    drops: Literal["none", "new", "all"] = "new"

    def dropped(self, trials: Sequence[SearchTrial]) -> list[str]:
        """Ids of the trials to cancel."""
        return [trial.id for trial in trials if self._drops(trial)]

    def _drops(self, trial: SearchTrial) -> bool:
        if trial.state in END_STATES or trial.state is TrialState.STOPPING or self.drops == "none":
            return False
        return self.drops == "all" or (trial.attempts_made == 0 and trial.state not in LIVE_STATES)


@dataclass(frozen=True)
class Progress:
    """A sweep's proposals, counted."""

    trials: tuple[SearchTrial, ...]
    num_accepted: int
    num_open: int

    @classmethod
    def of(cls, sweep_id: str, asked: Sequence[Asked]) -> "Progress":
        """Only the sweep's own trials count; what a duplicate repeats is knowledge, not work."""
        own = tuple(a.trial for a in asked if a.trial is not None and a.trial.sweep_id == sweep_id)
        accepted = sum(a.status is ProposalStatus.ACCEPTED for a in asked)
        return cls(own, accepted, sum(trial.state not in END_STATES for trial in own))


def ending(
    config: SweepConfig,
    objective: Objective | None,
    progress: Progress,
    device_seconds: float,
    now: datetime,
    deadline: datetime | None,
) -> Ending | None:
    """Why the sweep proposes no more; None while it should.

    Args:
        config: The sweep.
        objective: What its target is measured by.
        progress: Its trials.
        device_seconds: Leased so far.
        now: Wall time.
        deadline: From the schedule's ``until``.
    """
    stop = config.stop
    failures = consecutive_failures(progress.trials)
    if len(failures) >= stop.consecutive_failures:
        last = failures[-1]
        why = f": {last.state_cause}" if last.state_cause else ""
        return Ending(SweepState.BROKEN, f"{len(failures)} trials in a row failed, the last was {last.name}{why}")
    if stop.target is not None and objective is not None:
        for trial in progress.trials:
            if judgement.reaches(trial.value, stop.target, objective.mode):
                word = "at least" if objective.mode is Mode.MAX else "at most"
                reached = f"{trial.name} reached {trial.value:.6g}, the target was {word} {stop.target:.6g}"
                return Ending(SweepState.FINISHED, reached, "all")
    if stop.gpu_hours is not None and device_seconds >= stop.gpu_hours * SECONDS_PER_HOUR:
        return Ending(SweepState.FINISHED, f"the budget of {stop.gpu_hours:g} device-hours is spent")
    if deadline is not None and now >= deadline:
        return Ending(SweepState.FINISHED, f"no new trials after {deadline:%H:%M %Z}")
    if progress.num_accepted >= config.trials:
        return Ending(SweepState.FINISHED, f"all {config.trials} trials are done", "none")
    return None


def consecutive_failures(trials: Sequence[SearchTrial]) -> list[SearchTrial]:
    """The newest unbroken run of failures by time of ending; cancelled trials say nothing, pruned ones worked."""
    ended = sorted(
        (t for t in trials if t.ended_at is not None and t.state in END_STATES and t.state is not TrialState.CANCELLED),
        key=lambda t: (t.ended_at, t.id),
    )
    failures: list[SearchTrial] = []
    for trial in ended:
        failures = [*failures, trial] if trial.state is TrialState.FAILED else []
    return failures


def deadline_after(started_at: datetime, until: str, zone: tzinfo) -> datetime:
    """The first ``HH:MM`` of the zone's clocks after a moment.

    Args:
        started_at: When the run began, aware.
        until: ``"HH:MM"``.
        zone: Whose time of day.
    """
    local = started_at.astimezone(zone)
    hour, minute = map(int, until.split(":"))
    for days in range(3):
        at = datetime.combine(local.date() + timedelta(days=days), time(hour, minute), zone)
        if at.astimezone(UTC) > started_at:
            return at
    raise AssertionError("a time of day comes every day")
