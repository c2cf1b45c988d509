"""Deleting what nobody needs any more from a place on which no attempt works: the sweep of mark and sweep.

What goes: checkpoints that a later start has hidden, those that the run's own rules would not have kept, folders of
saves that never ended, interrupted deletions, stale pins, frozen tensors that no manifest mentions, and what starts
that were killed as they claimed the place have left.

What never goes: the checkpoint that a new start would restore (verified to the last byte before anything is deleted),
what is pinned, and anything at all once a new start has claimed the place.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from overnight.core.errors import ConflictError, NotFoundError
from overnight.trainer.checkpoint.abandoned import abandoned, is_passing
from overnight.trainer.checkpoint.fence import clear_claims
from overnight.trainer.checkpoint.pins import PinWatch, read_pins
from overnight.trainer.checkpoint.place import CheckpointName, Token, is_claim, settled_claims
from overnight.trainer.checkpoint.survey import Role, Survey
from overnight.trainer.checkpoint.trash import TRASH, discard


@dataclass(frozen=True)
class Deletion:
    """Something that goes, or has gone.

    Attributes:
        entry: Its name in the place.
        num_bytes: What that frees.
        cause: Why.
    """

    entry: str
    num_bytes: int
    cause: str

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"entry": self.entry, "bytes": self.num_bytes, "cause": self.cause}


def mark(
    found: Survey, *, at_rest: bool, good: CheckpointName | None = None, spared: Collection[CheckpointName] = ()
) -> list[Deletion]:
    """What can go.

    Args:
        found: The place.
        at_rest: Nobody works on it for certain. Else the newest start may still live: its unfinished folders stay, and
            so do frozen tensors, which it may be about to mention.
        good: The one that a new start would restore, from whoever has just committed it; None reads it to find out.
        spared: Checkpoints that stay whatever the rules say.
    """
    doomed = [*_checkpoints(found, good, spared), *_unfinished(found, at_rest)]
    if at_rest:
        doomed += _bases(found, {deletion.entry for deletion in doomed})
    return [*doomed, *_half_claims(found)]


def _checkpoints(found: Survey, good: CheckpointName | None, spared: Collection[CheckpointName]) -> Iterator[Deletion]:
    candidates = [row for row in found.rows if not row.pinned_by and row.role is not Role.NEWEST]
    candidates = [row for row in candidates if row.name not in spared]
    candidates = [row for row in candidates if not row.reason]
    if good is None and candidates:
        good = found.last_good()
    if good is None:
        return  # whatever is left may be somebody's last hope
    for row in candidates:
        if row.name == good:
            continue
        if row.role is Role.HIDDEN:
            yield Deletion(str(row.name), row.num_bytes, f"hidden: the trial went on from elsewhere, it is at {good}")
        elif row.name < good:
            yield Deletion(str(row.name), row.num_bytes, "not among those that the run keeps")


def _unfinished(found: Survey, at_rest: bool) -> Iterator[Deletion]:
    newest = max(found.tokens, default=Token(0, 0))
    for entry in found.seen.entries():
        if entry.startswith(TRASH):
            yield _sized(found, entry, "a deletion that was interrupted")
    for entry, name in found.seen.unfinished().items():
        if at_rest or (name is not None and name.token < newest):
            yield _sized(found, entry, "a save that never ended")


def _half_claims(found: Survey) -> Iterator[Deletion]:
    settled = settled_claims(found.seen.entries())  # go in any case
    for entry in abandoned(found.place, found.seen):
        if entry not in settled:
            yield Deletion(entry, found.seen.sizes("").get(entry, 0), "a start that never came to its fence")


def _bases(found: Survey, doomed: set[str]) -> Iterator[Deletion]:
    staying = [row for row in found.rows if str(row.name) not in doomed]
    if not all(row.summary.readable for row in staying):
        return  # what that manifest says is not known
    listed = {base for row in staying for base in row.summary.bases}
    for base, num_bytes in found.base_bytes.items():
        if base not in listed:
            yield Deletion(base, num_bytes, "frozen tensors that no checkpoint mentions")


def choose(found: Survey, entries: Iterable[str], cause: str) -> list[Deletion]:
    """Checkpoints that somebody has picked out.

    Args:
        found: The place.
        entries: Their names.
        cause: Why they shall go.

    Raises:
        NotFoundError: There is no such checkpoint.
        ConflictError: It is pinned, or the last good one.
    """
    rows = {str(row.name): row for row in found.rows}
    picked: list[Deletion] = []
    good = found.last_good()
    for entry in entries:
        row = rows.get(entry)
        if row is None:
            raise NotFoundError(f"there is no {entry} in {found.place}", hint="See: overnight checkpoints list")
        if row.pinned_by:
            raise ConflictError(f"{entry} is in use: {row.pinned_by} reads it", hint="Try again once that is over.")
        if good is None or row.name == good:
            raise ConflictError(
                f"{entry} is the last good checkpoint of {found.place}" if good else f"{found.place} has no good one",
                hint="Delete the folder by hand if you are sure that nobody wants it.",
            )
        picked.append(Deletion(entry, row.num_bytes, cause))
    return picked


def sweep(
    found: Survey, doomed: Iterable[Deletion], watch: PinWatch, told: Callable[[Deletion], None] = lambda deletion: None
) -> list[Deletion]:
    """Deletes what was marked, unless it has come to be needed since.

    Args:
        found: What :func:`mark` looked at.
        doomed: What it found.
        watch: Knows stale pins.
        told: Called after each deletion.

    Returns:
        What was deleted. It ends early when a new start claims the place: that knows better what it needs.

    Raises:
        OSError: The place refuses to delete.
    """
    place = found.place
    if read_pins(found.seen):
        watch.clear(place)
    done: list[Deletion] = []
    for deletion in doomed:
        if _has_started(found):
            break
        if deletion.entry.startswith(TRASH) or is_claim(deletion.entry) or is_passing(deletion.entry):
            place.remove(deletion.entry)
        elif not discard(place, deletion.entry, partial(_is_needed, found, deletion.entry, watch)):
            continue
        done.append(deletion)
        told(deletion)
    clear_claims(place, found.seen)
    return done


def _has_started(found: Survey) -> bool:
    """Whether there has been a new start; a claim that has gone is none."""
    return not set(found.place.tokens()) <= set(found.tokens)


def _is_needed(found: Survey, entry: str, watch: PinWatch) -> bool:
    if _has_started(found):
        return True
    name = CheckpointName.parse(entry)
    return name is not None and name in watch.living(found.place)


def _sized(found: Survey, entry: str, cause: str) -> Deletion:
    return Deletion(entry, sum(found.seen.sizes(entry).values()), cause)
