"""What a planner is given and what it answers: plain values, so that a planner can live in any process."""

import math
from dataclasses import dataclass, field
from typing import Any

from overnight.core.enums import TrialState
from overnight.core.models.spec import Objective, SweepConfig
from overnight.core.states import END_STATES


@dataclass(frozen=True)
class Observation:
    """A trial as a planner sees it.

    Attributes:
        number: Its number in the sweep, from 0; negative for a trial of the same work outside this sweep.
        params: As the trial has them.
        state: Where the trial is.
        value: The objective so far; None if never reported or not finite.
        intermediate: ``(step, value)`` in rising order of step.
    """

    number: int
    params: dict[str, Any]
    state: TrialState
    value: float | None = None
    intermediate: tuple[tuple[int, float], ...] = ()

    @property
    def pending(self) -> bool:
        """Whether its final value is still to come."""
        return self.state not in END_STATES

    @property
    def succeeded(self) -> bool:
        """Whether it ran to its end and has a finite value."""
        return self.state is TrialState.COMPLETED and self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True)
class Suggestions:
    """The planner's answer.

    Attributes:
        params: Canonical configurations, all new; fewer than asked for only when exhausted.
        exhausted: The space holds no configuration beyond those known and these.
    """

    params: list[dict[str, Any]]
    exhausted: bool


@dataclass(frozen=True)
class Request:
    """One question to a planner."""

    config: SweepConfig
    objective: Objective | None
    history: list[Observation] = field(default_factory=list)
    count: int = 1
    seed: int = 0

    def to_wire(self) -> dict[str, Any]:
        """JSON-able form. Curves travel only for pruned trials: no planner here reads others."""
        return {
            "config": self.config.model_dump(mode="json"),
            "objective": self.objective.model_dump(mode="json") if self.objective else None,
            "history": [_pack(observation) for observation in self.history],
            "count": self.count,
            "seed": self.seed,
        }

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "Request":
        """The opposite of :meth:`to_wire`."""
        return cls(
            config=SweepConfig.model_validate(data["config"]),
            objective=Objective.model_validate(data["objective"]) if data["objective"] else None,
            history=[
                Observation(number, params, TrialState(state), value, tuple((s, v) for s, v in curve))
                for number, params, state, value, curve in data["history"]
            ],
            count=data["count"],
            seed=data["seed"],
        )


def _pack(observation: Observation) -> list[Any]:
    value = observation.value
    if value is not None and not math.isfinite(value):
        value = None
    curve = observation.intermediate if observation.state is TrialState.PRUNED else ()
    finite = [[step, v] for step, v in curve if math.isfinite(v)]
    return [observation.number, observation.params, observation.state.value, value, finite]
