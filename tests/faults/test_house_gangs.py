"""Gangs in a real house: they live and die together, end with the same bits, and get their turn."""

import os
import signal
from collections.abc import Iterator

import pytest
from house_lab import House, running_house, wait_for

from overnight.core.enums import Outcome, TrialState
from overnight.core.models.spec import Compute


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("house"), "fake:3") as made:
        yield made
        made.check_leases()


def test_a_gang_that_loses_a_rank_is_ended_and_retried_as_a_whole(house: House) -> None:
    gang = house.submit(seed=21, compute=Compute(gpus=2))
    saved = house.until_saved(gang)
    pids = house.pids(saved)
    assert len(pids["ranks"]) == len(saved.devices) == 2
    os.kill(pids["ranks"][1].pid, signal.SIGKILL)
    wait_for(lambda: not any(one.alive() for one in pids["ranks"]), "the other rank is ended too", 30)
    (trial,) = house.completed([gang])
    assert trial.attempts_made == 2, house.story(trial)
    lost = trial.attempts[0]
    assert lost.outcome is Outcome.INFRA_FAULT and lost.exit_codes[1] == -signal.SIGKILL, house.story(trial)
    assert min(c.step for c in trial.checkpoints if c.attempt == 2) > saved.checkpoints[-1].step, "it started over"
    house.check_as_undisturbed([gang])


def test_a_gang_is_not_starved_by_small_trials(house: House) -> None:
    small = {"objective": None, "experiment": "small"}
    early = [house.submit("plain.py", {"steps": 30 + 20 * n}, **small) for n in range(3)]
    for trial_id in early:
        house.until(trial_id, lambda t: t.state is not TrialState.QUEUED, "every device is busy")
    gang = house.submit("plain.py", {"steps": 10}, objective=None, compute=Compute(gpus=3))
    late = [house.submit("plain.py", {"steps": 5, "start": n}, **small) for n in range(9)]
    house.completed([*early, gang, *late])
    starts = [e.trial_id for e in house.events() if e.kind == "trial.state" and e.after == TrialState.STARTING]
    order = [trial_id for trial_id in starts if trial_id == gang or trial_id in late]
    assert order.index(gang) == 0, "a small trial that came later passed it"
