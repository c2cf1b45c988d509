"""The digest of an experiment: what a planner needs to decide what to try next, however many trials there are."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overnight.core.enums import TrialState
from overnight.core.models.api import Trial
from overnight.core.states import END_STATES, LIVE_STATES
from overnight.store import events, experiments, trials
from overnight.store.trials import TrialFilter

if TYPE_CHECKING:
    from overnight.store.engine import Connection

NUM_BEST = 10
NUM_RECENT = 20
NUM_FAILED = 200
NUM_CAUSES = 10
CAUSE_LENGTH = 200


def digest_of(conn: "Connection", ref: str) -> dict[str, Any]:
    """The digest as JSON-able data.

    ``seq`` is the number of the newest event that it includes: ``GET /v1/events?after=seq&wait=20`` says when there is
    more to read.

    Raises:
        NotFoundError: No such experiment.
    """
    seq = events.last_seq(conn)
    row = experiments.get(conn, ref)
    wire = experiments.to_wire(conn, row)
    board = trials.leaderboard(conn, row.id, NUM_BEST)
    recent = _page(conn, row.id, END_STATES, NUM_RECENT)
    running = _page(conn, row.id, LIVE_STATES, NUM_RECENT)
    failed = _page(conn, row.id, {TrialState.FAILED}, NUM_FAILED)
    return {
        "experiment": row.name,
        "experiment_id": row.id,
        "description": row.description[:1_000],
        "objective": row.objective.model_dump(mode="json") if row.objective else None,
        "trials_by_state": {state.value: count for state, count in wire.trials_by_state.items()},
        "best": [line.model_dump(mode="json") for line in board.rows],
        "recent": [_brief(trial) for trial in recent],
        "running": [_brief(trial) for trial in running],
        "failures": _causes(failed),
        "seq": seq,
    }


def _page(conn: "Connection", experiment: str, states: Any, limit: int) -> Sequence[Trial]:
    return trials.page(conn, TrialFilter(experiment=experiment, states=states), limit=limit).items


def _brief(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.name,
        "state": trial.state.value,
        "params": trial.params,
        "value": trial.value,
        "step": trial.step,
        "cause": trial.state_cause[:CAUSE_LENGTH],
    }


def _causes(failed: Sequence[Trial]) -> list[dict[str, Any]]:
    """The commonest causes of the newest failures, each with one trial to look at."""
    counts = Counter(trial.state_cause[:CAUSE_LENGTH] for trial in failed)
    example = {trial.state_cause[:CAUSE_LENGTH]: trial.name for trial in failed}
    return [
        {"cause": cause, "trials": count, "example": example[cause]} for cause, count in counts.most_common(NUM_CAUSES)
    ]
