"""Gives tracked objects what a checkpoint has for them, and says what it cannot give exactly.

At another number of ranks, what all ranks had alike is given to all, and what is sharded is cut anew. What differed
between the ranks has no exact counterpart there: generators are seeded anew, anything else is named.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from overnight.core.errors import CheckpointError
from overnight.trainer import generators, rng
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.tracked import device_for, fit_of, put_back


class Handover:
    """Between one checkpoint and the objects of one rank.

    Args:
        restored: The checkpoint.
        device: Of the run.
        rank, world_size: Of this process.
        seed: The trial's seed.
        complain: Takes a line for the person who reads the run's output.
    """

    def __init__(
        self,
        restored: Restored,
        device: torch.device,
        *,
        rank: int,
        world_size: int,
        seed: int,
        complain: Callable[[str], None],
    ) -> None:
        self._restored = restored
        self._device = device
        self._rank = rank
        self._seed = seed
        self._resized = restored.manifest.world_size != world_size
        self._complain = complain if rank == 0 else _say_nothing

    def give_back(self, name: str, obj: Any) -> bool:
        """Gives an object its saved state, in place.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: It does not fit.
            CorruptCheckpointError: The checkpoint does not hold what its manifest vouches for.
        """
        restored = self._restored
        if name not in restored.names:
            self._complain(f"{name!r} is not in {restored.manifest.name}: it keeps the state that it has")
            return False
        if self._resized and generators.is_generator(obj) and restored.differs(name):
            step = restored.manifest.step
            generators.reseed(obj, rng.derive(self._seed, "generator", name, step, self._rank))
            return True
        if self._resized:
            self._tell_resized(name, obj)
        try:
            state = restored.state(name, device_for(obj, self._device), fit_of(obj))
            put_back(obj, state)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the state of {name!r} in {restored.manifest.name} does not fit: {error}",
                hint="The script builds another object than the saved one. Undo that, or start anew (--fresh).",
            ) from error
        return True

    def _tell_resized(self, name: str, obj: Any) -> None:
        num_ranks = self._restored.manifest.world_size
        if generators.is_generator(obj) and num_ranks == 1:
            self._complain(f"{name!r} was saved by one rank: all ranks go on with its random numbers, the same on each")
        elif self._restored.differs(name):
            self._complain(
                f"the state of {name!r} differed between the {num_ranks} ranks that saved it: here each of them has "
                "its own again, as far as there are so many, and new ones have that of rank 0"
            )

    def missing(self, tracked: Iterable[str]) -> list[str]:
        """Objects of the user's in the checkpoint that the run has not tracked."""
        return sorted({name for name in self._restored.names if not name.startswith("$")} - set(tracked))


def _say_nothing(text: str) -> None:
    """What all ranks would say, rank 0 says."""
