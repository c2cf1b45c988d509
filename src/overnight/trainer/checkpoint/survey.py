"""What is in a checkpoint place, and what each checkpoint is good for: the mark of mark and sweep."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from overnight.core.errors import BadInputError, CorruptCheckpointError
from overnight.trainer.checkpoint.fence import read_fences
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token
from overnight.trainer.checkpoint.reading.finding import why_foreign
from overnight.trainer.checkpoint.reading.lineage import lineage
from overnight.trainer.checkpoint.reading.source import open_source
from overnight.trainer.checkpoint.reading.verification import manifest_of, verify
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.summary import Summary, summarize


class Role(StrEnum):
    """What a checkpoint is to the next start of its trial."""

    NEWEST = "newest"
    LINEAGE = "lineage"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class Row:
    """One checkpoint of a place.

    Attributes:
        summary: What its manifest says.
        num_bytes: In its own folder, as it lies there.
        role: ``newest`` of the lineage, further back in it, or hidden by a later start that went on from before it.
        reason: Why it stays, by the run's rules or since it is foreign to the trial; empty if it does not.
        is_best: It is among the best by the metric that the run's rules name.
        pinned_by: Who reads it just now, empty if nobody does.
    """

    summary: Summary
    num_bytes: int
    role: Role
    reason: str
    is_best: bool
    pinned_by: str

    @property
    def name(self) -> CheckpointName:
        """Its name."""
        return self.summary.name

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        summary = self.summary
        return {
            "name": str(self.name),
            "step": self.name.step,
            "attempt": self.name.token.attempt,
            "generation": self.name.token.generation,
            "bytes": self.num_bytes,
            "role": self.role.value,
            "kept_as": self.reason,
            "best": self.is_best,
            "pinned_by": self.pinned_by,
            "readable": summary.readable,
            "created_at": summary.created_at,
            "kind": summary.kind,
            "world_size": summary.world_size,
            "metrics": dict(summary.metrics),
        }


@dataclass(frozen=True)
class Survey:
    """A place at one moment.

    Attributes:
        place: The place.
        seen: What it was when it was looked at.
        tokens: Who had started by then.
        line: Checkpoints from which a new start may go on, best first.
        rows: All checkpoints, oldest first.
        base_bytes: Bytes by name of the folders with frozen tensors.
    """

    place: Place
    seen: Place
    tokens: tuple[Token, ...]
    line: tuple[CheckpointName, ...]
    rows: tuple[Row, ...]
    base_bytes: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Of all checkpoints and what they share."""
        return sum(row.num_bytes for row in self.rows) + sum(self.base_bytes.values())

    def last_good(self) -> CheckpointName | None:
        """The checkpoint that a new start would restore, every byte verified; None if there is none.

        Raises:
            UnavailableError: A remote place does not answer.
        """
        for name in self.line:
            try:
                source = open_source(self.place, name)
                verify(source, manifest_of(source, name).files)
            except CorruptCheckpointError:
                continue
            return name
        return None


def survey(place: Place, watch: PinWatch | None = None, keep: int | None = None, seen: Place | None = None) -> Survey:
    """Looks at a place; reads manifests, but no data.

    Args:
        place: The place.
        watch: Knows stale pins.
        keep: How many of the newest stay, instead of what the run's own rules say.
        seen: A glance at the place that is new enough.

    Raises:
        BadInputError: ``keep`` is below 1.
        OSError: The place cannot be listed.
    """
    seen = seen or place.glance()
    tokens = tuple(seen.tokens())
    names = seen.checkpoints()
    summaries = {name: summarize(place, name) for name in names}
    fences = read_fences(seen)
    foreign = {name: why for name in names if (why := why_foreign(summaries[name], fences))}
    line = tuple(name for name in lineage(seen, foreign) if name in summaries)
    on_line = [summaries[name] for name in line]
    rules = _rules(on_line, keep)
    reasons = rules.reasons(on_line) if rules else dict.fromkeys(line, "of the lineage")
    reasons = {**reasons, **foreign}
    best = rules.best_of(on_line) if rules else []
    pinned = (watch or PinWatch()).living(seen)
    rows = [
        Row(
            summary=summaries[name],
            num_bytes=sum(seen.sizes(str(name)).values()),
            role=_role(name, line),
            reason=reasons.get(name, ""),
            is_best=summaries[name] in best,
            pinned_by=pinned.get(name, ""),
        )
        for name in names
    ]
    base_bytes = {base: sum(seen.sizes(base).values()) for base in seen.bases()}
    return Survey(place, seen, tokens, line, tuple(rows), base_bytes)


def _role(name: CheckpointName, line: tuple[CheckpointName, ...]) -> Role:
    if name not in line:
        return Role.HIDDEN
    return Role.NEWEST if name == line[0] else Role.LINEAGE


def _rules(line: list[Summary], keep: int | None) -> Retention | None:
    """The rules of the run, as its newest checkpoint tells them; None if they are not known."""
    known = next((summary.retention for summary in line if summary.retention), None)
    rules = None
    if known is not None:
        with contextlib.suppress(BadInputError, TypeError):  # rules of a later version
            rules = Retention.from_json(known)
    if keep is None:
        return rules
    return replace(rules, keep=keep) if rules else Retention(keep)
