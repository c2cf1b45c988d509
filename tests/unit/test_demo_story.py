"""The demo's story does not hang on luck: it has something to pre-empt even when its sweep is over too soon."""

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from overnight.cli.demo import scenario as demo
from overnight.cli.demo.facts import Facts
from overnight.cli.demo.scenario import Scenario, demo_config
from overnight.cli.demo.story import Story
from overnight.cli.demo.view import final_page
from overnight.core.enums import DeviceState, Mode, PriorityClass, SweepState, TrialState
from overnight.core.models.api import Leaderboard, LeaderboardRow
from overnight.core.paths import Home
from overnight.core.settings import Settings


class QuickHouse:
    """A house in which the sweep has ended before anybody looked; what is proposed runs at once."""

    def __init__(self):
        self.devices = [SimpleNamespace(id=f"vm:{i}", state=DeviceState.HEALTHY) for i in range(2)]
        self.known = []

    async def sweep(self, sweep_id):
        return SimpleNamespace(state=SweepState.FINISHED)

    async def status(self):
        return SimpleNamespace(devices=self.devices, running=[t for t in self.known if t.state is TrialState.RUNNING])

    async def trials(self, **filters):
        return SimpleNamespace(items=self.known)

    async def trial(self, trial_id):
        return next(t for t in self.known if t.id == trial_id)

    async def propose(self, proposal):
        urgent = proposal.config.priority is PriorityClass.URGENT
        victims = [t for t in self.known if t.state is TrialState.RUNNING]
        if urgent and victims:
            victims[0].state, victims[0].preemptions = TrialState.QUEUED, 1
        number = len(self.known)
        made = SimpleNamespace(
            id=f"tri-{number}", name=f"digits-{number}", state=TrialState.RUNNING, priority=proposal.config.priority,
            step=5, preemptions=0, devices=(victims[0].devices if urgent and victims else (f"vm:{number % 2}",)),
        )  # fmt: skip
        self.known.append(made)
        return SimpleNamespace(trials=(made,))


def test_a_sweep_that_is_over_too_soon_is_followed_by_something_to_pre_empt(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STEP_LIMIT_SECONDS", 2.0)
    house = QuickHouse()
    config = demo_config(Path("digits.py"), "python")
    play = Scenario(house, Home(tmp_path), Story(), config, parallel=2)
    more = asyncio.run(play._urgent("swp-1"))
    assert [t.priority for t in more] == [PriorityClass.EXPLORATORY, PriorityClass.EXPLORATORY, PriorityClass.URGENT]
    assert more[0].preemptions == 1


def test_the_last_page_fits_eighty_columns(tmp_path):
    params = {"dropout": 0.285, "epochs": 8, "lr": 0.000768, "weight_decay": 0.00937, "width": 16}
    row = LeaderboardRow(
        place=1, trial_id="tri-1", trial="digits-12", state=TrialState.COMPLETED, value=0.988889, step=352, seconds=9.0,
        params=params,
    )  # fmt: skip
    board = Leaderboard(experiment="digits", metric="val_accuracy", mode=Mode.MAX, rows=(row,))
    facts = Facts(
        trials_completed=13, trials_failed=0, best=None, device_faults=1, preemptions=1, server_restarts=1,
        samples_expected=1, samples_recorded=1, samples_repeated=0, samples_skipped=0, undisturbed_match=True,
        utilization=0.9, seconds=60.0,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(final_page(facts, board, Settings(home=tmp_path)))
    page = console.file.getvalue()
    assert all(word in page for word in ("val_accuracy", "digits-12", "0.988889", "completed", "352", "dropout=0.285"))
