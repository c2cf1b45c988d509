"""The planners by name. All have one shape: a pure function of (config, objective, history, count, seed)."""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from overnight.core.errors import InvalidSpecError
from overnight.core.models.spec import Objective, SweepConfig
from overnight.planning.observations import Observation, Suggestions
from overnight.planning.space import Space, parse


class Planner(Protocol):
    """What a planner is."""

    def __call__(
        self, config: SweepConfig, objective: Objective | None, history: Sequence[Observation], count: int, seed: int
    ) -> Suggestions:
        """See :func:`propose`."""
        ...


_MODULES = {
    "random": "overnight.planning.random_search",
    "sobol": "overnight.planning.sobol",
    "tpe": "overnight.planning.tpe",
}
NAMES = tuple(_MODULES)
"""The planners that there are."""


def propose(
    config: SweepConfig, objective: Objective | None, history: Sequence[Observation], count: int, seed: int
) -> Suggestions:
    """Up to ``count`` new configurations.

    Args:
        config: The sweep: planner, space, fixed params.
        objective: What better means; None searches without direction (``min``).
        history: Every trial of the sweep, finished or not, and optionally others of the same work with negative
            numbers. No configuration in it is proposed again.
        count: How many.
        seed: With equal seed and history the answer is equal.

    Raises:
        InvalidSpecError: Unknown planner, or a space that cannot be searched.
        MissingExtraError: The planner's library is not installed.
    """
    planner = cast(Planner, import_module(_module(config)).propose)
    return planner(config, objective, history, count, seed)


def check(config: SweepConfig) -> Space:
    """The sweep's space, after the checks that need no planner library: what a server does before it accepts.

    Raises:
        InvalidSpecError: Unknown planner, or a space that cannot be searched.
    """
    _module(config)
    return parse(config)


def _module(config: SweepConfig) -> str:
    if config.planner not in _MODULES:
        raise InvalidSpecError(f"there is no planner {config.planner!r}", hint=f"Planners are: {', '.join(NAMES)}.")
    return _MODULES[config.planner]
