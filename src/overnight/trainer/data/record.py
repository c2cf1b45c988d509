"""Which samples every update really consumed, as evidence that a trial repeated none and skipped none.

Each rank writes to ``<attempt>/samples/rank-R.G.bin`` what was handed to its training loop: the step, the place in the
order and the data set indices themselves. The indices are written, not recomputed from the seed, because a record that
repeats the loader's own arithmetic could not contradict it.

``step`` is the number of updates that were complete before the one that a micro-batch is part of: the first update has
step 0, and a checkpoint at step S holds the updates 0 .. S-1. Buffered entries must be flushed before a checkpoint
commits; entries beyond the last commit may be lost with their process, and no longer matter then.

The format is described in :mod:`overnight.trainer.data.entries`; :func:`audit` reads it back.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overnight.core.errors import DataError
from overnight.trainer.data.audit import Audit, audit
from overnight.trainer.data.entries import ENTRY_HEAD, FOLDER, FORMAT_VERSION, pack
from overnight.trainer.data.frames import FrameWriter

if TYPE_CHECKING:
    from overnight.trainer.data.loader import MicroBatch

__all__ = ["Audit", "SampleRecord", "audit"]


class SampleRecord:
    """Writes one rank's record of one attempt.

    Nothing is forced to the disk. A micro-batch of 32 shuffled samples costs 6 us, one of 256 11 us, and 15 us where
    padding must be left out (medians on one core of a server).

    Args:
        attempt_dir: The attempt's folder; ``samples/`` is made in it.
        rank: Global rank.
        world_size: Number of ranks.
        attempt: Number of the attempt.
        generation: Start of the ranks in it. Each has its own file, since one that was cut off may go on writing.

    Raises:
        DataError: The file cannot be opened.
    """

    def __init__(self, attempt_dir: Path, *, rank: int, world_size: int, attempt: int, generation: int = 1) -> None:
        self.path = attempt_dir / FOLDER / f"rank-{rank}.{generation}.bin"
        self._loader_ids: dict[str, int] = {}
        with self._explained():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = FrameWriter(self.path)
        session = {"rank": rank, "world_size": world_size, "attempt": attempt, "generation": generation}
        self._append_json(b"S", {"version": FORMAT_VERSION, **session})

    def declare(
        self,
        name: str = "main",
        *,
        epochs: int | None,
        samples_per_epoch: int | None,
        repeats: bool = False,
        data_rank: int | None = None,
    ) -> None:
        """Says what a loader is going to give, so that an audit knows what to expect.

        Args:
            name: The loader's name.
            epochs: How many epochs will be trained; None if something else ends the run.
            samples_per_epoch: ``loader.samples_per_epoch``: all ranks together, after the tail rule.
            repeats: ``loader.repeats``: an index may come more than once in an epoch.
            data_rank: ``loader.rank``: the ranks of an attempt that have it in common consume the same samples, which
                count once. Without, no two ranks do.
        """
        loader_id = self._loader_ids.setdefault(name, len(self._loader_ids))
        declared = {"name": name, "epochs": epochs, "samples_per_epoch": samples_per_epoch, "repeats": repeats}
        share = {} if data_rank is None else {"data_rank": data_rank}
        self._append_json(b"L", {"id": loader_id, **declared, **share})

    def leave(self, step: int, epoch: int, position: int, name: str = "main") -> None:
        """Says that the rest of an epoch is not wanted, so that an audit does not miss it.

        Args:
            step: Updates complete.
            epoch: The epoch that is left, from 0.
            position: Samples of it that all ranks together have consumed.
            name: The loader's name, declared before.
        """
        place = {"epoch": epoch, "position": position, "step": step}
        self._append_json(b"B", {"id": self._loader_ids[name], **place})

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
        width, data = pack(indices)
        head = (b"U", self._loader_ids[name], step, batch.epoch, batch.position, batch.first, len(indices), width)
        with self._explained():
            self._writer.append(ENTRY_HEAD.pack(*head) + data)

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
