"""The planner ``tpe``: Optuna's tree-structured Parzen estimator, in memory, rebuilt from what the store knows.

Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (NeurIPS 2011); Watanabe (2023, arXiv:2304.11127) for the
multivariate form. Optuna's own storages are not used: the store is the only truth, and a study made anew for every
question cannot disagree with it. Trials still running count as poor ones (``constant_liar``), so that parallel
proposals spread out.
"""

from collections.abc import Sequence

from overnight.core.enums import Mode
from overnight.core.errors import MissingExtraError
from overnight.core.models.spec import Objective, SweepConfig
from overnight.planning.distinct import Distinct, first_number
from overnight.planning.observations import Observation, Suggestions
from overnight.planning.space import parse

_RANDOM_TRIALS = 10
"""Most observations before the estimator is trusted; Optuna's default. A short sweep trusts it after a quarter."""


def propose(
    config: SweepConfig, objective: Objective | None, history: Sequence[Observation], count: int, seed: int
) -> Suggestions:
    """Configurations where good results are likelier than poor ones, given everything observed."""
    try:
        from overnight.planning.tpe_model import TpeModel
    except ImportError:
        raise MissingExtraError("the planner tpe", "server") from None
    space = parse(config)
    first = first_number(history)
    num_random = max(3, min(_RANDOM_TRIALS, config.trials // 4))
    model = TpeModel(space, objective.mode if objective else Mode.MIN, seed, first, num_random)
    model.learn(history)
    distinct = Distinct(space, history, seed)
    for number in range(first, first + count):
        internal = distinct.propose(number, model.idea)
        if internal is None:
            break
        model.expect(internal)
    return distinct.suggestions(count)
