"""Which samples every update really consumed, as evidence that a trial repeated none and skipped none.

Each rank appends to ``<attempt>/samples/rank-R.bin`` what was handed to its training loop: the step, the place in the
order and the data set indices themselves. The indices are written, not recomputed from the seed, because a record that
repeats the loader's own arithmetic could not contradict it.

``step`` is the number of updates that were complete before the one that a micro-batch is part of: the first update has
step 0, and a checkpoint at step S holds the updates 0 .. S-1. Buffered entries must be flushed before a checkpoint
commits; entries beyond the last commit may be lost with their process, and no longer matter then.

File format: frames (see :mod:`overnight.trainer.data.frames`) whose first byte is their kind.

* ``S``: JSON, the start of a process: ``version rank world_size attempt generation``.
* ``L``: JSON, a loader: ``id name epochs samples_per_epoch repeats``; the last one of a name counts.
* ``U``: a micro-batch: loader id, step, epoch, position before the update, position of the first sample, count, width;
  then the indices as unsigned integers of ``width`` bytes, or with width 0 the first of consecutive ones.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from overnight.core.errors import DataError
from overnight.trainer.data.frames import FrameWriter, read_frames

if TYPE_CHECKING:
    from overnight.trainer.data.loader import MicroBatch

FORMAT_VERSION = 1
FOLDER = "samples"

_ENTRY = struct.Struct("<cBQIQQIB")
_WIDTHS = (1, 2, 4, 8)


class SampleRecord:
    """Writes one rank's record of one attempt. About 6 us per micro-batch, no fsync.

    Args:
        attempt_dir: The attempt's folder; ``samples/`` is made in it.
        rank: Global rank.
        world_size: Number of ranks.
        attempt: Number of the attempt.
        generation: Start of the ranks in it. A later one appends to the same file.

    Raises:
        DataError: The file cannot be opened.
    """

    def __init__(self, attempt_dir: Path, *, rank: int, world_size: int, attempt: int, generation: int = 1) -> None:
        self.path = attempt_dir / FOLDER / f"rank-{rank}.bin"
        self._loader_ids: dict[str, int] = {}
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = FrameWriter(self.path)
        session = {"rank": rank, "world_size": world_size, "attempt": attempt, "generation": generation}
        self._append_json(b"S", {"version": FORMAT_VERSION, **session})

    def declare(
        self, name: str = "main", *, epochs: int | None, samples_per_epoch: int | None, repeats: bool = False
    ) -> None:
        """Says what a loader is going to give, so that an audit knows what to expect.

        Args:
            name: The loader's name.
            epochs: How many epochs will be trained; None if something else ends the run.
            samples_per_epoch: ``loader.samples_per_epoch``: all ranks together, after the tail rule.
            repeats: ``loader.repeats``: an index may come more than once in an epoch.
        """
        loader_id = self._loader_ids.setdefault(name, len(self._loader_ids))
        declared = {"name": name, "epochs": epochs, "samples_per_epoch": samples_per_epoch, "repeats": repeats}
        self._append_json(b"L", {"id": loader_id, **declared})

    def append(self, step: int, batch: "MicroBatch", name: str = "main") -> None:
        """Notes a micro-batch that is handed to the training loop; padding is left out.

        Args:
            step: Updates complete before the one that the batch is part of.
            batch: What the loader gave.
            name: The loader's name.
        """
        if name not in self._loader_ids:
            self.declare(name, epochs=None, samples_per_epoch=None)
        indices = batch.indices
        if batch.weights is not None:
            indices = indices[batch.weights.numpy() > 0]
        width, data = _pack(indices)
        head = (b"U", self._loader_ids[name], step, batch.epoch, batch.position, batch.first, len(indices), width)
        with self._explained():
            self._writer.append(_ENTRY.pack(*head) + data)

    def flush(self) -> None:
        """Makes everything so far survive this process. Call it before a checkpoint commits.

        Raises:
            DataError: The file cannot be written.
        """
        with self._explained():
            self._writer.flush()

    def close(self) -> None:
        """Flushes and closes. Safe to call twice."""
        with self._explained():
            self._writer.close()

    def _append_json(self, kind: bytes, body: dict[str, Any]) -> None:
        with self._explained():
            self._writer.append(kind + json.dumps(body).encode())

    def _explained(self) -> "_Explained":
        return _Explained(self.path)


class _Explained:
    """Turns an OSError into one that names the file. A class, since a generator costs 1 us more per batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, OSError):
            raise DataError(
                f"the sample record {self._path} cannot be written: {os.strerror(error.errno or 0)}",
                hint="Free space on the disk of the trial's folder, or make it writable.",
            ) from error


@dataclass(frozen=True)
class Entry:
    """One micro-batch of a record; see :class:`overnight.trainer.data.loader.MicroBatch`."""

    attempt: int
    generation: int
    rank: int
    loader: str
    step: int
    epoch: int
    position: int
    first: int
    indices: NDArray[np.int64]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Global positions of the samples in their epoch."""
        return np.arange(self.first, self.first + len(self.indices))


@dataclass(frozen=True)
class Declaration:
    """What a loader was going to give."""

    epochs: int | None
    samples_per_epoch: int | None
    repeats: bool


@dataclass
class RankRecord:
    """Everything that one file says.

    Attributes:
        tokens: (attempt, generation) of each process that wrote to it, in order.
        declarations: Per token and loader name.
        entries: In the order in which they were handed out.
    """

    tokens: list[tuple[int, int]] = field(default_factory=list)
    declarations: dict[tuple[tuple[int, int], str], Declaration] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)


def read_record(path: Path) -> RankRecord:
    """Reads one rank's file, up to where it was cut."""
    record = RankRecord()
    session: dict[str, Any] = {}
    names: dict[int, str] = {}
    for payload in read_frames(path):
        if payload[:1] == b"S":
            session, names = json.loads(payload[1:]), {}
            record.tokens.append((session["attempt"], session["generation"]))
        elif payload[:1] == b"L":
            body = json.loads(payload[1:])
            names[body["id"]] = body["name"]
            declared = Declaration(body["epochs"], body["samples_per_epoch"], body["repeats"])
            record.declarations[record.tokens[-1], body["name"]] = declared
        elif payload[:1] == b"U":
            record.entries.append(_entry(payload, session, names))
    return record


def read_attempts(trial_dir: Path) -> Iterator[RankRecord]:
    """The records of all ranks of all attempts of a trial."""
    for path in sorted(trial_dir.glob(f"attempts/*/{FOLDER}/rank-*.bin")):
        yield read_record(path)


def _entry(payload: bytes, session: dict[str, Any], names: dict[int, str]) -> Entry:
    _, loader_id, step, epoch, position, first, count, width = _ENTRY.unpack_from(payload)
    return Entry(
        attempt=session["attempt"],
        generation=session["generation"],
        rank=session["rank"],
        loader=names[loader_id],
        step=step,
        epoch=epoch,
        position=position,
        first=first,
        indices=_unpack(payload[_ENTRY.size :], count, width),
    )


def _pack(indices: NDArray[np.int64]) -> tuple[int, bytes]:
    if not len(indices):
        return 1, b""
    low, high = int(indices.min()), int(indices.max())
    if high - low == len(indices) - 1 and bool((indices[1:] - indices[:-1] == 1).all()):
        return 0, low.to_bytes(8, "little")
    width = next(width for width in _WIDTHS if high < 1 << (8 * width))
    return width, indices.astype(f"<u{width}").tobytes()


def _unpack(data: bytes, count: int, width: int) -> NDArray[np.int64]:
    if width == 0:
        start = int.from_bytes(data, "little")
        return np.arange(start, start + count, dtype=np.int64)
    return np.frombuffer(data, f"<u{width}", count).astype(np.int64)
