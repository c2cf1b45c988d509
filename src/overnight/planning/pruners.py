"""The pruners ``asha`` and ``median``: whether a trial is worth going on with, from the curves alone.

A decision is taken when a report arrives, at a rung that the report is the first to reach, without waiting for any
other trial. Curves may hold a step twice (a trial that was resumed reports it again): the newest report counts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from overnight.core.enums import Mode
from overnight.core.models.spec import Prune

Curve = Iterable[tuple[int, float]]

MEDIAN_PEERS = 5
"""Trials that must have come as far before a median means anything; Optuna's default."""


@dataclass(frozen=True)
class Decision:
    """``reason`` is one sentence for people, empty when the trial goes on."""

    stop: bool
    reason: str = ""


GO_ON = Decision(False)


def decide(prune: Prune, mode: Mode, curves: Mapping[str, Curve], trial: str, step: int) -> Decision:
    """Whether ``trial``, which has just reported at ``step``, should stop.

    Args:
        prune: The rule.
        mode: Whether smaller or larger is better.
        curves: ``(step, value)`` of every trial of the sweep in the order of reports, ``trial`` among them.
        trial: Key of the trial in ``curves``.
        step: The step of its newest report.
    """
    own = _losses(curves.get(trial, ()), mode)
    rung = _rung(prune, step)
    if step < prune.min_step or step not in own or (prune.kind == "asha" and _at_rung(own, rung) != step):
        return GO_ON
    losses = {name: _losses(curve, mode) for name, curve in curves.items()}
    if prune.kind == "median":
        return _median(losses, trial, step, mode)
    return _asha(prune, losses, own[step], rung, mode)


def _rung(prune: Prune, step: int) -> int:
    """The last rung up to a step: ``min_step`` times a power of ``reduction``."""
    rung = prune.min_step
    while rung * prune.reduction <= step:
        rung *= prune.reduction
    return rung


def _losses(curve: Curve, mode: Mode) -> dict[int, float]:
    """Step to loss (smaller is better), by rising step; what is not finite is the worst there is."""
    sign = -1.0 if mode is Mode.MAX else 1.0
    by_step = {step: sign * value if math.isfinite(value) else math.inf for step, value in curve}
    return dict(sorted(by_step.items()))


def _asha(prune: Prune, losses: Mapping[str, dict[int, float]], own: float, rung: int, mode: Mode) -> Decision:
    """Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2018,
    arXiv:1810.05934), in the form that stops instead of pausing: of those seen at a rung one in ``reduction`` goes on.
    """
    seen = sorted(curve[at] for curve in losses.values() if (at := _at_rung(curve, rung)) is not None)
    kept = max(1, len(seen) // prune.reduction)
    cutoff = seen[kept - 1]
    if own <= cutoff:
        return GO_ON
    return Decision(
        True,
        f"asha: {_shown(own, mode)} at rung {rung} is not among the best {kept} of {len(seen)} "
        f"(needed {_shown(cutoff, mode)})",
    )


def _at_rung(curve: Mapping[int, float], rung: int) -> int | None:
    """The first reported step at or after the rung."""
    return next((step for step in curve if step >= rung), None)


def _median(losses: Mapping[str, dict[int, float]], trial: str, step: int, mode: Mode) -> Decision:
    """The median stopping rule (Golovin et al., "Google Vizier", KDD 2017): the best so far against the median of the
    others' running means up to the same step.
    """
    best = min(loss for at, loss in losses[trial].items() if at <= step)
    means = [
        fmean(loss for at, loss in curve.items() if at <= step)
        for name, curve in losses.items()
        if name != trial and max(curve, default=-1) >= step and min(curve) <= step
    ]
    if len(means) < MEDIAN_PEERS or best <= (middle := median(means)):
        return GO_ON
    return Decision(
        True, f"median: {_shown(best, mode)} by step {step} is worse than {_shown(middle, mode)} of {len(means)} others"
    )


def _shown(loss: float, mode: Mode) -> str:
    if not math.isfinite(loss):
        return "no finite value"
    return f"{-loss if mode is Mode.MAX else loss:.6g}"
