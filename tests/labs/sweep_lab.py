"""A real store and a stand-in for devices: starts queued trials and lets them end as the test says."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from overnight.core.clock import Clock
from overnight.core.enums import Mode, Outcome, RunKind, TrialState
from overnight.core.errors import OvernightError
from overnight.core.ids import new_id
from overnight.core.models.api import Node, Proposal, ProposalIn, Sweep, SweepIn
from overnight.core.models.node import DeviceReport, NodeHello, SpoolEvent
from overnight.core.models.spec import Command, Distribution, Objective, Prune, Schedule, SweepConfig, TrialConfig
from overnight.core.settings import Settings
from overnight.platform.sweeps.planner import PlannerProcess
from overnight.platform.sweeps.service import SweepService
from overnight.store import attempts, nodes, proposals, searches, spool, sweeps, transitions, trials
from overnight.store.engine import Store
from overnight.testing.clock import FakeClock

S = TrialState
LOSS = Objective(metric="loss", mode=Mode.MIN)
SMALL = {"a": Distribution(kind="int", low=0, high=3), "b": Distribution(kind="choice", choices=("x", "y"))}
WIDE = {"x": Distribution(kind="range", low=0, high=1), "lr": Distribution(kind="log", low=1e-5, high=1)}


def sweep_in(
    planner: str = "random",
    space: dict[str, Distribution] | None = None,
    *,
    trials: int = 8,
    parallel: int = 2,
    schedule: Schedule | None = None,
    prune: Prune | None = None,
    objective: Objective | None = LOSS,
    experiment: str = "digits",
    **more: Any,
) -> SweepIn:
    config = TrialConfig(
        experiment=experiment, run=Command(kind=RunKind.COMMAND, target="true"), workdir="/", objective=objective
    )
    sweep = SweepConfig(planner=planner, space=space or WIDE, trials=trials, parallel=parallel, prune=prune, **more)
    return SweepIn(config=config, sweep=sweep, schedule=schedule)


@dataclass
class Lab:
    """A home with a store, and everything that a test does to it."""

    home: Path
    clock: FakeClock = field(default_factory=FakeClock)
    submitted: list[str] = field(default_factory=list)
    most_open: int = 0
    node: Node | None = None
    num_begun: int = 0

    def __post_init__(self) -> None:
        self.settings = Settings(home=self.home)
        self.store = Store.open(self.settings.effective_store_url, self.clock)

    async def submit(self, actor: str, items: Sequence[ProposalIn]) -> list[Proposal | OvernightError]:
        now = self.clock.now()
        answers = await self.store.awrite(
            lambda conn: proposals.accept_many(conn, ids=new_id, now=now, actor=actor, proposals=items)
        )
        self.submitted += [item.key or "" for item in items]
        return answers

    @asynccontextmanager
    async def service(self, planner: PlannerProcess | None = None, clock: Clock | None = None):
        service = SweepService(self.store, self.settings, clock or self.clock, self.submit, planner)
        async with service:
            yield service

    def sweep(self, sweep_id: str) -> Sweep:
        with self.store.read() as conn:
            return sweeps.get(conn, sweep_id)

    def sweeps(self) -> list[Sweep]:
        with self.store.read() as conn:
            return sweeps.list_(conn)

    def trials(self, sweep_id: str) -> list[searches.SearchTrial]:
        with self.store.read() as conn:
            return [a.trial for a in searches.asked(conn, sweep_id) if a.trial is not None]

    def of_state(self, sweep_id: str, *states: TrialState) -> list[searches.SearchTrial]:
        return [t for t in self.trials(sweep_id) if t.state in states]

    def move(self, trial_id: str, *states: TrialState, value: float | None = None, cause: str = "") -> None:
        """Takes a trial through states; its value is set before the last of them."""
        now = self.clock.now()

        def write(conn: Any) -> None:
            for place, state in enumerate(states):
                if place == len(states) - 1 and value is not None:
                    trials.set_value(conn, trial_id, value if math.isfinite(value) else None)
                transitions.transition(
                    conn, trial_id=trial_id, expected=set(TrialState), after=state, actor="lab", cause=cause, now=now
                )

        self.store.write(write)
        self.clock.advance(1)

    def begin(self, trial_id: str) -> str:
        """A real attempt with a lease on a device of its own; its ranks have started. Returns its id."""
        now = self.clock.now()
        if self.node is None:
            reports = tuple(
                DeviceReport(index=i, kind="fake", type="fake", memory_bytes=1 << 30, uuid=f"fake-{i}")
                for i in range(32)
            )
            hello = NodeHello(name="box", pid=1, boot_id="boot", version="1", devices=reports)
            self.node = self.store.write(lambda conn: nodes.hello(conn, ids=new_id, now=now, hello=hello))
        node = self.node
        device = node.devices[self.num_begun % len(node.devices)]
        self.num_begun += 1

        def write(conn: Any) -> str:
            made = trials.get(conn, trial_id).attempts_made
            attempt = attempts.begin(
                conn,
                ids=new_id,
                now=now,
                trial_id=trial_id,
                expected_attempt=made,
                node_id=node.id,
                device_ids=[device],
                cause="free device",
            )
            return attempt.id

        return self.store.write(write)

    def spool(self, attempt_id: str, kind: str, generation: int = 1, **data: Any) -> None:
        """One event of a supervisor."""
        now = self.clock.now()

        def write(conn: Any) -> None:
            seq = next(a.acked for a in attempts.live(conn) if a.id == attempt_id) + 1
            event = SpoolEvent(seq=seq, kind=kind, generation=generation, at=now.timestamp(), data=data)
            spool.ingest(conn, attempt_id, generation, [event], now)

        self.store.write(write)

    def end(self, attempt_id: str, outcome: Outcome, state: TrialState) -> None:
        """The attempt is over, its device free."""
        now = self.clock.now()

        def write(conn: Any) -> None:
            attempts.end(conn, attempt_id=attempt_id, outcome=outcome, cause="test", now=now, next_state=state)
            attempts.clean(conn, attempt_id=attempt_id, now=now)

        self.store.write(write)

    def propose(self, params: dict[str, Any], **config: Any) -> str:
        """A trial of a person. Returns its id."""
        now = self.clock.now()
        base = sweep_in().config.model_copy(update=config)
        item = ProposalIn(config=base, params=params)
        answer = self.store.write(lambda conn: proposals.accept(conn, ids=new_id, now=now, actor="ann", proposal=item))
        return answer.trials[0].id

    def finish(self, trial_id: str, value: float | None, state: TrialState = S.COMPLETED, cause: str = "") -> None:
        self.move(trial_id, S.STARTING, S.RUNNING, state, value=value, cause=cause)

    async def work(self, sweep_id: str, loss: Callable[[dict[str, Any]], float], *, seconds: float = 30) -> Sweep:
        """Ends one queued trial after the other until the sweep has ended."""

        def one() -> bool:
            queued = self.of_state(sweep_id, S.QUEUED)
            self.most_open = max(self.most_open, len(queued))
            if queued:
                self.finish(queued[0].id, loss(queued[0].params))
            return self.sweep(sweep_id).state != "active"

        await until(one, seconds)
        return self.sweep(sweep_id)

    def close(self) -> None:
        self.store.close()


async def until(condition: Callable[[], Any], seconds: float = 20, poll: float = 0.01) -> Any:
    """What the condition came to when it was true at last."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not (found := condition()):
        assert loop.time() < deadline, f"not in {seconds} s: {getattr(condition, '__name__', condition)}"
        await asyncio.sleep(poll)
    return found


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text)
