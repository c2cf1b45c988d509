"""A mixture of data sets in fixed proportions, each read without replacement, in O(parts) memory at any length.

Construction: an epoch of ``N`` positions gives part ``k`` exactly ``n_k`` of them, its share of ``N`` rounded by
largest remainders, so that the ``n_k`` add up to ``N``. The epoch has ``N`` slots: the first ``n_0`` are the first
part's, the next ``n_1`` the second's, and so on. The keyed permutation of :mod:`overnight.trainer.data.permutation`
sends a position to a slot; hence the parts are interleaved at random, and each slot comes once.

Slot number ``i`` of part ``k`` in epoch ``e`` is the part's pick number ``c = e * n_k + i``. With ``cycle, r =
divmod(c, length_k)`` it reads element ``r`` of a permutation that is keyed by (part, cycle). So the picks of all epochs
together go through a part completely before any of its samples comes again, whether an epoch takes a tenth of the part
or ten times all of it; and any position of any epoch can be asked of, without a table or a replay.

Sources:
    Hamilton's method of largest remainders: Balinski & Young, "Fair Representation", 1982, chapter 3.
    Sources in fixed shares, each without replacement until it is used up: Brown et al., "Language Models are Few-Shot
    Learners", NeurIPS 2020, appendix B.

The mapping is a promise across versions, as that of the permutation is; golden values in the tests hold it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from overnight.core.errors import DataError
from overnight.trainer.data.permutation import Permutation
from overnight.trainer.rng import derive

KEPT_PERMUTATIONS = 64


class MixtureOrder:
    """Parts of a concatenated data set, in proportions that every epoch keeps exactly.

    Args:
        lengths: Of the parts, in the order in which they are concatenated.
        shares: Relative share of each part, finite and >= 0, not all 0.
        num_samples: Positions per epoch.
        seed: Any integer.

    Raises:
        DataError: Lengths and shares do not fit each other, or a share is impossible.
    """

    kind = "mixture"
    repeats = True
    """A part may be gone through more than once in an epoch, or a second time begin in it."""

    def __init__(self, lengths: Sequence[int], shares: Sequence[float], num_samples: int, seed: int) -> None:
        _require_shares(lengths, shares)
        self.counts = apportion(num_samples, shares)
        self._lengths = list(lengths)
        self._first_indices = [0, *np.cumsum(lengths).tolist()]
        self._first_slots = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)
        self._num_samples = num_samples
        self._seed = seed
        self._permutation = lru_cache(KEPT_PERMUTATIONS)(Permutation)

    def length(self, epoch: int) -> int:
        """Positions per epoch."""
        return self._num_samples

    def indices(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into the concatenation at the positions."""
        slots = self._permutation(self._num_samples, derive(self._seed, "mixture", epoch))(positions)
        parts = np.searchsorted(self._first_slots, slots, side="right") - 1
        found = np.empty_like(slots)
        for part in np.unique(parts).tolist():
            own = parts == part
            picks = epoch * self.counts[part] + slots[own] - self._first_slots[part]
            found[own] = self._first_indices[part] + self._elements(part, picks)
        return found

    def _elements(self, part: int, picks: NDArray[np.int64]) -> NDArray[np.int64]:
        cycles, places = np.divmod(picks, self._lengths[part])
        found = np.empty_like(places)
        for cycle in np.unique(cycles).tolist():
            own = cycles == cycle
            key = derive(self._seed, "part", part, cycle)
            found[own] = self._permutation(self._lengths[part], key)(places[own])
        return found

    def fingerprint(self, epoch: int) -> str:
        """A hash of the parts' lengths and of what an epoch takes of each."""
        return xxhash.xxh3_64_hexdigest(np.array([self._lengths, self.counts], dtype=np.int64).tobytes())


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Integers that add up to ``total``, each its share of it rounded down or up: largest remainders first."""
    exact = [Fraction(share) for share in shares]
    quotas = [total * share / sum(exact) for share in exact]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda part: (counts[part] - quotas[part], part))
    for part in by_remainder[: total - sum(counts)]:
        counts[part] += 1
    return counts


def _require_shares(lengths: Sequence[int], shares: Sequence[float]) -> None:
    if len(lengths) != len(shares):
        raise DataError(f"{len(lengths)} data sets but {len(shares)} shares", hint="Give one share for each.")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise DataError(
            f"a mixture's shares must be finite numbers >= 0, of which at least one is positive, not {list(shares)}",
            hint="Like mixture=[0.7, 0.2, 0.1]; they need not add up to 1.",
        )
    if any(length == 0 and share > 0 for length, share in zip(lengths, shares, strict=True)):
        raise DataError("an empty data set cannot have a share of the mixture", hint="Leave it out, or give it 0.")
