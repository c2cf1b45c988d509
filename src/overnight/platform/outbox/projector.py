"""From rows of the outbox to calls of MLflow, such that the process may be killed between any two of them.

A row is removed after MLflow has taken it; what is told twice is one thing in MLflow (see
:mod:`overnight.store.tracking`). Status is never replayed: what is told is the trial's state in the snapshot that the
row was read from, so it is true.
"""

import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from overnight.core.clock import Clock
from overnight.core.enums import TrialState
from overnight.core.states import END_STATES
from overnight.platform.outbox.lineage import Verdict, has_forked, judge
from overnight.store import experiments, outbox, trials
from overnight.store.engine import Store
from overnight.store.outbox import OutboxRow
from overnight.store.projection import TrialFacts, facts
from overnight.store.tracking import (
    MetricPoint,
    RunGoneError,
    Tracker,
    TrackingAwayError,
    TrackingRefusedError,
    milliseconds,
)

log = logging.getLogger(__name__)

PAGE_ROWS = 500
PATIENCE_SECONDS = 30.0
"""How long a step of a running trial waits for the commit that covers it."""

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0

_STATUS = {
    TrialState.HELD: "SCHEDULED",
    TrialState.QUEUED: "SCHEDULED",
    TrialState.STARTING: "RUNNING",
    TrialState.RUNNING: "RUNNING",
    TrialState.YIELDING: "RUNNING",
    TrialState.STOPPING: "RUNNING",
    TrialState.COMPLETED: "FINISHED",
    TrialState.FAILED: "FAILED",
    TrialState.PRUNED: "KILLED",
    TrialState.CANCELLED: "KILLED",
}


@dataclass
class Round:
    """What one look at the outbox came to, in rows (``dropped`` in metric points)."""

    told: int = 0
    held: int = 0
    dropped: int = 0


@dataclass
class _Batch:
    """What one trial's rows of a page ask of MLflow."""

    done: list[int] = field(default_factory=list)
    points: dict[tuple[int, int], list[MetricPoint]] = field(default_factory=dict)
    params: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    status: bool = False
    held: int = 0
    dropped: int = 0


class Projector:
    """Tells MLflow what waits in the outbox.

    Args:
        store: Read in snapshots; written only to remove what was told and to record MLflow's ids.
        tracker: MLflow.
        clock: For the patience.
        patience_seconds: See :data:`PATIENCE_SECONDS`.
    """

    def __init__(
        self, store: Store, tracker: Tracker, clock: Clock, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._store = store
        self._tracker = tracker
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._experiments: dict[str, str] = {}
        self._told: dict[tuple[str, str], dict[int, float]] = {}
        self._told_for: dict[str, tuple[int, int]] = {}
        self._last_status: dict[str, tuple[str, int]] = {}
        self._postponed: dict[str, tuple[float, float]] = {}

    def round(self) -> Round:
        """Goes once through everything that waits.

        Raises:
            TrackingAwayError: MLflow does not answer; what it has taken so far is settled.
            StoreBusyError: The store does not answer.
        """
        total = Round()
        after = 0
        while True:
            with self._store.read() as conn:
                rows = outbox.pending(conn, PAGE_ROWS, after)
                known = facts(conn, {row.trial_id for row in rows})
            if not rows:
                return total
            after = rows[-1].seq
            self._page(rows, known, total)

    def _page(self, rows: Sequence[OutboxRow], known: dict[str, TrialFacts], total: Round) -> None:
        by_trial: dict[str, list[OutboxRow]] = {}
        for row in rows:
            by_trial.setdefault(row.trial_id, []).append(row)
        done: list[int] = []
        try:
            for trial_id, own in by_trial.items():
                batch = self._attended(known[trial_id], own)
                done += batch.done
                total.held += batch.held
                total.dropped += batch.dropped
        finally:
            if done:
                total.told += self._store.write(lambda conn: outbox.remove(conn, done))

    def _attended(self, trial: TrialFacts, rows: Sequence[OutboxRow]) -> _Batch:
        """One trial's rows; when MLflow fails on them and answers otherwise, they wait and the others go on."""
        pause, until = self._postponed.get(trial.id, (0.0, 0.0))
        if self._clock.monotonic() < until:
            return _Batch(held=len(rows))
        try:
            batch = self._trial(trial, rows)
        except TrackingAwayError as error:
            if not self._tracker.answers():
                raise
            pause = min(max(FIRST_PAUSE_SECONDS, 2 * pause), MAX_PAUSE_SECONDS)
            log.error("%s: MLflow fails, trying again in %g s: %s", trial.name, pause, error.message)
            self._postponed[trial.id] = (pause, self._clock.monotonic() + pause)
            return _Batch(held=len(rows))
        self._postponed.pop(trial.id, None)
        return batch

    def _trial(self, trial: TrialFacts, rows: Sequence[OutboxRow]) -> _Batch:
        batch = self._sort(trial, rows)
        if not batch.done:
            return batch
        try:
            self._tell(trial, self._run(trial), batch)
        except RunGoneError as error:
            log.warning("%s: %s; a new run takes its place", trial.name, error.message)
            self._forget(trial)
            self._experiments.pop(trial.experiment_id, None)
            batch.status = True
            self._tell_or_drop(trial, batch)
        except TrackingRefusedError as error:
            log.error("%s: MLflow refuses, dropped: %s", trial.name, error.message)
        return batch

    def _tell_or_drop(self, trial: TrialFacts, batch: _Batch) -> None:
        try:
            self._tell(trial, self._run(trial, known=False), batch)
        except TrackingRefusedError as error:
            log.error("%s: MLflow refuses, dropped: %s", trial.name, error.message)

    def _sort(self, trial: TrialFacts, rows: Iterable[OutboxRow]) -> _Batch:
        batch = _Batch()
        for row in rows:
            match row.kind:
                case "metrics" if not self._sort_metrics(trial, row, batch):
                    batch.held += 1
                    continue
                case "params":
                    batch.params.append((row.data["attempt"], row.data["values"]))
                case "tags":
                    batch.tags |= row.data["values"]
                case "run" | "status":
                    batch.status = True
            batch.done.append(row.seq)
        return batch

    def _sort_metrics(self, trial: TrialFacts, row: OutboxRow, batch: _Batch) -> bool:
        """Whether the row is settled; its points that count are then in the batch."""
        token = (row.data["attempt"], row.data["generation"])
        age_seconds = (self._clock.now() - row.created_at).total_seconds()
        patient = 0 <= age_seconds < self._patience_seconds
        verdicts = [judge(trial, *token, point[1], patient=patient) for point in row.data["rows"]]
        if Verdict.HOLD in verdicts:
            return False
        kept = [p for p, verdict in zip(row.data["rows"], verdicts, strict=True) if verdict is Verdict.TELL]
        batch.dropped += len(verdicts) - len(kept)
        batch.points.setdefault(token, []).extend(
            (key, number, milliseconds(time), step)
            for key, step, value, time in kept
            if (number := _number(value)) is not None
        )
        return True

    def _tell(self, trial: TrialFacts, run_id: str, batch: _Batch) -> None:
        """Metrics first, status last: a run that looks finished is complete."""
        for token, points in sorted(batch.points.items()):
            self._tell_metrics(trial, run_id, token, points)
        for attempt, values in batch.params:
            other = self._tracker.log_params(run_id, values)
            batch.tags |= {f"overnight.attempt-{attempt}.param.{key}": value for key, value in other.items()}
        if batch.tags:
            self._tracker.set_tags(run_id, batch.tags)
        if batch.status:
            self._tell_status(trial, run_id)

    def _tell_metrics(self, trial: TrialFacts, run_id: str, token: tuple[int, int], points: list[MetricPoint]) -> None:
        newest = {(key, step): (key, value, ms, step) for key, value, ms, step in points}
        fresh = list(newest.values())
        if has_forked(trial, *token):
            fresh = [point for point in fresh if not self._heard(trial, run_id, token, point)]
        if fresh:
            self._tracker.log_metrics(run_id, fresh)

    def _heard(self, trial: TrialFacts, run_id: str, token: tuple[int, int], point: MetricPoint) -> bool:
        """Whether an earlier token told MLflow of this step: told once is told, the history cannot be corrected."""
        if self._told_for.get(trial.id) != token:
            self._told = {at: steps for at, steps in self._told.items() if at[0] != trial.id}
            self._told_for[trial.id] = token
        key, value, _, step = point
        if (trial.id, key) not in self._told:
            self._told[trial.id, key] = self._tracker.told(run_id, key)
        told = self._told[trial.id, key].get(step)
        if told is None:
            return False
        if told != value and not (math.isnan(told) and math.isnan(value)):
            log.warning("%s: %s at step %d is %r, MLflow keeps %r", trial.name, key, step, value, told)
            self._tracker.set_tags(run_id, {"overnight.superseded": f"{key} at step {step} and perhaps more"})
        return True

    def _tell_status(self, trial: TrialFacts, run_id: str) -> None:
        status, attempts = _STATUS[trial.state], trial.attempts_made
        known_status, known_attempts = self._last_status.get(trial.id, ("", -1))
        if attempts != known_attempts:
            self._tracker.set_tags(run_id, {"overnight.attempts": str(attempts)})
        if status != known_status:
            ended = trial.ended_at if trial.state in END_STATES else None
            self._tracker.set_status(run_id, status, milliseconds(ended.timestamp()) if ended else None)
        self._last_status[trial.id] = (status, attempts)
        if trial.state in END_STATES:
            self._tracker.set_tags(run_id, {"overnight.state": trial.state.value})
            self._forget(trial)

    def _forget(self, trial: TrialFacts) -> None:
        self._last_status.pop(trial.id, None)
        self._told_for.pop(trial.id, None)
        self._told = {at: steps for at, steps in self._told.items() if at[0] != trial.id}

    def _run(self, trial: TrialFacts, *, known: bool = True) -> str:
        if known and trial.mlflow_run_id is not None:
            return trial.mlflow_run_id
        experiment_id = self._experiment(trial)
        start_ms = milliseconds(trial.created_at.timestamp())
        run_id = self._tracker.run(experiment_id, trial.id, trial.name, start_ms, _run_tags(trial))
        self._tracker.log_params(run_id, _flat(trial.params))
        self._store.write(lambda conn: trials.set_mlflow_run(conn, trial.id, run_id))
        return run_id

    def _experiment(self, trial: TrialFacts) -> str:
        if trial.experiment_id not in self._experiments:
            found = self._tracker.experiment(trial.experiment)
            if found != trial.mlflow_experiment_id:
                self._store.write(lambda conn: experiments.set_mlflow_id(conn, trial.experiment_id, found))
            self._experiments[trial.experiment_id] = found
        return self._experiments[trial.experiment_id]


def _number(value: float | str) -> float | None:
    """The value, or None for text that is no number: MLflow has no place for it."""
    try:
        return float(value)
    except ValueError:
        return None


def _run_tags(trial: TrialFacts) -> dict[str, str]:
    config = trial.config
    tags = {
        "overnight.trial": trial.name,
        "overnight.attempts": str(trial.attempts_made),
        "overnight.sweep_id": trial.sweep_id,
        "overnight.code": config.get("code"),
        "overnight.seed": config.get("seed"),
        "overnight.run": json.dumps(config.get("run")),
        "overnight.params": json.dumps(trial.params, sort_keys=True, ensure_ascii=False),
    }
    return {name: str(value) for name, value in tags.items() if value is not None}


def _flat(params: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat
