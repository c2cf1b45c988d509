"""Never the same configuration twice: what every planner draws through, since no sampler promises it by itself."""

import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from overnight.core.canonical import canonical_json
from overnight.planning.observations import Observation, Suggestions
from overnight.planning.space import Internal, Space

_BLIND_DRAWS = 32
"""After so many known configurations in a row, a finite space is searched for what is left instead."""

_ENDLESS_DRAWS = 1_000
"""A continuous space that repeats itself so often has conditions that leave a few points only."""

_LEFT_SHOWN = 1_000

Draw = Callable[[int], dict[str, Internal] | None]
"""``draw(attempt)`` is one configuration, or None when the planner has no other idea."""


def random_source(seed: int, number: int, purpose: str) -> random.Random:
    """The generator for one proposal: a function of the sweep's seed and the proposal's number alone."""
    return random.Random(f"{seed}/{number}/{purpose}")


def first_number(history: Sequence[Observation]) -> int:
    """The number of the next proposal."""
    return 1 + max((-1, *(observation.number for observation in history)))


class Distinct:
    """The configurations known so far, and the way to a new one.

    Args:
        space: Where configurations come from.
        history: All that were ever proposed, finished or not.
        seed: The sweep's.
    """

    def __init__(self, space: Space, history: Sequence[Observation], seed: int) -> None:
        self.space = space
        self.seed = seed
        self._known = {canonical_json(observation.params) for observation in history}
        self.params: list[dict[str, Any]] = []

    def propose(self, number: int, draw: Draw) -> dict[str, Internal] | None:
        """A new configuration, remembered; None when the space holds no other.

        Args:
            number: The proposal's number.
            draw: The planner's own idea, asked until it is new or it gives up.
        """
        for attempt in range(_ENDLESS_DRAWS if self.space.size is None else _BLIND_DRAWS):
            internal = draw(attempt)
            if internal is None:
                break
            if self._take(internal):
                return internal
        return self._uniform(number)

    def suggestions(self, count: int) -> Suggestions:
        """What was proposed. Exhausted also when the last new one was the space's last."""
        exhausted = len(self.params) < count
        if not exhausted and self.space.size is not None and self.space.size <= len(self._known):
            exhausted = not self._left(1)
        return Suggestions(self.params, exhausted)

    def _uniform(self, number: int) -> dict[str, Internal] | None:
        source = random_source(self.seed, number, "distinct")
        for _ in range(_ENDLESS_DRAWS if self.space.size is None else _BLIND_DRAWS):
            internal = self.space.draw(lambda param: param.at(source.random()))
            if self._take(internal):
                return internal
        if self.space.size is None:
            return None
        left = self._left(_LEFT_SHOWN)
        if not left:
            return None
        internal = source.choice(left)
        self._take(internal)
        return internal

    def _left(self, limit: int) -> list[dict[str, Internal]]:
        configurations = self.space.configurations()
        return list(islice((c for c in configurations if self._key(c) not in self._known), limit))

    def _key(self, internal: dict[str, Internal]) -> str:
        return canonical_json(self.space.build(internal))

    def _take(self, internal: dict[str, Internal]) -> bool:
        key = self._key(internal)
        if key in self._known:
            return False
        self._known.add(key)
        self.params.append(self.space.build(internal))
        return True
