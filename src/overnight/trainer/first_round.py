"""What happens once, right before the first round of the first loop: random numbers and gradients are put in place.

Not earlier, since what a script does before its loops (building models, say) draws random numbers too.
"""

import torch

from overnight.trainer import buckets, rng, untracked
from overnight.trainer.checkpoint.reader import complain
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.saver import GRADIENTS, Saver
from overnight.trainer.cursor import Cursor
from overnight.trainer.meshes import Arrangement
from overnight.trainer.own_state import RNG, Saved
from overnight.trainer.start import Origin, tell_differences


class FirstRound:
    """The last part of beginning, or of going on.

    Args:
        origin: Where the run goes on.
        saved: What the run kept of itself there.
        saver: The tracked objects.
        cursor: Knows the step and the loaders.
        arrangement: How the ranks stand to each other.
        device: This rank's.
        seed: The trial's.
    """

    def __init__(
        self,
        origin: Origin,
        saved: Saved,
        saver: Saver,
        cursor: Cursor,
        arrangement: Arrangement,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        self._restored = origin.restored
        self._saved = saved
        self._saver = saver
        self._cursor = cursor
        self._arrangement = arrangement
        self._device = device
        self._seed = seed
        self._tells = origin.environment.rank == 0
        self._world_size = origin.environment.world_size
        self._is_prepared = False

    def prepare(self) -> None:
        """Sets the random state, last of all: where the run was saved, at latest before its first round."""
        if self._is_prepared:
            return
        self._is_prepared = True
        restored, self._restored = self._restored, None
        if restored is not None and self._is_arranged_as(restored):
            rng.restore(restored.state(RNG))
        else:
            rng.rederive(self._seed, self._cursor.step, self._arrangement.share.rank)
        if restored is not None:
            self._go_on_from(restored)
        if self._tells and self._world_size > buckets.COMMUTATIVE:
            text = buckets.warning(self._saver.tracked.values(), untracked.script_frames())
            if text is not None:
                complain(text)

    def _go_on_from(self, restored: Restored) -> None:
        if GRADIENTS in restored.names:
            self._put_gradients_back(restored)
        if self._tells:
            tell_differences(restored.manifest, self._device, self._world_size)
            for name in self._saver.missing():
                complain(f"{name!r} is in {restored.manifest.name}, but this run does not track it")
        restored.release()

    def _is_arranged_as(self, restored: Restored) -> bool:
        """Whether each rank is the one of that number at the save, with the same part of the samples."""
        same_peers = self._saved.peers == self._arrangement.peers and self._cursor.is_divided_as_saved
        return restored.manifest.world_size == self._world_size and same_peers

    def _put_gradients_back(self, restored: Restored) -> None:
        """Goes on in the middle of an accumulation by the script; each rank's gradients are of its own samples."""
        if not self._is_arranged_as(restored):
            if self._tells:
                complain(f"{restored.manifest.name} was saved in the middle of an accumulation; its gradients are lost")
            return
        self._saver.put_gradients_back(restored.state(GRADIENTS))
