"""Trials as owners of checkpoint places: where somebody may be at work, and where certainly nobody is."""

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from overnight.core.enums import LeaseState
from overnight.core.states import LIVE_STATES
from overnight.store import models

_TRIALS, _ATTEMPTS, _LEASES = models.trials, models.attempts, models.leases
_UNCLEAN = (
    sa.exists()
    .where(_LEASES.c.attempt_id == _ATTEMPTS.c.id, _LEASES.c.state != LeaseState.CLEAN.value)
    .where(_ATTEMPTS.c.trial_id == _TRIALS.c.id)
)
_IS_LIVE = _TRIALS.c.state.in_([state.value for state in LIVE_STATES])
_OWNERS = (
    sa.select(
        _TRIALS.c.id, _TRIALS.c.name, _TRIALS.c.experiment_id, sa.not_(sa.or_(_IS_LIVE, _UNCLEAN)).label("at_rest")
    )
    .where(_TRIALS.c.attempts_made > 0)
    .order_by(_TRIALS.c.seq)
)
_OF_IDS = _OWNERS.where(_TRIALS.c.id.in_(sa.bindparam("ids", expanding=True)))
_OF_EXPERIMENT = _OWNERS.where(_TRIALS.c.experiment_id == sa.bindparam("experiment"))
_NEWEST = (
    sa.select(_TRIALS.c.experiment_id, sa.func.max(_TRIALS.c.number).label("number"))
    .group_by(_TRIALS.c.experiment_id)
    .subquery()
)
_NEWEST_CONFIGS = (
    sa.select(_TRIALS.c.experiment_id, models.experiments.c.name, _TRIALS.c.config)
    .join(_NEWEST, (_NEWEST.c.experiment_id == _TRIALS.c.experiment_id) & (_NEWEST.c.number == _TRIALS.c.number))
    .join(models.experiments, models.experiments.c.id == _TRIALS.c.experiment_id)
    .order_by(_TRIALS.c.experiment_id)
)


@dataclass(frozen=True)
class Owner:
    """A trial that has been started at least once.

    Attributes:
        trial_id, name, experiment_id: Which one.
        at_rest: No attempt is live, and every lease of it is clean: its node has said that no process is left.
    """

    trial_id: str
    name: str
    experiment_id: str
    at_rest: bool


def owners(
    conn: sa.Connection, *, trial_ids: Collection[str] | None = None, experiment_id: str | None = None
) -> list[Owner]:
    """Trials that have been started, oldest first; all, or those of some ids, or those of one experiment."""
    if trial_ids is not None:
        rows = conn.execute(_OF_IDS, {"ids": list(trial_ids)})
    elif experiment_id is not None:
        rows = conn.execute(_OF_EXPERIMENT, {"experiment": experiment_id})
    else:
        rows = conn.execute(_OWNERS)
    return [Owner(row.id, row.name, row.experiment_id, bool(row.at_rest)) for row in rows]


def quotas(conn: sa.Connection, default_bytes: int | None) -> dict[str, tuple[str, int]]:
    """Experiments whose checkpoints are limited: name and bytes by id. The spec of the newest trial decides.

    Args:
        conn: For reading.
        default_bytes: Where the spec says nothing; None is no limit.
    """
    found: dict[str, tuple[str, int]] = {}
    for row in conn.execute(_NEWEST_CONFIGS):
        quota = row.config.get("checkpoint_quota_bytes") or default_bytes
        if quota is not None:
            found[row.experiment_id] = (row.name, quota)
    return found
