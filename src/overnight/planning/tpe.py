"""The planner ``tpe``: Optuna's tree-structured Parzen estimator, in memory, rebuilt from what the store knows.

Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (NeurIPS 2011); Watanabe (2023, arXiv:2304.11127) for the
multivariate form. Optuna's own storages are not used: the store is the only truth, and a study made anew for every
question cannot disagree with it. Trials still running count as poor ones (``constant_liar``), so that parallel
proposals spread out.
"""

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overnight.core.enums import Mode, TrialState
from overnight.core.errors import MissingExtraError
from overnight.core.models.spec import Objective, SweepConfig
from overnight.planning.distinct import Distinct, first_number
from overnight.planning.observations import Observation, Suggestions
from overnight.planning.space import Internal, Param, Space, parse

if TYPE_CHECKING:
    import optuna

_IDEAS = 8
"""How often the estimator is asked for one proposal before chance decides: in a small space it repeats itself."""

_RANDOM_TRIALS = 10
"""Most observations before the estimator is trusted; Optuna's default. A short sweep trusts it after a quarter."""


def propose(
    config: SweepConfig, objective: Objective | None, history: Sequence[Observation], count: int, seed: int
) -> Suggestions:
    """Configurations where good results are likelier than poor ones, given everything observed."""
    space = parse(config)
    num_random = max(3, min(_RANDOM_TRIALS, config.trials // 4))
    model = _Model(space, objective.mode if objective else Mode.MIN, seed, first_number(history), num_random)
    model.learn(history)
    distinct = Distinct(space, history, seed)
    for number in range(model.first, model.first + count):
        internal = distinct.propose(number, model.idea)
        if internal is None:
            break
        model.expect(internal)
    return distinct.suggestions(count)


class _Model:
    """One in-memory study."""

    def __init__(self, space: Space, mode: Mode, seed: int, first: int, num_random: int) -> None:
        try:
            import optuna
        except ImportError:
            raise MissingExtraError("the planner tpe", "server") from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna = optuna
        self.space = space
        self.first = first
        self.distributions = {param.name: _distribution(param) for param in space.params}
        self.open: optuna.trial.Trial | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                n_startup_trials=num_random,
                multivariate=True,
                group=any(param.condition is not None for param in space.params),
                constant_liar=True,
                seed=int(hashlib.sha256(f"{seed}/{first}".encode()).hexdigest()[:8], 16),
            )
        self.study = optuna.create_study(sampler=sampler, direction="maximize" if mode is Mode.MAX else "minimize")

    def learn(self, history: Sequence[Observation]) -> None:
        """Feeds what fits the space, in the order of numbers; failed trials say nothing about the objective."""
        for observation in sorted(history, key=lambda o: o.number):
            internal = self.space.read(observation.params)
            if internal is None:
                continue
            if observation.pending:
                self.expect(internal)
            elif observation.succeeded:
                self._add(internal, self.optuna.trial.TrialState.COMPLETE, value=observation.value)
            elif observation.state is TrialState.PRUNED and observation.intermediate:
                curve = dict(observation.intermediate)
                self._add(internal, self.optuna.trial.TrialState.PRUNED, intermediate_values=curve)

    def expect(self, internal: dict[str, Internal]) -> None:
        """A trial whose result is still to come."""
        self._add(internal, self.optuna.trial.TrialState.RUNNING)

    def idea(self, attempt: int) -> dict[str, Internal] | None:
        """One configuration; None after enough repetitions."""
        if attempt >= _IDEAS:
            return None
        trial = self.study.ask()
        internal = self.space.draw(lambda param: self._suggest(trial, param))
        # Told at once: the caller says with `expect` which idea is taken.
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return internal

    def _suggest(self, trial: "optuna.trial.Trial", param: Param) -> Internal:
        if param.size is None:
            return trial.suggest_float(param.name, param.low, param.high, log=param.log)
        if param.ordered:
            return trial.suggest_int(param.name, 0, param.size - 1)
        return int(trial.suggest_categorical(param.name, range(param.size)))

    def _add(self, internal: dict[str, Internal], state: Any, **facts: Any) -> None:
        distributions = {name: self.distributions[name] for name in internal}
        trial = self.optuna.trial.create_trial(state=state, params=dict(internal), distributions=distributions, **facts)
        self.study.add_trial(trial)


def _distribution(param: Param) -> Any:
    from optuna import distributions

    if param.size is None:
        return distributions.FloatDistribution(param.low, param.high, log=param.log)
    if param.ordered:
        return distributions.IntDistribution(0, param.size - 1)
    return distributions.CategoricalDistribution(tuple(range(param.size)))
