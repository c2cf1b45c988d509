"""SIGKILL for every kind of process of a house, at random moments: each trial ends as if nothing had happened."""

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from house_lab import DEADLINE_SECONDS, PRINTED, House, running_house, wait_for

from overnight.core.enums import TrialState
from overnight.core.states import END_STATES
from overnight.platform.node.held import signal_process
from overnight.platform.up import HEALTHY_SECONDS

WORKERS, PLATFORM = ("rank", "supervisor"), ("node", "zygote", "server")
NUM_CONFIGS = 4
SECONDS_PER_TRIAL = 8.0
PLAIN_HITS = 2
"""A script that saves nothing makes no progress that counts, and its backoff grows fast: it is hit no more often."""


@dataclass(frozen=True)
class Shares:
    """How often what is killed.

    Attributes:
        workers: Times for ranks and for supervisors.
        platform: Times for each other kind.
        rest_seconds: How long one of those lives at least, since `up` waits longer and longer for what dies young.
    """

    workers: int
    platform: int
    rest_seconds: float = 0.0


class Killer:
    """Kills by a seeded schedule until each kind has had its share, or no trial is left to be disturbed."""

    def __init__(self, house: House, seed: int, shares: Shares, spared: str) -> None:
        self.house = house
        self.dice = random.Random(seed)
        self.pending = [*WORKERS * (shares.workers + 1), *PLATFORM * shares.platform]
        self.dice.shuffle(self.pending)
        self._rest_seconds = shares.rest_seconds
        self._rests_until: dict[str, float] = {}
        self.done: Counter[str] = Counter()
        self._spared = spared
        self._plain_hits = 0

    def strike(self) -> None:
        """One kill, after a random pause. What cannot be found just now is put off."""
        time.sleep(self.dice.uniform(0.1, 0.6))  # the moment is the test's input, not a wait for something
        victim = self.pending.pop()
        if self._kill(victim):
            self.done[victim] += 1
        else:
            self.pending.insert(0, victim)

    def _kill(self, victim: str) -> bool:
        if victim in WORKERS:
            return self._kill_worker(victim)
        if time.monotonic() < self._rests_until.get(victim, 0.0):
            return False
        pids = self.house.zygotes() if victim == "zygote" else [self.house.pid(victim)]
        self._rests_until[victim] = time.monotonic() + self._rest_seconds
        for pid in pids:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        return bool(pids) and None not in pids

    def _kill_worker(self, victim: str) -> bool:
        running = [t for t in self.house.client.trials(limit=500).items if t.state is TrialState.RUNNING]
        if self._plain_hits >= PLAIN_HITS:
            running = [t for t in running if t.id != self._spared]
        if not running:
            return False
        trial = self.dice.choice(sorted(running, key=lambda t: t.number))
        self._plain_hits += trial.id == self._spared
        pids = self.house.pids(trial)
        signal_process(pids["supervisor"] if victim == "supervisor" else pids["ranks"][0], signal.SIGKILL)
        return True


def play(root: Path, *, seed: int, num_trials: int, shares: Shares) -> None:
    """The whole scene: trials, kills, and then all that must be true."""
    with running_house(root, "fake:4") as house:
        plain = house.submit("plain.py", {"start": 0.37}, objective=PRINTED)
        trained = [house.submit(params=params_of(n), seed=n % NUM_CONFIGS) for n in range(1, num_trials)]
        killer = Killer(house, seed, shares, plain)
        wait_for(lambda: any(t.state is TrialState.RUNNING for t in house.client.trials(limit=500).items), "it runs")
        while killer.pending and not all(t.state in END_STATES for t in house.client.trials(limit=500).items):
            killer.strike()
        trials = house.completed([plain, *trained], seconds=DEADLINE_SECONDS + SECONDS_PER_TRIAL * num_trials)
        assert not killer.pending, f"the trials ended too soon: {killer.pending} not killed"
        assert sum(trial.attempts_made - 1 for trial in trials) >= shares.workers, (
            f"too little interrupted by {killer.done}"
        )
        restarts = sum(attempt.generation - 1 for trial in trials for attempt in trial.attempts)
        assert restarts > 0, f"no ranks started again inside their attempt after {killer.done}"
        house.check_as_undisturbed(trained)
        check(house, plain)


def params_of(n: int) -> dict[str, float]:
    """A few configurations, each in several trials that only their pauses tell apart."""
    config = n % NUM_CONFIGS
    return {"lr": 0.01 * (config + 1), "width": 4 + config, "pause": 0.04 + n * 1e-6}


def check(house: House, plain: str) -> None:
    """What must be true of the house as a whole, and of the trial that knows nothing of it."""
    by_state = house.client.status().trials_by_state
    assert {state for state, count in by_state.items() if count} == {TrialState.COMPLETED}
    house.check_leases()
    (trial,) = house.completed([plain])
    house.check_ends([trial])
    assert trial.value == pytest.approx(expected_print(0.37, 100), abs=1e-9)
    house.check_mlflow([trial])


def expected_print(value: float, steps: int) -> float:
    """What plain.py computes."""
    for _ in range(steps):
        value = 3.9 * value % 1.0
    return value


@pytest.mark.timeout(400)  # deadlines are inside; a busy machine must not matter
def test_every_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    play(tmp_path, seed=1, num_trials=14, shares=Shares(workers=2, platform=2))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 6))
def test_every_process_may_be_killed_for_long(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed=seed, num_trials=120, shares=Shares(workers=30, platform=12, rest_seconds=HEALTHY_SECONDS + 2))
