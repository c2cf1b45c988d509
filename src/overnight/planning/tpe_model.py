"""One in-memory Optuna study, made for one question to the planner ``tpe``. Imports optuna: only ``tpe`` imports it."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, Trial
from optuna.trial import TrialState as StudyState

from overnight.core.enums import Mode, TrialState
from overnight.planning.observations import Observation
from overnight.planning.space import Internal, Param, Space

IDEAS = 8
"""How often the estimator is asked for one proposal before chance decides: in a small space it repeats itself."""

_SOMETIME = datetime(2000, 1, 1, tzinfo=UTC)

optuna.logging.set_verbosity(optuna.logging.ERROR)


class _Fact(FrozenTrial):
    """A trial that is handed over once and for ever.

    Optuna's storage copies each trial deeply, which is most of the cost of a study that is rebuilt for every question
    (0.65 of 1.1 ms a trial).
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class TpeModel:
    """What has been observed, and ideas for what to try next.

    Args:
        space: The search space.
        mode: Whether smaller or larger is better.
        seed: The sweep's.
        first: Number of the first proposal that will be asked for.
        num_random: Finished trials before the estimator is trusted.
    """

    def __init__(self, space: Space, mode: Mode, seed: int, first: int, num_random: int) -> None:
        self._space = space
        self._distributions = {param.name: _distribution(param) for param in space.params}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=num_random,
                multivariate=True,
                group=any(param.condition is not None for param in space.params),
                constant_liar=True,
                seed=int(hashlib.sha256(f"{seed}/{first}".encode()).hexdigest()[:8], 16),
            )
        self._study = optuna.create_study(sampler=sampler, direction="maximize" if mode is Mode.MAX else "minimize")

    def learn(self, history: Sequence[Observation]) -> None:
        """Feeds what fits the space, in the order of numbers; failed trials say nothing about the objective."""
        for observation in sorted(history, key=lambda o: o.number):
            internal = self._space.read(observation.params)
            if internal is None:
                continue
            if observation.pending:
                self.expect(internal)
            elif observation.succeeded:
                self._add(internal, StudyState.COMPLETE, value=observation.value)
            elif observation.state is TrialState.PRUNED and observation.intermediate:
                self._add(internal, StudyState.PRUNED, curve=dict(observation.intermediate))

    def expect(self, internal: Mapping[str, Internal]) -> None:
        """A trial whose result is still to come."""
        self._add(internal, StudyState.RUNNING)

    def idea(self, attempt: int) -> dict[str, Internal] | None:
        """One configuration; None after enough repetitions."""
        if attempt >= IDEAS:
            return None
        trial = self._study.ask()
        internal = self._space.draw(lambda param: _suggest(trial, param))
        # Closed at once: the caller says with `expect` which idea is taken.
        self._study.tell(trial, state=StudyState.FAIL)
        return internal

    def _add(
        self,
        internal: Mapping[str, Internal],
        state: StudyState,
        value: float | None = None,
        curve: dict[int, float] | None = None,
    ) -> None:
        fact = _Fact(
            number=-1,
            trial_id=-1,
            state=state,
            value=value,
            datetime_start=_SOMETIME,
            datetime_complete=_SOMETIME if state.is_finished() else None,
            params=dict(internal),
            distributions={name: self._distributions[name] for name in internal},
            user_attrs={},
            system_attrs={},
            intermediate_values=curve or {},
        )
        self._study.add_trial(fact)


def _suggest(trial: Trial, param: Param) -> Internal:
    if param.size is None:
        return float(trial.suggest_float(param.name, param.low, param.high, log=param.log))
    if param.ordered:
        return int(trial.suggest_int(param.name, 0, param.size - 1))
    return int(trial.suggest_categorical(param.name, range(param.size)))


def _distribution(param: Param) -> BaseDistribution:
    if param.size is None:
        return FloatDistribution(param.low, param.high, log=param.log)
    if param.ordered:
        return IntDistribution(0, param.size - 1)
    return CategoricalDistribution(tuple(range(param.size)))
