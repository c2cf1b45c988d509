"""A shuffled order that any position can be asked of, so that resuming at sample 10**9 costs no more than at 0.

``torch.randperm`` needs 8 bytes per sample and has to be replayed from the start; a keyed permutation is a bijection
computed per position, in O(1) memory.

Construction, for ``N >= 4096``: write ``x = L * b + R`` with ``a = ceil(sqrt N)``, ``b = ceil(N / a)``, so that
``(L, R)`` runs over ``Z_a x Z_b``, a domain of at most ``N + a`` values. Eight Feistel rounds alternate

    L <- (L + F(k_i, R)) mod a        R <- (R + F(k_i, L)) mod b

Each is invertible whatever F is, so their composition permutes the domain; a value that leaves ``[0, N)`` is sent
through again until it is inside ("cycle walking"), which makes it a permutation of ``[0, N)``. F takes the upper
32 bits of two rounds of multiply and xor-shift; its modulo bias is below ``sqrt(N) / 2**32``. Round keys are a
splitmix64 stream of the key.

Over a small domain a Feistel network of this few rounds fails a chi-square test. Below 4096 the order is the stable
argsort of ``splitmix64(key, i)`` instead: a table of at most 32 KiB.

Sources:
    Luby & Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17 (1988).
    Black & Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: generalised Feistel and cycle walking.
    Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: splitmix64.

The mapping (length, key) -> order is a promise across versions: a trial that was paused under one version must
continue with the same samples under the next. Golden values in the tests hold it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from overnight.trainer.rng import splitmix64

SMALL_LENGTH = 4096
"""Below this a permutation is a table."""

MAX_LENGTH = 1 << 62
"""Both halves of the domain stay below 2**31 + 1, where 32 bit round values are nearly unbiased."""

_NUM_ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Permutation:
    """A permutation of ``range(length)``, chosen by a key.

    Args:
        length: Number of elements, 0 <= length <= 2**62.
        key: Any integer in [0, 2**64).

    Raises:
        ValueError: The length or the key is out of range.
    """

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length must be between 0 and 2**62, not {length}")
        if not 0 <= key < 1 << 64:
            raise ValueError(f"key must be between 0 and 2**64 - 1, not {key}")
        self.length = length
        self._table: NDArray[np.int64] | None = None
        if length < SMALL_LENGTH:
            self._table = np.argsort(splitmix64(key, np.arange(length, dtype=np.uint64)), kind="stable")
            return
        left = math.isqrt(length - 1) + 1
        right = -(-length // left)
        self._left, self._right = np.uint64(left), np.uint64(right)
        self._round_keys = splitmix64(key, np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements at the given positions.

        Args:
            positions: int64, each in [0, length), any order, one-dimensional.

        Returns:
            int64, same shape. Distinct positions give distinct elements.

        Raises:
            IndexError: A position is out of range.
        """
        if positions.size and not (positions.min() >= 0 and positions.max() < self.length):
            raise IndexError(f"positions must be in [0, {self.length})")
        if self._table is not None:
            return self._table[positions]
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            walked = self._encrypt(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.length]
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(values, self._right)
        mixed, shifted = np.empty_like(values), np.empty_like(values)
        for number, round_key in enumerate(self._round_keys):
            source, target, modulus = (left, right, self._right) if number % 2 else (right, left, self._left)
            np.add(source, round_key, out=mixed)
            np.multiply(mixed, _MULTIPLY_1, out=mixed)
            np.right_shift(mixed, _HALF, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, _MULTIPLY_2, out=mixed)
            np.right_shift(mixed, _HALF, out=mixed)
            np.add(mixed, target, out=mixed)
            np.remainder(mixed, modulus, out=target)
        np.multiply(left, self._right, out=left)
        np.add(left, right, out=left)
        return left
