"""Which trial is better: one order for leaderboards, sweeps and planners, in which what is not finite comes last."""

import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

from overnight.core.enums import Mode

T = TypeVar("T")


def finite(value: float | None) -> float | None:
    """The value, or None when it is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def reduce(values: Iterable[float | None], mode: Mode, how: Literal["best", "last"]) -> float | None:
    """One value of a trial from its reports, in their order.

    Args:
        values: As reported; what is not finite is passed over by ``best``, and makes ``last`` None when it is the last.
        mode: Whether smaller or larger is better.
        how: ``best`` over the trial's life, or the ``last`` one.
    """
    reported = list(values)
    if how == "last":
        return finite(reported[-1]) if reported else None
    good = [value for value in map(finite, reported) if value is not None]
    return (max(good) if mode is Mode.MAX else min(good)) if good else None


def better(value: float | None, than: float | None, mode: Mode) -> bool:
    """Whether a value strictly beats another; nothing finite beats nothing."""
    value, than = finite(value), finite(than)
    if value is None or than is None:
        return value is not None
    return value > than if mode is Mode.MAX else value < than


def reaches(value: float | None, target: float, mode: Mode) -> bool:
    """Whether a value is as good as a target."""
    value = finite(value)
    return value is not None and (value >= target if mode is Mode.MAX else value <= target)


def leaderboard(trials: Iterable[T], mode: Mode, value: Callable[[T], float | None]) -> list[T]:
    """Best first; ties keep the given order; trials without a finite value come last."""

    def rank(trial: T) -> tuple[bool, float]:
        found = finite(value(trial))
        return (found is None, 0.0 if found is None else -found if mode is Mode.MAX else found)

    return sorted(trials, key=rank)
