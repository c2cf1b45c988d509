"""What a run tracks, and its way into checkpoints: stage a snapshot, write it, commit it, tidy up.

The three steps are apart on purpose: staging needs the loop to stand still, the rest does not.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from overnight.core.errors import CheckpointError
from overnight.trainer.checkpoint.handover import Handover
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.place import CheckpointName, Place
from overnight.trainer.checkpoint.reader import Restored, complain
from overnight.trainer.checkpoint.retention import Retention, prune
from overnight.trainer.checkpoint.state import Snapshot, stage
from overnight.trainer.checkpoint.tracked import require_trackable, state_of
from overnight.trainer.checkpoint.writer import Author, Writer

INTERNAL = "$"
"""Names that begin so are the run's own."""


class Saver:
    """The tracked objects of one rank and their checkpoints.

    Args:
        place: The checkpoint place.
        author: Who writes.
        restored: The checkpoint from which the run goes on, None at step 0.
        device: Of the run.
        retention: Which checkpoints of this token stay.
        before_publish: See :class:`~overnight.trainer.checkpoint.writer.Writer`.
    """

    def __init__(
        self,
        place: Place,
        author: Author,
        restored: Restored | None,
        device: torch.device,
        retention: Retention,
        before_publish: Callable[[], None],
    ) -> None:
        self._place = place
        self._author = author
        self._writer = Writer(place, author, before_publish)
        self._handover: Handover | None = None
        if restored is not None:
            rank, world_size, seed = author.rank, author.world_size, author.seed
            self._handover = Handover(restored, device, rank=rank, world_size=world_size, seed=seed, complain=complain)
        self._retention = retention
        self._tracked: dict[str, Any] = {}
        self._saves: dict[int, int] = {}
        self._committed: tuple[int, str] | None = None
        self.num_bytes = 0
        self.seconds = 0.0

    @property
    def tracks(self) -> bool:
        """Whether the user tracks anything; without, a checkpoint would hold no progress."""
        return bool(self._tracked)

    @property
    def tracked(self) -> Mapping[str, Any]:
        """What is tracked, by name."""
        return self._tracked

    def track(self, name: str, obj: Any) -> bool:
        """Tracks an object and, in a resumed run, gives it its saved state at once.

        Returns:
            Whether a state was restored.

        Raises:
            CheckpointError: The object cannot be tracked, the name is taken, or the saved state does not fit.
        """
        if name in self._tracked and self._tracked[name] is not obj:
            raise CheckpointError(f"{name!r} is tracked already", hint="Give the other object another name.")
        require_trackable(name, obj)
        is_new = name not in self._tracked
        given = is_new and self._handover is not None and self._handover.give_back(name, obj)
        self._tracked[name] = obj
        return given

    def missing(self) -> list[str]:
        """Objects in the checkpoint that the run has not tracked."""
        return self._handover.missing(self._tracked) if self._handover is not None else []

    def stage(self, step: int, internal: Mapping[str, Any], position: dict[str, Any]) -> Snapshot:
        """Copies the state of this moment.

        Args:
            step: Updates done.
            internal: The run's own state; names begin with ``$``.
            position: For the manifest; no part of the content.

        Raises:
            SaveFailedError: Something in a state cannot be saved. Nothing was written.
        """
        states = {name: state_of(obj) for name, obj in self._tracked.items()}
        return stage({**states, **internal}, step, position)

    def commit(self, snapshot: Snapshot) -> Manifest | None:
        """Writes and publishes a snapshot, then deletes what this token needs no longer.

        A snapshot whose content is that of the last commit of the same step is not written again (one rank only: with
        more, each knows its own part alone).

        Returns:
            The manifest on rank 0 when something was written, else None.

        Raises:
            SaveFailedError, FencedError: Nothing was published.
        """
        started = time.monotonic()
        digests = snapshot.digests()
        content = snapshot.content(digests)
        if self._author.world_size == 1 and self._committed == (snapshot.step, content):
            return None
        number = self._saves[snapshot.step] = self._saves.get(snapshot.step, 0) + 1
        name = CheckpointName(snapshot.step, self._author.token, number)
        manifest = self._writer.write(snapshot, name, digests)
        self._committed = (snapshot.step, content)
        self.num_bytes = manifest.num_bytes if manifest is not None else snapshot.num_bytes
        if manifest is not None:
            prune(self._place, name, self._retention)
        self.seconds = time.monotonic() - started
        return manifest

    def fingerprint(self) -> str:
        """xxh3-128 of every tensor that the user tracks, by name: equal for equal weights, moments and buffers."""
        snapshot = stage({name: state_of(obj) for name, obj in sorted(self._tracked.items())}, 0)
        digest = xxhash.xxh3_128()
        for key, value in sorted(snapshot.digests().items()):
            digest.update(f"{key}={value};".encode())
        return digest.hexdigest()
