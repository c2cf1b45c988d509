"""What a run tracks, and its way into checkpoints and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash

from overnight.core.errors import CheckpointError, OvernightError, SaveFailedError
from overnight.trainer.checkpoint.gradients import Gradients, pending_gradients, put_gradients_back
from overnight.trainer.checkpoint.handle import SaveHandle, Saving
from overnight.trainer.checkpoint.handover import Handover
from overnight.trainer.checkpoint.pipeline import Moment, Pipeline
from overnight.trainer.checkpoint.staging.stager import Stager
from overnight.trainer.checkpoint.state import encode, hash_tensor
from overnight.trainer.checkpoint.tracked import require_trackable, state_of, unwrap

INTERNAL = "$"
"""Names that begin so are the run's own."""

GRADIENTS = f"{INTERNAL}gradients"


class Saver:
    """The tracked objects of one rank and their checkpoints.

    Args:
        pipeline: The saves.
        stager: The pipeline's.
        handover: Gives objects their state from the checkpoint from which the run goes on; None at step 0.

    Attributes:
        pipeline: The saves: which are under way, committed, failed.
    """

    def __init__(self, pipeline: Pipeline, stager: Stager, handover: Handover | None) -> None:
        self.pipeline = pipeline
        self._stager = stager
        self._handover = handover
        self._tracked: dict[str, Any] = {}
        self._is_prepared = False

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
        if isinstance(obj, torch.optim.Optimizer):
            self._stager.watch()
        return given

    def missing(self) -> list[str]:
        """Objects in the checkpoint that the run has not tracked."""
        return self._handover.missing(self._tracked) if self._handover is not None else []

    def prepare(self) -> None:
        """Gets ready for the first save, so that it costs what any other does. After an update, once.

        Raises:
            SaveFailedError: The tracked state cannot be saved.
        """
        if not self._is_prepared:
            self._is_prepared = True
            self.pipeline.start_writer()
            self.pipeline.prepare(self._states, self._objects())

    def request(self) -> SaveHandle:
        """A handle to the next save."""
        return self.pipeline.request()

    def save(self, moment: Moment) -> Saving:
        """Stages the state of this moment; the rest happens behind training. Nobody may be reading the arena.

        Raises:
            SaveFailedError: Something in a state cannot be saved. Nothing was written.
        """
        if not self._is_prepared:
            self._is_prepared = True
            self.pipeline.start_writer()
        if pending := self.pending_gradients():
            moment = replace(moment, internal={**moment.internal, GRADIENTS: pending})
        return self.pipeline.begin(moment, self._states, self._objects())

    def _states(self) -> dict[str, Any]:
        return {name: state_of(obj) for name, obj in self._tracked.items()}

    def _objects(self) -> list[Any]:
        return [unwrap(obj) for obj in self._tracked.values()]

    def pending_gradients(self) -> Gradients:
        """Gradients of an accumulation that goes on behind this boundary; a graph's replays make theirs anew."""
        return pending_gradients(self._tracked, self._stager.stepped | self._stager.replayed)

    def accumulates(self) -> bool:
        """Whether gradients wait for a step; also such as no save could take along."""
        try:
            return bool(self.pending_gradients())
        except SaveFailedError:
            return True

    def next_update(self) -> None:
        """A boundary is over: which optimizers make a step is counted anew."""
        self._stager.stepped.clear()

    def put_gradients_back(self, gradients: Gradients) -> list[str]:
        """Goes on with an accumulation; returns the optimizers that are not tracked any more."""
        return put_gradients_back(self._tracked, gradients)

    def fingerprint(self) -> str:
        """xxh3-128 of every tensor that the user tracks, by name: equal for equal weights, moments and buffers."""
        encoded = encode({name: state_of(obj) for name, obj in sorted(self._tracked.items())})
        digest = xxhash.xxh3_128()
        for key, leaf in sorted(encoded.leaves.items()):
            content = leaf.tensor.cpu().contiguous().resolve_conj().resolve_neg()
            digest.update(f"{key}={hash_tensor(content)};".encode())
        return digest.hexdigest()

    def close(self, seconds: float) -> OvernightError | None:
        """Gives saves that are under way so much time, and ends.

        Returns:
            Why one failed, if nobody was told yet.
        """
        self.pipeline.close(seconds)
        return self.pipeline.take_failure()
