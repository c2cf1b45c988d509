"""Counts from the sample records whether a trial trained on every sample exactly once.

Several attempts may have computed the same update: one was killed after its last checkpoint, the next one forked from
that checkpoint and did the lost updates again. Only what the surviving lineage did counts, so records are cut at the
fork points that the fences name.

Nothing here needs torch, so that whoever reports on a trial can count without loading it.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overnight.trainer.checkpoint.place import CheckpointName, Place, fence_name, open_place
from overnight.trainer.data.entries import Declaration, Entry, RankRecord, Token, read_attempts

Content = tuple[int, int, int, bytes]
"""What peers have in common: step, epoch, position of the first sample, and the indices."""


@dataclass(frozen=True)
class Audit:
    """What the records of a trial say.

    Attributes:
        expected: Samples that should have been consumed: epochs x samples per epoch, as the run declared them, less
            what it left on purpose. Where it declared nothing (a run bounded by steps or seconds), every sample up to
            the furthest one recorded.
        recorded: Samples that the surviving lineage consumed, repeats included.
        repeated: How many of them were consumed before in the same epoch.
        skipped: Samples that should have been consumed and were not.
        updates: Updates of the surviving lineage.
    """

    expected: int
    recorded: int
    repeated: int
    skipped: int
    updates: int


def audit(trial_dir: Path, *, checkpoints: Place | str | Path | None = None, finished: bool = True) -> Audit:
    """Audits a trial from its records alone.

    Args:
        trial_dir: The trial's folder, with ``attempts/``.
        checkpoints: Its checkpoint place, ``<trial_dir>/checkpoints`` by default. One that is elsewhere must be said:
            without its fences nobody knows which work was done again.
        finished: Whether every declared epoch should be there. If not (a trial that was stopped, or still runs), only
            samples before the furthest one recorded can be skipped, and ``expected`` counts up to there.
    """
    records = list(read_attempts(trial_dir))
    forks = read_forks(checkpoints or trial_dir / "checkpoints")
    limits = lineage(forks, {token for record in records for token in record.tokens})
    kept = once_per_peers([entry for record in records for entry in record.entries if _is_kept(entry, limits)])
    by_loader: dict[str, list[Entry]] = defaultdict(list)
    for entry in kept:
        by_loader[entry.loader].append(entry)
    declared = _newest_declarations(records)
    for name in declared:
        by_loader.setdefault(name, [])
    endings = _kept_endings(records, limits)
    counts = [
        _count(
            entries, declared.get(name), {epoch: at for (one, epoch), at in endings.items() if one == name}, finished
        )
        for name, entries in by_loader.items()
    ]
    return Audit(
        expected=sum(count.expected for count in counts),
        recorded=sum(count.recorded for count in counts),
        repeated=sum(count.repeated for count in counts),
        skipped=sum(count.skipped for count in counts),
        updates=len({entry.step for entry in kept}),
    )


@dataclass(frozen=True)
class Fork:
    """Where a token went on from: ``parent`` is None at a fresh start, ``step`` is what it had done by then."""

    step: int
    parent: Token | None


def read_forks(checkpoints: Place | str | Path) -> dict[Token, Fork]:
    """The fork point of every token that claimed a checkpoint place. Unreadable fences are left out."""
    forks: dict[Token, Fork] = {}
    place = checkpoints if isinstance(checkpoints, Place) else open_place(checkpoints)
    for token in place.tokens():
        try:
            body = json.loads(place.read(fence_name(token)))
            parent = CheckpointName.parse(str(body.get("parent")))
            step = parent.step if parent else int(body["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        forked_from = (parent.token.attempt, parent.token.generation) if parent else None
        forks[token.attempt, token.generation] = Fork(step, forked_from)
    return forks


def lineage(forks: dict[Token, Fork], tokens: set[Token]) -> dict[Token, float]:
    """The tokens whose work survives, each with the step below which it does (infinite for the newest).

    Args:
        forks: What the fences say.
        tokens: Those that wrote a record.
    """
    limits: dict[Token, float] = {}
    token = max(tokens | set(forks), default=None)
    limit = float("inf")
    while token is not None and token not in limits:
        limits[token] = limit
        fork = forks.get(token, Fork(0, None))
        limit = min(limit, fork.step)
        # A fence that names a step but no checkpoint goes on from whatever came before it.
        older = [one for one in tokens | set(forks) if one < token] if fork.step else []
        token = fork.parent or max(older, default=None)
    return limits


def once_per_peers(entries: list[Entry]) -> list[Entry]:
    """Entries with those that peers have in common taken once; what only one of them has stays, and so do differences.

    Peers are the ranks of one start that share a data rank. One that was killed may have recorded less than another.
    """
    groups: dict[tuple[Token, str, int], dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        groups[(entry.attempt, entry.generation), entry.loader, entry.data_rank][entry.rank].append(entry)
    kept: list[Entry] = []
    for peers in groups.values():
        first, *others = peers.values()
        kept += first
        have = Counter(map(_content, first)) if others else Counter()
        for other in others:
            seen: Counter[Content] = Counter()
            for entry in other:
                content = _content(entry)
                seen[content] += 1
                if seen[content] > have[content]:
                    have[content] += 1
                    kept.append(entry)
    return kept


def _content(entry: Entry) -> Content:
    return entry.step, entry.epoch, entry.first, entry.indices.tobytes()


def _is_kept(entry: Entry, limits: dict[Token, float]) -> bool:
    return entry.step < limits.get((entry.attempt, entry.generation), 0)


def _newest_declarations(records: list[RankRecord]) -> dict[str, Declaration]:
    newest: dict[str, tuple[Token, Declaration]] = {}
    for record in records:
        for (token, name), declaration in record.declarations.items():
            if name not in newest or token >= newest[name][0]:
                newest[name] = token, declaration
    return {name: declaration for name, (_, declaration) in newest.items()}


def _kept_endings(records: list[RankRecord], limits: dict[Token, float]) -> dict[tuple[str, int], int]:
    """Where the surviving lineage left an epoch of a loader: the furthest such position per (loader, epoch)."""
    furthest: dict[tuple[str, int], int] = {}
    for record in records:
        for ending in record.endings:
            if ending.step <= limits.get(ending.token, -1):
                key = ending.loader, ending.epoch
                furthest[key] = max(furthest.get(key, 0), ending.position)
    return furthest


def _count(entries: list[Entry], declared: Declaration | None, endings: dict[int, int], finished: bool) -> Audit:
    epochs: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        epochs[entry.epoch].append(entry)
    declared = declared or Declaration(None, None, False)
    recorded, distinct, skipped, due_total = 0, 0, 0, 0
    for epoch in range(_num_epochs(epochs, declared, finished)):
        positions, indices = _consumed(epochs.get(epoch, []))
        num_distinct = len(np.unique(positions))
        if not declared.repeats:
            num_distinct = min(num_distinct, len(np.unique(indices)))
        is_whole = (finished and declared.epochs is not None) or epoch < max(epochs, default=0)
        furthest = int(positions.max()) + 1 if len(positions) else 0
        due = declared.samples_per_epoch if is_whole and declared.samples_per_epoch is not None else furthest
        if endings.get(epoch, -1) >= furthest:  # else a later attempt went on where an earlier one had left
            due = endings[epoch]
        recorded += len(positions)
        distinct += num_distinct
        due_total += due
        skipped += max(0, due - num_distinct)
    return Audit(
        expected=due_total,
        recorded=recorded,
        repeated=recorded - distinct,
        skipped=skipped,
        updates=len({entry.step for entry in entries}),
    )


def _num_epochs(epochs: dict[int, list[Entry]], declared: Declaration, finished: bool) -> int:
    seen = max(epochs, default=-1) + 1
    return max(seen, declared.epochs or 0) if finished else seen


def _consumed(entries: list[Entry]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not entries:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    positions = np.concatenate([entry.positions for entry in entries])
    return positions, np.concatenate([entry.indices for entry in entries])
