"""Which checkpoints go when an experiment's are too many: pure choice, no I/O."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Victim:
    """A checkpoint that could go.

    Attributes:
        trial_id: Whose.
        entry: Its name in the trial's place.
        num_bytes: What that frees.
    """

    trial_id: str
    entry: str
    num_bytes: int


def victims(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], at_rest: Collection[str], excess_bytes: int
) -> list[Victim]:
    """Enough checkpoints to free ``excess_bytes``, or all that may go: the oldest first, the best by a metric last.

    The newest checkpoint of a trial, what is pinned, and whatever a live trial has stay.

    Args:
        rows: Per trial id the rows of a survey, see :mod:`overnight.trainer.checkpoint.survey`.
        at_rest: Ids of trials on which nobody works.
        excess_bytes: How much is too much.
    """
    candidates = [
        (bool(row["best"]), str(row["created_at"]), trial_id, row)
        for trial_id in at_rest
        for row in rows.get(trial_id, ())
        if row["role"] != "newest" and not row["pinned_by"]
    ]
    chosen: list[Victim] = []
    for _, _, trial_id, row in sorted(candidates, key=lambda item: item[:3]):
        if excess_bytes <= 0:
            break
        chosen.append(Victim(trial_id, row["name"], row["bytes"]))
        excess_bytes -= row["bytes"]
    return chosen
