"""Which checkpoints stay: the newest, the best by a metric, one every so many steps, and whatever is pinned.

An attempt deletes only what it wrote itself. What is left of others is for whoever knows that nobody works on the trial
any more, see :mod:`overnight.trainer.checkpoint.sweep`; that is the run itself if no server knows of it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from overnight.core.errors import BadInputError
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import CheckpointName, Place
from overnight.trainer.checkpoint.summary import Summary, summarize
from overnight.trainer.checkpoint.trash import discard

_HINT = 'Like keep=2, keep_every=10_000, keep_best=("val_accuracy", "max", 3).'


@dataclass(frozen=True)
class Retention:
    """Which of a run's checkpoints stay.

    Attributes:
        keep: The newest so many, at least 1.
        keep_every: Also the first one at or after each multiple of so many updates, for good; None for none.
        best: Also the ``n`` best by a metric that the script reports: ``(metric, "min" or "max", n)``. Of checkpoints
            with the same value the one right after the report counts, since later weights were not measured.

    Raises:
        BadInputError: A number below 1, or ``best`` of another form.
    """

    keep: int = 2
    keep_every: int | None = None
    best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.keep):
            raise BadInputError(f"keep={self.keep!r} is no number of checkpoints", hint=_HINT)
        if self.keep_every is not None and not _is_count(self.keep_every):
            raise BadInputError(f"keep_every={self.keep_every!r} is no number of updates", hint=_HINT)
        if self.best is not None and not _is_best(self.best):
            raise BadInputError(f"keep_best={self.best!r} is not (metric, 'min' or 'max', number)", hint=_HINT)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"keep": self.keep, "keep_every": self.keep_every, "best": list(self.best) if self.best else None}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Retention":
        """The inverse of :meth:`to_json`.

        Raises:
            BadInputError: It is none.
        """
        best = body.get("best")
        return cls(body.get("keep", 2), body.get("keep_every"), tuple(best) if best is not None else None)

    def reasons(self, found: Iterable[Summary]) -> dict[CheckpointName, str]:
        """Which of some checkpoints of one lineage stay, and why.

        Args:
            found: The checkpoints, in any order.
        """
        summaries = sorted(found, key=lambda summary: summary.name)
        reasons: dict[CheckpointName, str] = {}
        for summary in summaries[-self.keep :]:
            reasons[summary.name] = f"newest {self.keep}"
        for place, summary in enumerate(self.best_of(summaries), 1):
            assert self.best is not None
            metric = self.best[0]
            reasons.setdefault(summary.name, f"best {place} by {metric} ({summary.metrics[metric]:g})")
        for step, name in self._milestones(summary.name for summary in summaries).items():
            reasons.setdefault(name, f"first from step {step} on")
        return reasons

    def _milestones(self, names: Iterable[CheckpointName]) -> dict[int, CheckpointName]:
        """The first checkpoint at or after each multiple of ``keep_every``, by that multiple."""
        first: dict[int, CheckpointName] = {}
        if self.keep_every is None:
            return first
        for name in names:
            multiple = name.step - name.step % self.keep_every
            if multiple > 0:
                first[multiple] = min(name, first.get(multiple, name), key=lambda one: (one.step, one.token, one.save))
        return first

    def best_of(self, found: Iterable[Summary]) -> list[Summary]:
        """The best checkpoints by the metric, best first; empty if the rules name none."""
        if self.best is None:
            return []
        metric, mode, number = self.best
        sign = 1 if mode == "min" else -1
        measured: dict[float, Summary] = {}
        for summary in sorted(found, key=lambda summary: summary.name):
            value = summary.metrics.get(metric, math.nan)
            if math.isfinite(value):
                measured.setdefault(value, summary)
        ranked = sorted(measured.items(), key=lambda item: sign * item[0])
        return [summary for _, summary in ranked[:number]]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_best(best: Any) -> bool:
    if not isinstance(best, tuple) or len(best) != 3:
        return False
    metric, mode, number = best
    return isinstance(metric, str) and bool(metric) and mode in ("min", "max") and _is_count(number)


def prune(
    place: Place,
    newest: CheckpointName,
    retention: Retention,
    watch: PinWatch | None = None,
    seen: Place | None = None,
) -> list[CheckpointName]:
    """Deletes what a token wrote and needs no longer, after ``newest`` was committed and verified.

    Only the token's own checkpoints are looked at, and its unfinished folders of earlier saves. ``newest`` stays, as
    does all that is pinned. What was copied in or renamed is left alone, and takes no own checkpoint's place.

    Args:
        place: The place.
        newest: What has just been committed: the last good one.
        retention: What stays.
        watch: Knows stale pins; without, pins from other machines all count as living.
        seen: A glance at the place since ``newest`` was committed; it is told of what goes.

    Returns:
        The deleted checkpoints.

    Raises:
        OSError: The file system refuses to delete.
    """
    watch, seen = watch or PinWatch(), seen or place.glance()
    own = [name for name in seen.checkpoints() if name.token == newest.token]
    if newest not in own:
        return []  # it was taken away: whatever else is there may be the last good one
    known = _genuine([summarize(place, name) for name in own], newest)
    staying = retention.reasons(known).keys() | watch.living(seen).keys()
    doomed = [summary.name for summary in known if summary.name not in staying and summary.name != newest]
    deleted = [name for name in doomed if discard(place, str(name), partial(_is_pinned, place, name, watch))]
    left = [entry for entry, name in seen.unfinished().items() if name and name.token == newest.token and name < newest]
    for entry in left:
        discard(place, entry)
    for entry in (*map(str, deleted), *left):
        seen.gone(entry)
    return deleted


def _genuine(found: Iterable[Summary], newest: CheckpointName) -> list[Summary]:
    """Those of a token's checkpoints that it wrote itself, here and under this name, as far as can be told."""
    summaries = list(found)
    identity = next((summary.place for summary in summaries if summary.name == newest), "")
    places = {"", identity} if identity else {summary.place for summary in summaries}
    return [summary for summary in summaries if not summary.is_renamed and summary.place in places]


def _is_pinned(place: Place, name: CheckpointName, watch: PinWatch) -> bool:
    return name in watch.living(place)
