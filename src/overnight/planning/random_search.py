"""The planner ``random``: independent draws, the baseline that others must beat (Bergstra and Bengio, JMLR 2012)."""

from collections.abc import Sequence

from overnight.core.models.spec import Objective, SweepConfig
from overnight.planning.distinct import Distinct, first_number, random_source
from overnight.planning.observations import Observation, Suggestions
from overnight.planning.space import parse


def propose(
    config: SweepConfig, objective: Objective | None, history: Sequence[Observation], count: int, seed: int
) -> Suggestions:
    """Uniform draws (log-uniform where asked); what has been observed matters only as "known already"."""
    space = parse(config)
    distinct = Distinct(space, history, seed)
    first = first_number(history)
    for number in range(first, first + count):
        source = random_source(seed, number, "random")
        if distinct.propose(number, lambda _, s=source: space.draw(lambda p: p.at(s.random()))) is None:  # type: ignore[misc]
            break
    return distinct.suggestions(count)
