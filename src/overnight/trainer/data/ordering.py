"""Which order a loader's arguments ask for."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from overnight.core.errors import DataError
from overnight.trainer.data.arguments import parts_of, require_one_order
from overnight.trainer.data.mixture import MixtureOrder
from overnight.trainer.data.sampling import Order, SamplerOrder, SequentialOrder, ShuffledOrder, WeightedOrder


class Ordering:
    """The order of a data set, but for its seed. Arguments as for :class:`overnight.trainer.DataLoader`.

    Raises:
        BadInputError: Arguments that exclude each other, or a mixture of what has no parts.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool,
        sampler: Iterable[Any] | None,
        weights: ArrayLike | None,
        mixture: Sequence[float] | None,
        num_samples: int | None,
    ) -> None:
        require_one_order(shuffle=shuffle, sampler=sampler, weights=weights, mixture=mixture, num_samples=num_samples)
        self._length = len(dataset)
        self._shuffle = shuffle
        self._sampler = sampler
        self._weights = weights
        self._mixture = None if mixture is None else (parts_of(dataset), list(mixture))
        self._num_draws = num_samples or self._length

    def order(self, seed: int) -> Order:
        """The order under a seed.

        Raises:
            DataError: There is not one weight per sample, or weights or shares that mean nothing.
        """
        if self._weights is not None:
            self._require_a_weight_each(self._weights)
            return WeightedOrder(self._weights, self._num_draws, seed)
        if self._mixture is not None:
            return MixtureOrder(*self._mixture, self._num_draws, seed)
        if self._sampler is not None:
            return SamplerOrder(self._sampler, self._length, seed)
        return ShuffledOrder(self._length, seed) if self._shuffle else SequentialOrder(self._length)

    def _require_a_weight_each(self, weights: ArrayLike) -> None:
        if (num_weights := len(np.asarray(weights))) != self._length:
            raise DataError(
                f"{num_weights} weights for {self._length} samples",
                hint="Give one weight per sample of the data set.",
            )
