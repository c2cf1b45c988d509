"""The format of a sample record, and its reader.

A file is a sequence of frames (see :mod:`overnight.trainer.data.frames`) whose first byte is their kind.

* ``S``: JSON, the start of a process: ``version rank world_size attempt generation``.
* ``L``: JSON, a loader: ``id name epochs samples_per_epoch repeats``; the last one of a name counts. ``data_rank``,
  where it is there, is equal on ranks that consume the same samples; else it is the rank.
* ``B``: JSON, the script left a loader's epoch for good before its end: ``id epoch position step``.
* ``U``: a micro-batch: loader id, step, epoch, position before the update, position of the first sample, count, width;
  then the indices as unsigned integers of ``width`` bytes, or with width 0 the first of consecutive ones.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overnight.trainer.data.frames import read_frames

FORMAT_VERSION = 1
FOLDER = "samples"

ENTRY_HEAD = struct.Struct("<cBQIQQIB")
_WIDTHS = (1, 2, 4, 8)

Token = tuple[int, int]
"""(attempt, generation)."""


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
    data_rank: int

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


@dataclass(frozen=True)
class Ending:
    """Where the script left an epoch on purpose: by ``break``, or because the loop's time was over.

    Attributes:
        token: Who left it.
        loader: The loader's name.
        epoch: The epoch that was left, from 0.
        position: Samples of it that all ranks had consumed; the rest is not wanted.
        step: Updates complete by then.
    """

    token: Token
    loader: str
    epoch: int
    position: int
    step: int


@dataclass
class RankRecord:
    """Everything that one file says.

    Attributes:
        tokens: (attempt, generation) of each process that wrote to it, in order.
        declarations: Per token and loader name.
        endings: Epochs that the script left early.
        entries: In the order in which they were handed out.
    """

    tokens: list[Token] = field(default_factory=list)
    declarations: dict[tuple[Token, str], Declaration] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


def read_record(path: Path) -> RankRecord:
    """Reads one rank's file, up to where it was cut."""
    record = RankRecord()
    session: dict[str, Any] = {}
    names: dict[int, str] = {}
    data_ranks: dict[int, int] = {}
    for payload in read_frames(path):
        if payload[:1] == b"S":
            session, names, data_ranks = json.loads(payload[1:]), {}, {}
            record.tokens.append((session["attempt"], session["generation"]))
        elif payload[:1] == b"L":
            body = json.loads(payload[1:])
            names[body["id"]] = body["name"]
            data_ranks[body["id"]] = body.get("data_rank", session["rank"])
            declared = Declaration(body["epochs"], body["samples_per_epoch"], body["repeats"])
            record.declarations[record.tokens[-1], body["name"]] = declared
        elif payload[:1] == b"B":
            body = json.loads(payload[1:])
            place = body["epoch"], body["position"], body["step"]
            record.endings.append(Ending(record.tokens[-1], names[body["id"]], *place))
        elif payload[:1] == b"U":
            record.entries.append(_entry(payload, session, names, data_ranks))
    return record


def read_attempts(trial_dir: Path) -> Iterator[RankRecord]:
    """The records of all ranks of all attempts of a trial."""
    for path in sorted(trial_dir.glob(f"attempts/*/{FOLDER}/rank-*.bin")):
        yield read_record(path)


def _entry(payload: bytes, session: dict[str, Any], names: dict[int, str], data_ranks: dict[int, int]) -> Entry:
    _, loader_id, step, epoch, position, first, count, width = ENTRY_HEAD.unpack_from(payload)
    return Entry(
        attempt=session["attempt"],
        generation=session["generation"],
        rank=session["rank"],
        loader=names[loader_id],
        step=step,
        epoch=epoch,
        position=position,
        first=first,
        indices=unpack(payload[ENTRY_HEAD.size :], count, width),
        data_rank=data_ranks[loader_id],
    )


def pack(indices: NDArray[np.int64]) -> tuple[int, bytes]:
    """``(width, data)`` of non-negative indices, as small as the largest of them allows."""
    if not len(indices):
        return 1, b""
    low, high = int(indices.min()), int(indices.max())
    if high - low == len(indices) - 1 and bool((indices[1:] - indices[:-1] == 1).all()):
        return 0, low.to_bytes(8, "little")
    width = next(width for width in _WIDTHS if high < 1 << (8 * width))
    return width, indices.astype(f"<u{width}").tobytes()


def unpack(data: bytes, count: int, width: int) -> NDArray[np.int64]:
    """The inverse of :func:`pack`."""
    if width == 0:
        start = int.from_bytes(data, "little")
        return np.arange(start, start + count, dtype=np.int64)
    return np.frombuffer(data, f"<u{width}", count).astype(np.int64)
