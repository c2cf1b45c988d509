"""What supervisors spool becomes rows, once and in order, whatever is sent twice.

The data of an event comes from the user's interpreter. One that makes no sense is put on record and passed over: it
would be sent again for ever, and everything behind it would wait.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import TrialState
from overnight.core.errors import NotFoundError, StaleAttemptError
from overnight.core.models.api import Checkpoint
from overnight.core.models.node import SpoolEvent
from overnight.core.models.spec import TrialConfig
from overnight.store import attempts, checkpoints, ledger, lineages, metrics, models, outbox, transitions
from overnight.store import events as event_rows
from overnight.store.events import NewEvent
from overnight.store.models import storable
from overnight.store.writer import touch

_ATTEMPTS = models.attempts
_TRIALS = models.trials
_MAX_STEP = 2**62
_OPEN = (
    sa.select(_ATTEMPTS, _TRIALS.c.attempts_made, _TRIALS.c.name, _TRIALS.c.config)
    .join(_TRIALS, _TRIALS.c.id == _ATTEMPTS.c.trial_id)
    .where(_ATTEMPTS.c.id == sa.bindparam("which"))
    .with_for_update()
)
_STATE = sa.select(_TRIALS.c.state).where(_TRIALS.c.id == sa.bindparam("which"))
_UPDATE_ATTEMPT = sa.update(_ATTEMPTS).where(_ATTEMPTS.c.id == sa.bindparam("which"))
_UPDATE_TRIAL = sa.update(_TRIALS).where(_TRIALS.c.id == sa.bindparam("which"))


def ingest(conn: sa.Connection, attempt_id: str, generation: int, events: Sequence[SpoolEvent], now: datetime) -> int:
    """Applies new events in order and returns the highest contiguous sequence that is now durable.

    ``started`` moves the trial STARTING -> RUNNING; ``exit`` is kept for ``attempts.exit_report`` and ends nothing:
    the caller decides the outcome and calls ``attempts.end`` in the same write.

    Args:
        conn: Of a store write.
        attempt_id: The attempt.
        generation: The supervisor's current one.
        events: In any order; what is known already is passed over, what comes after a gap waits.
        now: Wall time, for the record.

    Raises:
        NotFoundError: No such attempt.
        StaleAttemptError: The attempt has ended, is not its trial's current one, or ``generation`` is over; unless
            all of ``events`` are known already, whose answer may have been lost.
    """
    row = _open(conn, attempt_id)
    new = _contiguous(events, row.acked)
    if events and all(event.seq <= row.acked for event in events):
        return int(row.acked)
    if row.ended_at is not None or row.number != row.attempts_made or generation < row.generation:
        raise StaleAttemptError(
            f"attempt {row.number} generation {generation} of {row.name} is not the current one",
            hint="It must stop: another attempt may own the trial.",
            attempt=attempt_id,
        )
    if not new:
        return int(row.acked)
    batch = _Batch(conn, row, now)
    for event in new:
        batch.apply(event)
    batch.flush()
    acked = new[-1].seq
    conn.execute(_UPDATE_ATTEMPT, {"which": attempt_id, "acked": acked})
    touch(conn, f"attempt:{attempt_id}")
    return acked


def _open(conn: sa.Connection, attempt_id: str) -> sa.Row[Any]:
    row = conn.execute(_OPEN, {"which": storable(attempt_id)}).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no attempt {attempt_id[:200]!r}")
    return row


def _contiguous(events: Sequence[SpoolEvent], acked: int) -> list[SpoolEvent]:
    found: list[SpoolEvent] = []
    for event in sorted(events, key=lambda event: event.seq):
        if event.seq == acked + len(found) + 1:
            found.append(event)
    return found


class _Batch:
    """The events of one post: small ones are applied at once, rows are gathered and written together."""

    def __init__(self, conn: sa.Connection, attempt: sa.Row[Any], now: datetime) -> None:
        self._conn = conn
        self._attempt = attempt
        self._now = now
        self._trial_changes: dict[str, Any] = {}
        self._rows: dict[int, list[metrics.Row]] = defaultdict(list)
        self._outbox: list[tuple[str, str, dict[str, Any]]] = []
        self._has_forked = False

    def apply(self, event: SpoolEvent) -> None:
        """Applies one event, or records why it cannot be."""
        try:
            getattr(self, f"_apply_{event.kind}")(event, event.data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"a {event.kind} event makes no sense: {type(error).__name__}: {error}"
            self._record("spool.refused", why[:1_000], seq=event.seq)

    def _record(self, kind: str, cause: str, **data: Any) -> None:
        attempt = self._attempt
        event = NewEvent(kind, attempt.name, "node", cause, attempt.trial_id, attempt.id, data=data)
        event_rows.append(self._conn, self._now, event)

    def _apply_started(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        attempt = self._attempt
        self._start_generation(event.generation, data)
        if attempt.started_at is None:
            self._conn.execute(_UPDATE_ATTEMPT, {"which": attempt.id, "started_at": self._now})
        state = self._conn.scalar(_STATE, {"which": attempt.trial_id})
        if state == TrialState.STARTING.value:
            transitions.transition(
                self._conn,
                trial_id=attempt.trial_id,
                expected={TrialState.STARTING},
                after=TrialState.RUNNING,
                attempt=attempt.number,
                actor="node",
                cause="its ranks are started",
                now=self._now,
                attempt_id=attempt.id,
            )

    def _apply_generation(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        generation = _whole(data.get("generation", event.generation))
        self._start_generation(generation, data)
        if data.get("cause"):
            self._record("attempt.restarted", str(data["cause"])[:1_000], generation=generation)

    def _apply_hang(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        stacks = str(data["stacks"])[:4096]
        self._record("attempt.hung", str(data["cause"])[:1_000], generation=event.generation, stacks=stacks)

    def _start_generation(self, generation: int, data: dict[str, Any]) -> None:
        fork_step = data.get("fork_step")
        attempts.advance_generation(
            self._conn,
            attempt_id=self._attempt.id,
            generation=generation,
            fork_step=None if fork_step is None else _whole(fork_step),
            now=self._now,
            parent=_parent(data),
        )
        self._has_forked = True
        if data.get("trainer"):
            self._trial_changes["tracked"] = True

    def _apply_progress(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        step, phase = data.get("step"), data.get("phase")
        if step is not None:
            self._trial_changes["step"] = _whole(step)
        self._trial_changes["phase"] = None if phase is None else storable(str(phase), 64)
        if data.get("trainer"):
            self._trial_changes["tracked"] = True

    def _apply_metrics(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        rows = [(str(key), _whole(step), value, _seconds(time)) for key, step, value, time in data["rows"]]
        self._rows[event.generation] += rows

    def _apply_report(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        step = _whole(data["step"])
        values = data["values"].items()
        self._rows[event.generation] += [(str(key), step, value, _seconds(event.at)) for key, value in values]

    def _apply_checkpoint(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        checkpoint = Checkpoint(
            trial_id=self._attempt.trial_id,
            attempt=self._attempt.number,
            generation=_whole(data.get("generation", event.generation)),
            step=_whole(data["step"]),
            uri=str(data["uri"]),
            bytes=_whole(data["bytes"]),
            committed_at=self._now,
        )
        self._trial_changes["tracked"] = True
        if checkpoints.add(self._conn, self._now, checkpoint):
            self._trial_changes["retries_used"] = 0
        touch(self._conn, "checkpoints")

    def _apply_ledger(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        seconds = {str(name): _seconds(amount) for name, amount in (data.get("seconds") or {}).items()}
        counts = {str(name): _seconds(amount) for name, amount in (data.get("counts") or {}).items()}
        ledger.add(self._conn, self._attempt.id, seconds, counts)

    def _apply_mlflow(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        for kind in ("params", "tags"):
            values = {str(name): str(value) for name, value in (data.get(kind) or {}).items()}
            if values:
                self._outbox.append((self._attempt.trial_id, kind, {"attempt": self._attempt.number, "values": values}))

    def _apply_exit(self, event: SpoolEvent, data: dict[str, Any]) -> None:
        report = _plain(data)
        self._conn.execute(_UPDATE_ATTEMPT, {"which": self._attempt.id, "exit": report})

    def flush(self) -> None:
        """Writes what was gathered, and the objective if it may have changed."""
        attempt = self._attempt
        for generation, rows in self._rows.items():
            metrics.append(self._conn, attempt.trial_id, attempt.number, generation, rows)
            told = [[key, step, _told(value), time] for key, step, value, time in rows]
            data = {"attempt": attempt.number, "generation": generation, "rows": told}
            self._outbox.append((attempt.trial_id, "metrics", data))
        outbox.add(self._conn, self._now, self._outbox)
        objective = TrialConfig.model_validate(attempt.config).objective
        if objective is not None and (self._has_forked or self._has_reported(objective.metric)):
            self._trial_changes["value"] = metrics.reduce(self._conn, attempt.trial_id, objective).value
        if self._trial_changes:
            self._conn.execute(_UPDATE_TRIAL, {"which": attempt.trial_id, **self._trial_changes})
            touch(self._conn, "trials", f"trial:{attempt.trial_id}")

    def _has_reported(self, metric: str) -> bool:
        return any(row[0] == metric for rows in self._rows.values() for row in rows)


def _parent(data: dict[str, Any]) -> lineages.Parent | None:
    """Whose checkpoint was restored; trainers that do not tell leave it out, one that restored none says null."""
    if "parent" not in data:
        return None
    attempt, generation = data["parent"] or lineages.SCRATCH
    return _small(attempt), _small(generation)


def _small(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 2**31:
        raise ValueError(f"{number} is not the number of an attempt or a generation")
    return number


def _whole(value: Any) -> int:
    number = int(value)
    if abs(number) > _MAX_STEP:
        raise ValueError(f"{number} is beyond 62 bits")
    return number


def _seconds(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _told(value: Any) -> float | str:
    number, text = metrics.split_value(value)
    return number if number is not None else text or ""


def _plain(value: Any) -> Any:
    """JSON without NaN and infinities, which the exit report of a numeric program may well hold."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
