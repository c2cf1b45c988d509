"""Statistics of paired windows: what a save adds to the wall, with a bound, although the machine drifts."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True)
class Bounded:
    """An estimate, and the value below which it lies with 95 % confidence."""

    value: float
    upper: float


def bounded(blocks: Sequence[dict[str, float]], statistic: Callable[[Sequence[dict[str, float]]], float]) -> Bounded:
    """A statistic of all blocks with a one-sided 95 % bound, by the percentile bootstrap over blocks.

    Source: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.

    Args:
        blocks: Each holds values that were measured side by side, by name.
        statistic: Makes a number of some blocks.
    """
    dice = random.Random(0)
    drawn = sorted(statistic(dice.choices(blocks, k=len(blocks))) for _ in range(RESAMPLES))
    return Bounded(statistic(blocks), drawn[min(RESAMPLES - 1, round(0.95 * RESAMPLES))])


def extra(blocks: Sequence[dict[str, float]], name: str, without: str = "none") -> float:
    """Mean extra wall of the windows ``name`` over those without a save in the same blocks; seconds."""
    return statistics.fmean(block[name] - block[without] for block in blocks if name in block)


def extra_over(name: str, peer: str) -> Callable[[Sequence[dict[str, float]]], float]:
    """The extra wall of one over that of another; infinite where the other's vanishes in the noise."""

    def ratio(blocks: Sequence[dict[str, float]]) -> float:
        if not any(peer in block for block in blocks):
            return float("inf")
        below = extra(blocks, peer)
        return extra(blocks, name) / below if below > 0 else float("inf")

    return ratio


def over_median(name: str, unit: str) -> Callable[[Sequence[dict[str, float]]], float]:
    """The extra wall of the windows ``name`` in units of the median of a value that each block has."""
    return lambda blocks: extra(blocks, name) / statistics.median(block[unit] for block in blocks)


def ratio_of_medians(name: str, peer: str) -> Callable[[Sequence[dict[str, float]]], float]:
    """Median over median."""

    def ratio(blocks: Sequence[dict[str, float]]) -> float:
        above, below = (statistics.median(block[key] for block in blocks) for key in (name, peer))
        return above / below

    return ratio
