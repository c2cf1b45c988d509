"""Which checkpoint a run goes on from: the newest good one of the newest lineage, and what was passed over on the way.

Only what a manifest vouches for exists. A place that holds checkpoints of which none can be used is an error, never
step 0; a store that does not answer is an error too, never a reason to take an older checkpoint.
"""

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from overnight.core.errors import CorruptCheckpointError, NoUsableCheckpointError, OvernightError, from_dict
from overnight.core.text import sanitize
from overnight.trainer.checkpoint.fence import Fence, is_foreign, read_fences
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token, open_place
from overnight.trainer.checkpoint.reading.lineage import lineage, outrun
from overnight.trainer.checkpoint.reading.source import Source, answered, open_source
from overnight.trainer.checkpoint.reading.verification import foreign_files, manifest_of, verify
from overnight.trainer.checkpoint.summary import Summary, summarize

if TYPE_CHECKING:
    from overnight.trainer.checkpoint.reading.restored import Restored

T = TypeVar("T")
Gather = Callable[[Any], Sequence[Any]]
"""Gives each rank what all of them gave, in order of rank; every rank calls it."""


def complain(text: str) -> None:
    """Tells the person who reads the run's output."""
    print(f"overnight: {sanitize(text)}", file=sys.stderr, flush=True)  # names of files may hold anything


@dataclass(frozen=True)
class Reader:
    """One of the ranks that read a checkpoint together.

    Attributes:
        rank, world_size, local_world_size: As torchrun sets them.
        gather: How they hear of each other.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    gather: Gather = lambda value: [value]


ALONE = Reader()

FOREIGN = "it belongs to another trial's checkpoints"


@dataclass(frozen=True)
class Listing:
    """What a place holds, as one rank has seen it for all.

    Attributes:
        names: Checkpoints to try, best first.
        stale: Step and complaint of what stale attempts left.
        foreign: Names of what is not ours.
        fences: By token.
    """

    names: tuple[CheckpointName, ...]
    stale: tuple[tuple[int, str], ...]
    foreign: tuple[str, ...]
    fences: Mapping[Token, Fence]


def newest_good(
    place: Place | str | Path, complaints: Callable[[str], None] = complain
) -> tuple[CheckpointName, Manifest] | None:
    """The newest usable checkpoint, every byte verified.

    Args:
        place: A place, path or URL.
        complaints: Called with one line for whatever is passed over.

    Returns:
        None when nothing was ever committed.

    Raises:
        NoUsableCheckpointError: There are checkpoints (or foreign files), but none that can be used.
        UnavailableError: A remote place does not answer.
    """
    place = place if isinstance(place, Place) else open_place(place)

    def look(name: CheckpointName, fences: Mapping[Token, Fence]) -> tuple[CheckpointName, Manifest]:
        source = open_source(place, name)
        manifest = _own_manifest(source, name, fences)
        extra = foreign_files(source, manifest)
        verify(source, manifest.files)
        _name_extra(name, extra, complaints)
        return name, manifest

    return _first_good(place, look, ALONE, complaints)


def open_newest(
    place: Place, reader: Reader = ALONE, complaints: Callable[[str], None] = complain
) -> "Restored | None":
    """The newest usable checkpoint, read and verified in one pass; all ranks call it and get the same one.

    Each rank reads what it will want and its share of the rest, so that together they have seen every byte. If any of
    them finds damage, all go on to the next checkpoint. Nothing live has been touched by then.

    Args:
        place: The place.
        reader: This rank.
        complaints: Called on rank 0 with one line for whatever is passed over.

    Returns:
        The content that this rank wants, held in memory; None when nothing was ever committed.

    Raises:
        NoUsableCheckpointError: There are checkpoints (or foreign files), but none that can be used.
        UnavailableError: A remote place does not answer.
    """
    from overnight.trainer.checkpoint.reading.restored import Restored  # torch

    def read(name: CheckpointName, fences: Mapping[Token, Fence]) -> "Restored":
        source = open_source(place, name)
        manifest = _own_manifest(source, name, fences)
        extra = foreign_files(source, manifest) if reader.rank == 0 else []
        restored = Restored(source, manifest, reader.rank, reader.local_world_size)
        restored.hold(reader.rank, reader.world_size)
        _name_extra(name, extra, complaints)
        return restored

    return _first_good(place, read, reader, complaints)


def _own_manifest(source: Source, name: CheckpointName, fences: Mapping[Token, Fence]) -> Manifest:
    """The manifest of a checkpoint that was made in the place in which it lies.

    Raises:
        CorruptCheckpointError: It was not, or has no good manifest.
    """
    manifest = manifest_of(source, name)
    if is_foreign(fences, name.token, manifest.place):
        raise CorruptCheckpointError(FOREIGN)
    return manifest


def why_foreign(summary: Summary, fences: Mapping[Token, Fence]) -> str:
    """Why a folder is none of the trial's checkpoints, whatever it is called; empty if it is one, or may be one."""
    if summary.is_renamed:
        return f"foreign: its manifest belongs to {summary.written_as}"
    return FOREIGN if is_foreign(fences, summary.name.token, summary.place) else ""


def _first_good(
    place: Place,
    look: Callable[[CheckpointName, Mapping[Token, Fence]], T],
    reader: Reader,
    complaints: Callable[[str], None],
) -> T | None:
    """Tries the checkpoints of the newest lineage in turn, on all ranks at once.

    Whatever fails, the place is looked at anew: a start that was only cut off may have published meanwhile, and deleted
    what was read.
    """
    say = complaints if reader.rank == 0 else _say_nothing
    reasons: dict[CheckpointName, str] = {}
    while True:
        own = together(reader, lambda: _list(place, reasons) if reader.rank == 0 else None)
        listing: Listing = reader.gather(own)[0]
        name = next((name for name in listing.names if name not in reasons), None)
        if name is None:
            _require_nothing(place, [f"{name}: {reason}" for name, reason in reasons.items()], listing.foreign)
            return None
        try:
            found = together(reader, functools.partial(look, name, listing.fences))
        except CorruptCheckpointError as error:
            reasons[name] = error.message
            say(f"passed over {name}: {error.message}")
            continue
        for step, line in listing.stale:
            if step > name.step:
                say(line)
        if listing.foreign:
            say(f"{place} holds other files too: {', '.join(listing.foreign[:5])}; they were left alone")
        return found


def _list(place: Place, refused: Collection[CheckpointName]) -> Listing:
    """What there is.

    Args:
        place: The place.
        refused: What could not be used. What is foreign of it hides nothing of the trial's own.

    Raises:
        UnavailableError: The place cannot be listed.
    """

    def look() -> Listing:
        fences = read_fences(place)
        without = {name for name in refused if why_foreign(summarize(place, name), fences)}
        names = tuple(lineage(place, without))
        stale = tuple((name.step, f"passed over {name}: {reason}") for name, reason in outrun(place, without))
        return Listing(names, stale, tuple(place.foreign()) if names or not fences else (), fences)

    return answered(str(place), look)


def _require_nothing(place: Place, reasons: Sequence[str], foreign: Sequence[str]) -> None:
    if reasons:
        raise NoUsableCheckpointError(
            f"{place} holds {len(reasons)} checkpoint(s) of which none can be used: {'; '.join(reasons)[:2000]}",
            hint="Repair or move that folder away to start from step 0, or pass --fresh.",
        )
    if foreign:
        raise NoUsableCheckpointError(
            f"{place} holds no checkpoint of overnight, but other files: {', '.join(foreign[:5])}",
            hint="Use an empty folder as checkpoint place.",
        )


def together(reader: Reader, action: Callable[[], T]) -> T:
    """Does something on all ranks; an error of any is raised on all of them, the lowest rank's where there are several.

    Returns:
        What it gave on this rank.
    """
    outcome: T | OvernightError
    try:
        outcome = action()
    except OvernightError as error:
        outcome = error
    own = outcome.to_dict() if isinstance(outcome, OvernightError) else None
    first = next((failure for failure in reader.gather(own) if failure is not None), None)
    if first is not None:
        raise outcome if isinstance(outcome, OvernightError) and first == own else from_dict(first)
    assert not isinstance(outcome, OvernightError)
    return outcome


def _name_extra(name: CheckpointName, extra: list[str], complaints: Callable[[str], None]) -> None:
    if extra:
        complaints(f"{name} holds files that its manifest does not list: {', '.join(extra[:5])}; they were not read")


def _say_nothing(text: str) -> None:
    pass
