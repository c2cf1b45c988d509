"""Trials: lookups, lists, the queue's order, and the wire form."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.enums import CLASS_ORDER, Mode, PriorityClass, TrialState
from overnight.core.errors import BadInputError, NotFoundError
from overnight.core.models.api import Leaderboard, LeaderboardRow, Page, Trial
from overnight.core.models.spec import Compute, Objective, Resume, TrialConfig
from overnight.core.states import LIVE_STATES
from overnight.store import attempts, checkpoints, experiments, models
from overnight.store.models import storable
from overnight.store.transitions import bump, cancel, hold, preempt, prune, rerun, transition, unhold
from overnight.store.writer import touch

__all__ = ["bump", "cancel", "hold", "preempt", "prune", "rerun", "transition", "unhold"]

_TABLE = models.trials
_QUEUED = _TABLE.c.state == TrialState.QUEUED.value
_ORDER = (_TABLE.c.priority, _TABLE.c.rank.desc(), _TABLE.c.place)
_CHUNK = 500
"""Values in one IN (...): far below what any database allows."""

_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_ONE = sa.select(_TABLE).where((_TABLE.c.id == sa.bindparam("ref")) | (_TABLE.c.name == sa.bindparam("ref"))).limit(1)
_OF_IDS = sa.select(_TABLE).where(_TABLE.c.id.in_(_IDS))
_OF_REFS = sa.select(_TABLE).where(_TABLE.c.id.in_(_IDS) | _TABLE.c.name.in_(_IDS))
_SCHEDULABLE = (
    sa.select(_TABLE)
    .where(_TABLE.c.state.in_([TrialState.QUEUED.value, *(state.value for state in LIVE_STATES)]))
    .order_by(*_ORDER)
)
_SCHEDULABLE_OF_IDS = _SCHEDULABLE.where(_TABLE.c.id.in_(_IDS))
_CONFIG = sa.select(_TABLE.c.config).where(_TABLE.c.id == sa.bindparam("which"))
_UPDATE = sa.update(_TABLE).where(_TABLE.c.id == sa.bindparam("which"))
_HELD_DEVICES = (
    sa.select(models.attempts.c.trial_id, models.lease_devices.c.device_id)
    .join(models.lease_devices, models.lease_devices.c.attempt_id == models.attempts.c.id)
    .join(_TABLE, (_TABLE.c.id == models.attempts.c.trial_id) & (_TABLE.c.attempts_made == models.attempts.c.number))
    .where(models.attempts.c.trial_id.in_(_IDS), models.lease_devices.c.clean == 0)
    .order_by(models.lease_devices.c.device_id)
)


@dataclass(frozen=True)
class TrialFilter:
    """Which trials; None is all. ``experiment`` and ``sweep`` are names or ids."""

    experiment: str | None = None
    sweep: str | None = None
    states: Collection[TrialState] | None = None


@dataclass(frozen=True)
class SchedTrial:
    """What the scheduler knows of a trial: HELD ones and those in an end state are not its business.

    Attributes:
        place: FIFO order inside (priority, rank); kept by pre-empted trials.
        not_before: Backoff after an infrastructure fault, wall time.
        tracked: The trainer tracks its state: it can yield and resume even before its first commit.
        last_commit_step, last_commit_at: Of the furthest and the newest checkpoint.
    """

    id: str
    name: str
    experiment: str
    sweep_id: str | None
    state: TrialState
    priority: PriorityClass
    rank: int
    place: int
    not_before: datetime | None
    compute: Compute
    resume: Resume | None
    tracked: bool
    max_retries: int
    retries_used: int
    attempts_made: int
    preemptions: int
    step: int
    last_commit_step: int | None
    last_commit_at: datetime | None
    started_at: datetime | None


def row(conn: sa.Connection, ref: str) -> sa.Row[Any]:
    """The table row by id or name.

    Raises:
        NotFoundError: There is none.
    """
    found = conn.execute(_ONE, {"ref": storable(ref)}).one_or_none()
    if found is None:
        raise NotFoundError(f"there is no trial {ref[:200]!r}", hint="`overnight ls` shows what there is.")
    return found


def get(conn: sa.Connection, ref: str) -> Trial:
    """By id or name, with attempts, checkpoints, devices and queue position.

    Raises:
        NotFoundError: There is none.
    """
    found = row(conn, ref)
    [trial] = to_wire(conn, [found])
    extra: dict[str, Any] = {
        "attempts": tuple(attempts.of_trial(conn, trial.id)),
        "checkpoints": tuple(checkpoints.of_trial(conn, trial.id)),
        "position": _position(conn, found) if trial.state is TrialState.QUEUED else None,
    }
    return trial.model_copy(update=extra)


def _position(conn: sa.Connection, trial: sa.Row[Any]) -> int:
    same_class = _TABLE.c.priority == trial.priority
    same_rank = same_class & (_TABLE.c.rank == trial.rank)
    ahead = sa.or_(
        _TABLE.c.priority < trial.priority,
        same_class & (_TABLE.c.rank > trial.rank),
        same_rank & (_TABLE.c.place < trial.place),
    )
    return 1 + (conn.scalar(sa.select(sa.func.count()).select_from(_TABLE).where(_QUEUED & ahead)) or 0)


def find(conn: sa.Connection, refs: Sequence[str]) -> list[Trial]:
    """Several by id or name, without attempts and checkpoints, in the order of ``refs``.

    Raises:
        NotFoundError: One of them does not exist.
    """
    found: dict[str, sa.Row[Any]] = {}
    for start in range(0, len(refs), _CHUNK):
        chunk = [storable(ref) for ref in refs[start : start + _CHUNK]]
        for line in conn.execute(_OF_REFS, {"ids": chunk}):
            found[line.id] = found[line.name] = line
    missing = [ref for ref in refs if ref not in found]
    if missing:
        raise NotFoundError(f"there is no trial {missing[0][:200]!r}", hint="`overnight ls` shows what there is.")
    return to_wire(conn, [found[ref] for ref in refs])


def bare(conn: sa.Connection, ids: Collection[str]) -> dict[str, Trial]:
    """Those of the ids that exist, without attempts, checkpoints and devices."""
    return {row.id: build(row._asdict()) for row in conn.execute(_OF_IDS, {"ids": list(ids)})} if ids else {}


def page(conn: sa.Connection, filters: TrialFilter, cursor: str | None = None, limit: int = 100) -> Page:
    """Newest first, without attempts and checkpoints.

    Raises:
        NotFoundError: No such experiment.
        BadInputError: The cursor is none.
    """
    query = sa.select(_TABLE).order_by(_TABLE.c.seq.desc()).limit(limit)
    if filters.experiment is not None:
        query = query.where(_TABLE.c.experiment_id == experiments.get(conn, filters.experiment).id)
    if filters.sweep is not None:
        query = query.where(_TABLE.c.sweep_id == storable(filters.sweep))
    if filters.states is not None:
        query = query.where(_TABLE.c.state.in_([state.value for state in filters.states]))
    if cursor is not None:
        query = query.where(_TABLE.c.seq < number_of(cursor))
    found = conn.execute(query).all()
    after = str(found[-1].seq) if found and len(found) == limit else None
    return Page(items=tuple(to_wire(conn, found)), cursor=after)


def number_of(cursor: str) -> int:
    """A cursor that is a number.

    Raises:
        BadInputError: It is not.
    """
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 18:
        raise BadInputError(f"{cursor[:100]!r} is no cursor", hint="Pass on what the page before gave.")
    return int(cursor)


def to_wire(conn: sa.Connection, rows: Sequence[sa.Row[Any]]) -> list[Trial]:
    """Table rows as wire models, with the leased devices of live ones."""
    live = [found.id for found in rows if TrialState(found.state) in LIVE_STATES]
    held = _held_devices(conn, live) if live else {}
    return [build(found._asdict(), devices=held.get(found.id, ())) for found in rows]


def build(values: Mapping[str, Any], **extra: Any) -> Trial:
    """The wire model of a row's values."""
    config = values["config"]
    if not isinstance(config, TrialConfig):
        config = TrialConfig.model_validate(config)
    return Trial(
        id=values["id"],
        name=values["name"],
        number=values["number"],
        experiment=config.experiment,
        sweep_id=values["sweep_id"],
        proposal_id=values["proposal_id"],
        config=config,
        params=values["params"],
        config_hash=values["config_hash"],
        replicate=values["replicate"],
        state=TrialState(values["state"]),
        state_cause=values["state_cause"],
        priority=CLASS_ORDER[values["priority"]],
        rank=values["rank"],
        value=values.get("value"),
        step=values.get("step", 0),
        attempts_made=values.get("attempts_made", 0),
        retries_used=values.get("retries_used", 0),
        preemptions=values.get("preemptions", 0),
        mlflow_run_id=values.get("mlflow_run_id"),
        created_at=values["created_at"],
        started_at=values.get("started_at"),
        ended_at=values.get("ended_at"),
        error=values.get("error"),
        **extra,
    )


def _held_devices(conn: sa.Connection, trial_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for line in conn.execute(_HELD_DEVICES, {"ids": list(trial_ids)}):
        found[line.trial_id] += (line.device_id,)
    return found


def queue(conn: sa.Connection, limit: int = 100) -> list[Trial]:
    """QUEUED trials in the order in which they would start, with ``position``."""
    found = to_wire(conn, conn.execute(sa.select(_TABLE).where(_QUEUED).order_by(*_ORDER).limit(limit)).all())
    return [trial.model_copy(update={"position": place}) for place, trial in enumerate(found, start=1)]


def schedulable(conn: sa.Connection, trial_ids: Collection[str] | None = None) -> list[SchedTrial]:
    """QUEUED and live trials in queue order (all, or those of ``trial_ids`` which still are)."""
    if trial_ids is None:
        found = conn.execute(_SCHEDULABLE).all()
    else:
        found = conn.execute(_SCHEDULABLE_OF_IDS, {"ids": list(trial_ids)}).all()
    commits = checkpoints.newest(conn, [line.id for line in found if line.attempts_made])
    return [_sched(line, commits.get(line.id)) for line in found]


def _sched(line: sa.Row[Any], commit: checkpoints.Newest | None) -> SchedTrial:
    config = TrialConfig.model_validate(line.config)
    return SchedTrial(
        id=line.id,
        name=line.name,
        experiment=config.experiment,
        sweep_id=line.sweep_id,
        state=TrialState(line.state),
        priority=CLASS_ORDER[line.priority],
        rank=line.rank,
        place=line.place,
        not_before=line.not_before,
        compute=config.compute,
        resume=config.resume,
        tracked=line.tracked,
        max_retries=config.max_retries,
        retries_used=line.retries_used,
        attempts_made=line.attempts_made,
        preemptions=line.preemptions,
        step=line.step,
        last_commit_step=None if commit is None else commit.step,
        last_commit_at=None if commit is None else commit.committed_at,
        started_at=line.started_at,
    )


def counts(
    conn: sa.Connection, *, experiment_id: str | None = None, sweep_id: str | None = None
) -> dict[TrialState, int]:
    """Trials by state; states without trials are left out."""
    query = sa.select(_TABLE.c.state, sa.func.count().label("num")).group_by(_TABLE.c.state)
    if experiment_id is not None:
        query = query.where(_TABLE.c.experiment_id == experiment_id)
    if sweep_id is not None:
        query = query.where(_TABLE.c.sweep_id == sweep_id)
    return {TrialState(line.state): line.num for line in conn.execute(query)}


def leaderboard(conn: sa.Connection, experiment_ref: str, limit: int = 20, now: datetime | None = None) -> Leaderboard:
    """Trials with a value, best first by the experiment's mode.

    Args:
        conn: Of a read.
        experiment_ref: Name or id.
        limit: Most rows.
        now: Until when attempts count that still run; None leaves them out of ``seconds``.

    Raises:
        NotFoundError: No such experiment.
    """
    experiment = experiments.get(conn, experiment_ref)
    asked = experiment.objective
    if asked is None:
        return Leaderboard(experiment=experiment.name, metric=None, mode=None, rows=())
    order = _TABLE.c.value.asc() if asked.mode is Mode.MIN else _TABLE.c.value.desc()
    query = sa.select(_TABLE).where(_TABLE.c.experiment_id == experiment.id, _TABLE.c.value.is_not(None))
    found = conn.execute(query.order_by(order, _TABLE.c.seq).limit(limit)).all()
    seconds = attempts.seconds_of_trials(conn, [line.id for line in found], now)
    rows = tuple(
        LeaderboardRow(
            place=place,
            trial=line.name,
            trial_id=line.id,
            state=TrialState(line.state),
            value=line.value,
            step=line.step,
            params=line.params,
            seconds=seconds.get(line.id, 0.0),
        )
        for place, line in enumerate(found, start=1)
    )
    return Leaderboard(experiment=experiment.name, metric=asked.metric, mode=asked.mode, rows=rows)


def objective(conn: sa.Connection, trial_id: str) -> Objective | None:
    """What the trial's config asks for."""
    config = conn.scalar(_CONFIG, {"which": trial_id})
    return TrialConfig.model_validate(config).objective if config is not None else None


def set_mlflow_run(conn: sa.Connection, trial_id: str, run_id: str) -> None:
    """Records the trial's MLflow run."""
    _set(conn, trial_id, mlflow_run_id=run_id)


def set_progress(conn: sa.Connection, trial_id: str, step: int, phase: str | None = None) -> None:
    """The newest step heard of."""
    _set(conn, trial_id, step=step, phase=None if phase is None else storable(phase, 64))


def set_value(conn: sa.Connection, trial_id: str, value: float | None) -> None:
    """The objective so far."""
    _set(conn, trial_id, value=value)


def _set(conn: sa.Connection, trial_id: str, **values: Any) -> None:
    conn.execute(_UPDATE, {"which": trial_id, **values})
    touch(conn, "trials", f"trial:{trial_id}")
