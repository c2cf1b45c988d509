"""In which order an epoch visits the data set: sequential, shuffled, weighted, or as a sampler of the user says.

Mixtures of data sets are in :mod:`overnight.trainer.data.mixture`.

Every order answers the same question, "which data set indices are at these positions of this epoch?", as a pure
function of (seed, epoch, position). No order keeps state between calls that a resumed run would have to restore.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch import Generator
from torch.utils.data.distributed import DistributedSampler

from overnight.core.errors import BadInputError, DataError
from overnight.trainer.data.permutation import Permutation
from overnight.trainer.rng import derive, isolated, seed_cpu, splitmix64


class Order(Protocol):
    """Which indices are where. Implementations are below; a loader picks one."""

    kind: str
    """Stored with a position, so that a state is never continued in another order."""

    repeats: bool
    """Whether an index may come more than once in an epoch."""

    def length(self, epoch: int) -> int:
        """Number of positions in the epoch."""
        ...

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Data set indices at the positions, int64 of the same shape."""
        ...

    def fingerprint(self, epoch: int) -> str:
        """What must be equal for a position in this epoch to mean the same sample."""
        ...


class SequentialOrder:
    """0, 1, 2 ... in every epoch."""

    kind = "sequential"
    repeats = False

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def length(self, epoch: int) -> int:
        """The data set's length."""
        return self._num_samples

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions themselves."""
        return positions

    def fingerprint(self, epoch: int) -> str:
        """Nothing beyond the length, which is compared by itself."""
        return ""


class ShuffledOrder:
    """A new keyed permutation in every epoch; O(1) memory.

    Args:
        num_samples: The data set's length.
        seed: Any integer.
    """

    kind = "shuffled"
    repeats = False

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._current: tuple[int, Permutation] | None = None

    def length(self, epoch: int) -> int:
        """The data set's length."""
        return self._num_samples

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The permutation of the epoch at the positions."""
        if self._current is None or self._current[0] != epoch:
            self._current = epoch, Permutation(self._num_samples, derive(self._seed, "permutation", epoch))
        return self._current[1](positions)

    def fingerprint(self, epoch: int) -> str:
        """The seed decides everything, and it is stored by itself."""
        return ""


class WeightedOrder:
    """Independent draws with replacement, sample ``i`` with probability ``weights[i] / sum(weights)``.

    The draw at a position is a pure function of (seed, epoch, position): a counter-based uniform number, looked up in
    the cumulative weights (inversion: Devroye, "Non-Uniform Random Variate Generation", 1986, chapter III.2).

    Args:
        weights: One finite weight >= 0 per sample of the data set, not all 0.
        num_samples: Draws per epoch.
        seed: Any integer.

    Raises:
        DataError: A weight is negative or not finite, or all are 0.
    """

    kind = "weighted"
    repeats = True

    def __init__(self, weights: ArrayLike, num_samples: int, seed: int) -> None:
        values = np.asarray(weights, dtype=np.float64)
        if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise DataError(
                "weights must be a flat sequence of finite numbers >= 0, of which at least one is positive",
                hint="Give one weight per sample of the data set.",
            )
        self._cumulative = np.cumsum(values)
        self._last = int(np.flatnonzero(values)[-1])
        self._num_samples = num_samples
        self._seed = seed

    def length(self, epoch: int) -> int:
        """Draws per epoch."""
        return self._num_samples

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The draws at the positions."""
        bits = splitmix64(derive(self._seed, "weighted", epoch), positions.astype(np.uint64))
        uniform = (bits >> np.uint64(11)) * 2.0**-53
        drawn = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
        return np.asarray(np.minimum(drawn, self._last), dtype=np.int64)

    def fingerprint(self, epoch: int) -> str:
        """A hash of the weights."""
        return xxhash.xxh3_64_hexdigest(self._cumulative.tobytes())


class SamplerOrder:
    """The order of a user's sampler, materialised once an epoch.

    The sampler runs with python's, numpy's and torch's default generators seeded from (seed, epoch), and the process's
    own generators are left alone. A ``torch.Generator`` that the sampler holds as ``generator`` is seeded the same way,
    and ``set_epoch`` is called where there is one. So the same epoch gives the same order again after a resume.

    Args:
        sampler: Anything that can be iterated again each epoch and gives data set indices.
        num_samples: The data set's length; indices must be below it.
        seed: Any integer.

    Raises:
        BadInputError: The sampler splits by rank itself, or is a one-shot iterator.
    """

    repeats = True

    def __init__(self, sampler: Iterable[Any], num_samples: int, seed: int) -> None:
        if isinstance(sampler, DistributedSampler):
            raise BadInputError(
                "a DistributedSampler splits the data by rank, which this loader does itself",
                hint="Leave the sampler out and pass shuffle=True; every rank then gets its share.",
            )
        if iter(sampler) is sampler:
            raise BadInputError(
                "the sampler is an iterator, which is exhausted after one epoch",
                hint="Pass an object whose __iter__ starts again, such as a torch.utils.data.Sampler or a list.",
            )
        self.kind = f"sampler:{type(sampler).__name__}"
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed
        self._current: tuple[int, NDArray[np.int64]] | None = None

    def length(self, epoch: int) -> int:
        """How many indices the sampler gives in this epoch."""
        return len(self._materialised(epoch))

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sampler's indices at the positions."""
        return self._materialised(epoch)[positions]

    def fingerprint(self, epoch: int) -> str:
        """A hash of the epoch's whole order."""
        return xxhash.xxh3_64_hexdigest(self._materialised(epoch).tobytes())

    def _materialised(self, epoch: int) -> NDArray[np.int64]:
        if self._current is None or self._current[0] != epoch:
            with isolated():
                self._current = epoch, self._draw(epoch)
        return self._current[1]

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        seed = derive(self._seed, "sampler", epoch)
        seed_cpu(seed)
        sampler: Any = self._sampler
        if isinstance(generator := getattr(sampler, "generator", None), Generator):
            generator.manual_seed(seed)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        drawn = [_index(value) for value in sampler]
        indices = np.array(drawn, dtype=np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < self._num_samples):
            raise DataError(
                f"the sampler gave index {int(indices.max() if indices.min() >= 0 else indices.min())}, "
                f"the data set has {self._num_samples} samples",
                hint="Samplers must give indices from 0 to len(dataset) - 1.",
            )
        return indices


def _index(value: Any) -> int:
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):
        raise BadInputError(
            f"the sampler gave {type(value).__name__} {value!r:.60}, not an index",
            hint="Batch samplers are not supported: give single indices, and the batch size to the loader.",
        ) from None
