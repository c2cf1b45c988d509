"""Drives the demo against a real server: submits, breaks a device, kills the server, and waits for what must follow.

Everything goes through the HTTP API, as a user's would, save for the two acts of violence: the fault script of the fake
devices and the SIGKILL of the server.
"""

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from overnight.agents.client import AsyncClient
from overnight.cli.demo.facts import Facts, collect
from overnight.cli.demo.story import Story
from overnight.core.enums import DeviceState, Mode, PriorityClass, RunKind, SweepState, TrialState
from overnight.core.errors import OvernightError, UnavailableError
from overnight.core.models.api import Event, ProposalIn, Status, SweepIn, Trial
from overnight.core.models.spec import Command, Distribution, Objective, SweepConfig, TrialConfig
from overnight.core.paths import Home
from overnight.core.states import END_STATES
from overnight.testing.faults import FaultScript

T = TypeVar("T")

LOOK_SECONDS = 0.15
STEP_LIMIT_SECONDS = 300.0
MAX_URGENT = 3

SPACE = {
    "lr": Distribution(kind="log", low=3e-4, high=3e-2),
    "width": Distribution(kind="choice", choices=(8, 16, 24)),
    "dropout": Distribution(kind="range", low=0.0, high=0.5),
    "weight_decay": Distribution(kind="log", low=1e-6, high=1e-2),
}


class DemoStuckError(OvernightError):
    """Something that must happen did not."""

    code = "demo_stuck"


@dataclass
class Scenario:
    """One performance.

    Attributes:
        num_trials: Trials of the sweep.
        epochs: Epochs of each.
    """

    client: AsyncClient
    home: Home
    story: Story
    config: TrialConfig
    num_trials: int = 12
    parallel: int = 4
    epochs: int = 8
    _began: float = field(default_factory=time.monotonic)

    async def play(self) -> Facts:
        """Runs the whole story and returns its figures.

        Raises:
            DemoStuckError: A beat did not come to its end in time.
        """
        await self._start()
        sweep_id = await self._sweep()
        await self._break_a_device(sweep_id)
        more = await self._urgent(sweep_id)
        await self._kill_the_server()
        trials = await self._finish(sweep_id, more)
        interrupted, rerun = await self._prove(trials)
        seconds = time.monotonic() - self._began
        status = await self.client.status()
        return collect(trials, interrupted, rerun, status.devices, await self._all_events(), seconds)

    async def _start(self) -> None:
        self.story.begin("start")
        status = await self._until("the server answers with four devices", self._devices_ready)
        self.story.done("start", f"{len(status.devices)} devices, after {time.monotonic() - self._began:.1f} s")

    async def _devices_ready(self) -> Status | None:
        status = await self.client.status()
        return status if len(status.devices) >= self.parallel else None

    async def _sweep(self) -> str:
        self.story.begin("sweep")
        sweep = await self.client.start_sweep(
            SweepIn(
                config=self.config.model_copy(update={"priority": PriorityClass.EXPLORATORY}),
                sweep=SweepConfig(
                    planner="tpe",
                    trials=self.num_trials,
                    parallel=self.parallel,
                    space=SPACE,
                    fixed={"epochs": self.epochs},
                    seed=7,
                ),
            )
        )
        await self._until("four trials run", lambda: self._running(sweep.id, self.parallel))
        self.story.note("sweep", f"{self.parallel} trials train at the same time")
        return sweep.id

    async def _running(self, sweep_id: str, at_least: int) -> list[Trial] | None:
        trials = [t for t in await self._trials(sweep_id) if t.state is TrialState.RUNNING]
        return trials if len(trials) >= at_least else None

    async def _break_a_device(self, sweep_id: str) -> None:
        victim = await self._until("a running trial has committed a checkpoint", lambda: self._saved(sweep_id))
        device_id = victim.devices[0]
        index = next(d.index for d in (await self.client.status()).devices if d.id == device_id)
        self.story.begin("fault", f"device {index} reports Xid 48 under {victim.name}")
        FaultScript(self.home).fail(index, cause="xid_48")
        await self._until("the device is quarantined", lambda: self._quarantined(device_id))
        self.story.note("fault", f"device {index} is quarantined, {victim.name} is back in the queue")
        again = await self._until("its trial runs elsewhere", lambda: self._resumed(victim))
        self.story.done("fault", f"device {index} is quarantined; {again.name} goes on, attempt {again.attempts_made}")

    async def _saved(self, sweep_id: str) -> Trial | None:
        for trial in await self._trials(sweep_id):
            if trial.state is TrialState.RUNNING and trial.attempts_made == 1:
                whole = await self.client.trial(trial.id)
                if whole.checkpoints and whole.state is TrialState.RUNNING and whole.devices:
                    return whole
        return None

    async def _quarantined(self, device_id: str) -> bool:
        devices = (await self.client.status()).devices
        return any(d.id == device_id and d.state is DeviceState.QUARANTINED for d in devices)

    async def _resumed(self, victim: Trial) -> Trial | None:
        trial = await self.client.trial(victim.id)
        moved = trial.attempts_made > victim.attempts_made and trial.state is not TrialState.STARTING
        return trial if moved or trial.state in END_STATES else None

    async def _urgent(self, sweep_id: str) -> list[Trial]:
        """Submits an urgent trial while every device is busy; again if a device came free in that very moment.

        Returns:
            The trials that this put beside the sweep's.
        """
        self.story.begin("urgent")
        more: list[Trial] = []
        for number in range(MAX_URGENT):
            busy = "every device is busy and will be for a while"
            if await self._until(busy, lambda: self._busy_or_over(sweep_id)) == "over":
                more += await self._occupy(number)
            newest = await self._submit(
                PriorityClass.URGENT, epochs=3 + number, lr=0.004, note="Somebody waits for it."
            )
            more.append(newest)
            self.story.note("urgent", f"{newest.name} is urgent and every device is busy")
            await self._until("the urgent trial runs", partial(self._has_started, newest))
            yielded = [t.name for t in await self._trials(None) if t.preemptions]
            if yielded:
                self.story.done("urgent", f"{newest.name} runs; {', '.join(yielded)} yielded and waits its turn")
                break
        return more

    async def _busy_or_over(self, sweep_id: str) -> str | None:
        """``busy`` when every device is; ``over`` when the sweep is, so that none will be; None until then."""
        if await self._all_busy():
            return "busy"
        return "over" if (await self.client.sweep(sweep_id)).state is not SweepState.ACTIVE else None

    async def _occupy(self, number: int) -> list[Trial]:
        """A sweep that was over too soon for the story is followed by a few longer trials."""
        rates = [0.01 / (1 + place + self.parallel * number) for place in range(self.parallel)]
        more = [await self._submit(PriorityClass.EXPLORATORY, epochs=4 * self.epochs, lr=rate) for rate in rates]
        await self._until("every device is busy and will be for a while", self._all_busy)
        return more

    async def _submit(self, priority: PriorityClass, *, epochs: int, lr: float, note: str = "") -> Trial:
        config = self.config.model_copy(update={"priority": priority})
        params = {"epochs": epochs, "lr": lr, "width": 16}
        return (await self.client.propose(ProposalIn(config=config, params=params, note=note))).trials[0]

    async def _all_busy(self) -> bool:
        """Whether each healthy device runs an exploratory trial that is not yet half done."""
        status = await self.client.status()
        healthy = {d.id for d in status.devices if d.state is DeviceState.HEALTHY}
        whole = max((t.step for t in await self._trials(None) if t.state is TrialState.COMPLETED), default=math.inf)
        busy = {
            device
            for trial in status.running
            if trial.state is TrialState.RUNNING and trial.priority is PriorityClass.EXPLORATORY
            if 0 < trial.step < whole / 2
            for device in trial.devices
        }
        return bool(healthy) and healthy <= busy

    async def _has_started(self, trial: Trial) -> bool:
        return (await self.client.trial(trial.id)).state in {TrialState.RUNNING, *END_STATES}

    async def _kill_the_server(self) -> None:
        running = (await self.client.status()).running
        server = json.loads(self.home.server_file.read_text())
        before = sum(t.step for t in await self._trials(None))
        self.story.begin("kill", f"pid {server['pid']} is gone; the workers of {len(running)} trials do not notice")
        began = time.monotonic()
        os.kill(server["pid"], signal.SIGKILL)
        status = await self._until("a new server answers", lambda: self._other_server(server["pid"]))
        away = time.monotonic() - began
        after = sum(t.step for t in await self._trials(None))
        self.story.done(
            "kill", f"back after {away:.1f} s as pid {status.pid}; {after - before} steps came in late, none lost"
        )

    async def _other_server(self, pid: int) -> Status | None:
        status = await self.client.status()
        return status if status.pid != pid else None

    async def _finish(self, sweep_id: str, more: Sequence[Trial]) -> list[Trial]:
        self.story.begin("finish")

        async def over() -> bool:
            sweep = await self.client.sweep(sweep_id)
            trials = [*await self._trials(sweep_id), *[await self.client.trial(t.id) for t in more]]
            ended = sum(t.state in END_STATES for t in trials)
            best = f", best so far {sweep.best.value:.4f}" if sweep.best and sweep.best.value is not None else ""
            self.story.note("sweep", f"{ended} of {self.num_trials + len(more)} trials have ended{best}")
            return sweep.state is not SweepState.ACTIVE and ended == len(trials)

        await self._until("the sweep ends", over)
        trials = [await self.client.trial(t.id) for t in [*await self._trials(sweep_id), *more]]
        completed = sum(t.state is TrialState.COMPLETED for t in trials)
        self.story.done("sweep")
        self.story.done("finish", f"{completed} of {len(trials)} trials completed")
        return trials

    async def _prove(self, trials: Sequence[Trial]) -> tuple[Trial | None, Trial | None]:
        hit = [t for t in trials if t.attempts_made > 1 and t.state is TrialState.COMPLETED]
        if not hit:
            self.story.done("proof", "no completed trial was interrupted: nothing to compare")
            return None, None
        interrupted = max(hit, key=lambda t: t.attempts_made)
        self.story.begin("proof", f"{interrupted.name} was interrupted {interrupted.attempts_made - 1} times")
        order = json.loads((Path(interrupted.attempts[0].dir or "") / "order.json").read_text())
        config = interrupted.config.model_copy(
            update={"experiment": "proof", "seed": order["seed"], "priority": PriorityClass.URGENT}
        )
        proposal = await self.client.propose(ProposalIn(config=config, params=interrupted.params))
        twin = proposal.trials[0]

        async def ended() -> Trial | None:
            trial = await self.client.trial(twin.id)
            self.story.note(
                "proof", f"{trial.name} repeats {interrupted.name}: step {trial.step} of {interrupted.step}"
            )
            return trial if trial.state in END_STATES else None

        rerun = await self._until("the rerun ends", ended)
        self.story.done("proof")
        return interrupted, rerun

    async def _trials(self, sweep_id: str | None) -> list[Trial]:
        page = await self.client.trials(sweep=sweep_id, experiment=self.config.experiment, limit=500)
        return list(page.items)

    async def _all_events(self) -> list[Event]:
        found: list[Event] = []
        while True:
            page = await self.client.event_page(after=found[-1].seq if found else 0, limit=1000)
            found.extend(page.items)
            if page.cursor is None or not page.items:
                return found

    async def _until(self, what: str, look: Callable[[], Awaitable[T | None]]) -> T:
        """Looks until the answer is true; a server that is away is looked for again."""
        deadline = time.monotonic() + STEP_LIMIT_SECONDS
        problem = ""
        while time.monotonic() < deadline:
            try:
                if found := await look():
                    return found
            except UnavailableError as error:
                problem = f" The server said: {error.message}"
            await asyncio.sleep(LOOK_SECONDS)
        raise DemoStuckError(
            f"Waited {STEP_LIMIT_SECONDS:.0f} s and saw no sign that {what}.{problem}",
            hint=f"The logs are in {self.home.logs}. Please report them: this is a fault of overnight.",
        )


def demo_config(script: Path, python: str) -> TrialConfig:
    """What every trial of the demo runs."""
    return TrialConfig(
        experiment="digits",
        run=Command(kind=RunKind.SCRIPT, target=script.name),
        python=python,
        workdir=str(script.parent),
        objective=Objective(metric="val_accuracy", mode=Mode.MAX),
    )
