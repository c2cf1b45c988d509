"""Planners: the same answer for the same history, never a configuration twice, exhausted spaces, poison-proof."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.core.canonical import canonical_json
from overnight.core.enums import Mode, TrialState
from overnight.core.errors import InvalidSpecError
from overnight.core.models.spec import Distribution, Objective, SweepConfig
from overnight.planning import planners
from overnight.planning.observations import Observation, Request, Suggestions
from overnight.planning.planners import NAMES, propose

LOSS = Objective(metric="loss", mode=Mode.MIN)


def config(planner: str, space: dict[str, dict[str, Any]] | None = None, **more: Any) -> SweepConfig:
    space = space or {
        "lr": {"kind": "log", "low": 1e-5, "high": 1.0},
        "width": {"kind": "int", "low": 8, "high": 64, "step": 8},
        "act": {"kind": "choice", "choices": ("relu", "gelu")},
    }
    return SweepConfig(planner=planner, space={k: Distribution(**v) for k, v in space.items()}, **more)


SMALL = {
    "a": {"kind": "int", "low": 0, "high": 4},
    "b": {"kind": "choice", "choices": ("x", "y", "z")},
    "c": {"kind": "range", "low": 0, "high": 0.1, "step": 0.1, "when": 'b == "x"'},
}
SMALL_SIZE = 5 * (2 + 2)


def finished(number: int, params: dict[str, Any], value: float | None) -> Observation:
    return Observation(number, params, TrialState.COMPLETED, value)


def loss(params: dict[str, Any]) -> float:
    return (math.log10(params["lr"]) + 3) ** 2 + params["width"] / 64 + (params["act"] == "relu")


def search(planner: str, num_trials: int, seed: int, parallel: int = 4) -> list[Observation]:
    """A sweep with `parallel` trials pending, one new proposal per finished one."""
    history: list[Observation] = []
    while len(history) < num_trials:
        pending = [o for o in history if o.pending]
        if len(pending) == parallel:
            done = pending[0]
            history[done.number] = finished(done.number, done.params, loss(done.params))
            continue
        new = propose(config(planner, trials=num_trials), LOSS, history, 1, seed).params[0]
        history.append(Observation(len(history), new, TrialState.RUNNING))
    return [finished(o.number, o.params, loss(o.params)) for o in history]


@pytest.mark.parametrize("planner", NAMES)
def test_equal_history_and_seed_give_equal_answers(planner: str) -> None:
    history = search(planner, 16, seed=3)
    answers = [propose(config(planner), LOSS, history, 3, 3) for _ in range(2)]
    assert answers[0] == answers[1]
    assert propose(config(planner), LOSS, history, 3, 4) != answers[0]
    assert propose(config(planner), LOSS, list(reversed(history)), 3, 3) == answers[0]


@pytest.mark.parametrize("planner", NAMES)
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_a_small_space_is_tried_once_each_and_then_exhausted(planner: str, batch: int) -> None:
    history: list[Observation] = []
    for _ in range(SMALL_SIZE + 1):
        found = propose(config(planner, SMALL), LOSS, history, batch, 0)
        history += [finished(len(history) + i, params, float(i)) for i, params in enumerate(found.params)]
        if found.exhausted:
            break
    assert found.exhausted
    assert len(history) == SMALL_SIZE
    assert len({canonical_json(o.params) for o in history}) == SMALL_SIZE
    assert propose(config(planner, SMALL), LOSS, history, 2, 0) == Suggestions([], True)


@pytest.mark.parametrize("planner", NAMES)
def test_the_last_configuration_of_a_large_grid_is_found(planner: str) -> None:
    space = {"a": {"kind": "int", "low": 0, "high": 999}}
    history = [finished(i, {"a": i}, 0.0) for i in range(1000) if i != 617]
    assert propose(config(planner, space), LOSS, history, 1, 0) == Suggestions([{"a": 617}], True)


@pytest.mark.parametrize("planner", NAMES)
def test_a_space_of_one_point(planner: str) -> None:
    space = {"a": {"kind": "range", "low": 0.5, "high": 0.5}}
    assert propose(config(planner, space), LOSS, [], 4, 0) == Suggestions([{"a": 0.5}], True)


@pytest.mark.parametrize("planner", NAMES)
def test_what_failed_does_not_poison(planner: str) -> None:
    good = search(planner, 12, seed=0)
    lr = 1e-2
    bad = [
        Observation(12, {"lr": lr, "width": 8, "act": "relu"}, TrialState.COMPLETED, float("nan")),
        Observation(13, {"lr": lr, "width": 16, "act": "relu"}, TrialState.COMPLETED, float("-inf")),
        Observation(14, {"lr": lr, "width": 24, "act": "relu"}, TrialState.FAILED, -1e9),
        Observation(15, {"lr": lr, "width": 32, "act": "relu"}, TrialState.CANCELLED, -1e9),
        Observation(16, {"lr": lr, "width": 40, "act": "relu"}, TrialState.COMPLETED, None),
        Observation(17, {"lr": lr, "width": 48, "act": "relu"}, TrialState.PRUNED, None, ((1, float("nan")),)),
        Observation(18, {"unknown": True}, TrialState.COMPLETED, 0.1),
    ]
    found = propose(config(planner), LOSS, good + bad, 2, 0)
    assert len(found.params) == 2
    without = [Observation(o.number, o.params, TrialState.FAILED) for o in bad]
    if planner == "tpe":  # only what it may learn from decides
        assert found == propose(config(planner), LOSS, good + without, 2, 0)


@pytest.mark.parametrize("planner", NAMES)
def test_trials_of_other_sweeps_count_as_known_but_not_as_numbers(planner: str) -> None:
    first = propose(config(planner), LOSS, [], 1, 0).params[0]
    foreign = [Observation(-1, first, TrialState.COMPLETED, 0.5)]
    second = propose(config(planner), LOSS, foreign, 1, 0).params[0]
    assert second != first


def test_tpe_finds_better_results_than_chance() -> None:
    def mean_best(planner: str) -> float:
        return sum(min(loss(o.params) for o in search(planner, 40, seed)) for seed in range(4)) / 4

    assert mean_best("tpe") < mean_best("random")


def test_tpe_learns_which_way_is_better() -> None:
    history = [finished(i, {"x": i / 40}, i / 40) for i in range(40)]
    space = {"x": {"kind": "range", "low": 0, "high": 1}}
    low = propose(config("tpe", space), Objective(metric="m", mode=Mode.MIN), history, 8, 0).params
    high = propose(config("tpe", space), Objective(metric="m", mode=Mode.MAX), history, 8, 0).params
    assert sum(p["x"] for p in low) < sum(p["x"] for p in high)


def test_sobol_covers_evenly() -> None:
    space = {"x": {"kind": "range", "low": 0, "high": 1}, "y": {"kind": "range", "low": 0, "high": 1}}
    points = propose(config("sobol", space), None, [], 64, 5).params
    cells = {(int(p["x"] * 8), int(p["y"] * 8)) for p in points}
    assert len(cells) == 64


@pytest.mark.parametrize("planner", NAMES)
def test_fixed_params_are_in_every_configuration(planner: str) -> None:
    found = propose(config(planner, fixed={"model": {"depth": 2.0}}), None, [], 2, 0)
    assert all(p["model"] == {"depth": 2} and type(p["model"]["depth"]) is int for p in found.params)


def test_an_unknown_planner_is_named_with_those_there_are() -> None:
    with pytest.raises(InvalidSpecError, match="no planner 'grid'") as caught:
        planners.check(config("grid"))
    assert "tpe" in caught.value.hint


observations = st.builds(
    Observation,
    st.integers(-5, 50),
    st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.sampled_from("xyz")}),
    st.sampled_from(TrialState),
    st.none() | st.floats(),
    st.lists(st.tuples(st.integers(0, 9), st.floats())).map(tuple),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(observations, max_size=30), st.integers(1, 4), st.sampled_from(NAMES))
def test_any_history_survives_the_wire_and_is_never_repeated(
    history: list[Observation], count: int, planner: str
) -> None:
    request = Request(config(planner, SMALL), LOSS, history, count, 1)
    back = Request.from_wire(json.loads(json.dumps(request.to_wire(), allow_nan=False)))
    found = propose(back.config, back.objective, back.history, count, 1)
    known = {canonical_json(o.params) for o in history}
    keys = [canonical_json(p) for p in found.params]
    assert len(set(keys)) == len(keys)
    assert not known & set(keys)
    assert len(keys) == count or found.exhausted
    assert found == propose(request.config, request.objective, history, count, 1)
