"""Makes one value of what all ranks logged, in the background and many at a time."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overnight.trainer.journal import Entry


class Reduction:
    """One reduction under way. All ranks start it with the same keys, steps and rules, in the same order.

    Means are weighted: ranks that hold 3 and 1 samples of an uneven tail give the mean over 4 samples. A rank whose
    weight is 0 does not count, whatever its value is. A NaN on one rank that counts makes the result NaN. Peers, which
    have the same samples, count once in a sum; in a mean and an extreme it makes no difference.

    Args:
        group: A gloo group of all ranks.
        entries: What this rank logged.
    """

    def __init__(self, group: dist.ProcessGroup, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._is_mean = torch.tensor([entry.reduce == "mean" for entry in entries], dtype=torch.bool)
        self._num_peers = torch.tensor([entry.num_peers for entry in entries], dtype=torch.float64)
        signs = [{"max": 1.0, "min": -1.0}.get(entry.reduce, 0.0) for entry in entries]
        self._sign = torch.tensor(signs, dtype=torch.float64)
        self._is_extreme = self._sign != 0
        values = torch.tensor(fetch([entry.value for entry in entries]), dtype=torch.float64)
        weights = torch.tensor([entry.weight for entry in entries], dtype=torch.float64)
        self._sums = self._shares(values, weights)
        hidden = (weights <= 0) | values.isnan()
        self._peaks = (self._sign * values).masked_fill(hidden, -math.inf)[self._is_extreme]
        tensors = [(self._sums, dist.ReduceOp.SUM), (self._peaks, dist.ReduceOp.MAX)]
        self._works = [
            dist.all_reduce(tensor, op=op, group=group, async_op=True) for tensor, op in tensors if tensor.numel()
        ]

    def _shares(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What this rank adds to each sum and to each divisor; float64 of shape [2, entries]."""
        shares = torch.where(self._is_mean, values * weights, values)
        shares = shares.masked_fill((weights <= 0) | (self._is_extreme & ~values.isnan()), 0.0)
        return torch.stack([shares, weights.masked_fill(~self._is_mean, 1.0)])

    def result(self) -> list[float]:
        """Waits for the peers; the values in the order of the entries.

        Raises:
            RuntimeError: A peer has gone.
        """
        for work in self._works:
            work.wait()
        sums, divisors = self._sums
        results = sums / torch.where(self._is_mean, divisors, self._num_peers)
        peaks = self._sign[self._is_extreme] * self._peaks
        results[self._is_extreme] = torch.where(sums[self._is_extreme].isnan(), math.nan, peaks)
        numbers: list[float] = results.tolist()
        return numbers

    def rows(self) -> list[tuple[Entry, float]]:
        """Each entry with its :meth:`result`."""
        return list(zip(self._entries, self.result(), strict=True))


def fetch(values: Sequence[Any]) -> list[float]:
    """Numbers and one-element tensors as numbers; one transfer per device and type, however many there are."""
    fetched = list(values)
    places: dict[Any, list[int]] = defaultdict(list)
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places[value.device, value.dtype].append(place)
    for some in places.values():
        stacked = torch.stack([values[place].reshape(()) for place in some])
        for place, number in zip(some, stacked.tolist(), strict=True):
            fetched[place] = float(number)
    return fetched
