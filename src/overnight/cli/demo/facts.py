"""The demo's figures, each computed from what was stored or recorded, none assumed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overnight.core.enums import DeviceState, Outcome, TrialState
from overnight.core.errors import NotFoundError
from overnight.core.models.api import Device, Event, Trial
from overnight.trainer.data.record import audit


@dataclass(frozen=True)
class Best:
    """The winner of the sweep."""

    trial: str
    params: dict[str, Any]
    value: float


@dataclass(frozen=True)
class Facts:
    """What ``overnight demo -o json`` prints.

    Attributes:
        samples_expected: Samples that the completed trials should have trained on: epochs x samples per epoch each.
        samples_recorded: Samples that their records say they trained on, replayed work not counted.
        utilization: Busy share of device time between the first start and the last end.
        seconds: From the start of the server to the last result.
    """

    trials_completed: int
    trials_failed: int
    best: Best | None
    device_faults: int
    preemptions: int
    server_restarts: int
    samples_expected: int
    samples_recorded: int
    samples_repeated: int
    samples_skipped: int
    undisturbed_match: bool
    utilization: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def problems(self) -> list[str]:
        """What did not come out as promised; empty is success."""
        found = []
        if self.trials_failed:
            found.append(f"{self.trials_failed} trials failed")
        if self.samples_recorded != self.samples_expected:
            found.append(f"{self.samples_recorded} samples recorded, {self.samples_expected} expected")
        if self.samples_repeated or self.samples_skipped:
            found.append(f"{self.samples_repeated} samples repeated, {self.samples_skipped} skipped")
        if not self.undisturbed_match:
            found.append("the interrupted trial's weights differ from those of its undisturbed rerun")
        events = ("device_faults", "preemptions", "server_restarts")
        return found + [f"{name.replace('_', ' ')}: none happened" for name in events if not getattr(self, name)]


def final_weights(trial: Trial) -> str:
    """The hash of a completed trial's weights, as its worker wrote it at the end.

    Raises:
        NotFoundError: The completing attempt left no ``final.json``.
    """
    for attempt in reversed(trial.attempts):
        if attempt.dir is not None and attempt.outcome is Outcome.COMPLETED:
            path = Path(attempt.dir) / "final.json"
            if path.exists():
                return str(json.loads(path.read_text())["weights"])
    raise NotFoundError(f"{trial.name} has no final.json", hint=f"Look at its output: overnight logs {trial.name}")


def utilization(trials: Sequence[Trial], num_devices: int) -> float:
    """Busy share of ``num_devices`` between the first start and the last end of any attempt."""
    spans = [
        (attempt.created_at, attempt.ended_at, len(attempt.devices))
        for trial in trials
        for attempt in trial.attempts
        if attempt.ended_at is not None
    ]
    if not spans or not num_devices:
        return 0.0
    busy = sum((end - start).total_seconds() * devices for start, end, devices in spans)
    whole = (max(end for _, end, _ in spans) - min(start for start, _, _ in spans)).total_seconds()
    return busy / (whole * num_devices) if whole > 0 else 0.0


def collect(
    trials: Sequence[Trial],
    interrupted: Trial | None,
    rerun: Trial | None,
    devices: Sequence[Device],
    events: Sequence[Event],
    seconds: float,
) -> Facts:
    """Computes every figure from trials with their attempts, events, and the sample records on disk.

    Args:
        trials: The sweep's trials and the urgent one, with attempts.
        interrupted: The trial that was interrupted and completed; ``rerun`` is its undisturbed twin.
        events: All events of the home.
        seconds: Duration of the demo.
    """
    completed = [trial for trial in trials if trial.state is TrialState.COMPLETED]
    audits = [audit(Path(trial.dir)) for trial in completed if trial.dir is not None]
    winner = max((t for t in completed if t.value is not None), key=lambda t: t.value or 0.0, default=None)
    return Facts(
        trials_completed=len(completed),
        trials_failed=sum(trial.state is TrialState.FAILED for trial in trials),
        best=Best(winner.name, winner.params, winner.value) if winner and winner.value is not None else None,
        device_faults=sum(e.kind == "device.state" and e.after == DeviceState.QUARANTINED for e in events),
        preemptions=sum(trial.preemptions for trial in trials),
        server_restarts=max(0, sum(e.kind == "server" and e.after == "started" for e in events) - 1),
        samples_expected=sum(a.expected for a in audits),
        samples_recorded=sum(a.recorded for a in audits),
        samples_repeated=sum(a.repeated for a in audits),
        samples_skipped=sum(a.skipped for a in audits),
        undisturbed_match=(
            interrupted is not None and rerun is not None and final_weights(interrupted) == final_weights(rerun)
        ),
        utilization=round(utilization(trials, len(devices)), 4),
        seconds=round(seconds, 1),
    )
