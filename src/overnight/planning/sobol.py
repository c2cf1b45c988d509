"""The planner ``sobol``: a scrambled low-discrepancy sequence, which covers a space more evenly than chance does.

Sobol (1967), scrambled as by Owen (1998) and Matousek (1998), from ``scipy.stats.qmc``. One coordinate per param, also
for params that do not exist in every configuration, so that a point never depends on the order of results.
"""

from collections.abc import Callable, Sequence

from overnight.core.errors import InvalidSpecError, MissingExtraError
from overnight.core.models.spec import Objective, SweepConfig
from overnight.planning.distinct import Distinct, first_number
from overnight.planning.observations import Observation, Suggestions
from overnight.planning.space import Internal, Space, parse

MAX_DIMENSIONS = 21_201
"""Direction numbers exist up to here (Joe and Kuo 2008, the table that scipy ships)."""


def propose(
    config: SweepConfig, objective: Objective | None, history: Sequence[Observation], count: int, seed: int
) -> Suggestions:
    """The next points of the sweep's sequence; a point whose configuration is known is passed over."""
    space = parse(config)
    distinct = Distinct(space, history, seed)
    first = first_number(history)
    draw = _sequence(space, seed, first)
    for number in range(first, first + count):
        if distinct.propose(number, draw) is None:
            break
    return distinct.suggestions(count)


def _sequence(space: Space, seed: int, start: int) -> Callable[[int], dict[str, Internal]]:
    try:
        from scipy.stats import qmc  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError("the planner sobol", "server") from None
    if len(space.params) > MAX_DIMENSIONS:
        raise InvalidSpecError(
            f"sobol has at most {MAX_DIMENSIONS} params, not {len(space.params)}", hint="Use random or tpe."
        )
    engine = qmc.Sobol(len(space.params), scramble=True, rng=seed)
    if start:
        engine.fast_forward(start)
    place = {param.name: at for at, param in enumerate(space.params)}

    def draw(_: int) -> dict[str, Internal]:
        point = engine.random(1)[0]
        return space.draw(lambda param: param.at(float(point[place[param.name]])))

    return draw
