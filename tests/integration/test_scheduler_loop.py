"""The scheduler's loop on a real store: from commit to attempt, from silence to a verdict. Time is the test's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import Connection

from overnight.core.enums import DeviceState, DirectiveAction, LeaseState, Outcome, PriorityClass, RunKind, TrialState
from overnight.core.ids import new_id
from overnight.core.models.api import Device, ProposalIn, Trial
from overnight.core.models.node import DeviceReport, Ended, NodeHello, SpoolEvent
from overnight.core.models.spec import Command, Compute, Resume, TrialConfig
from overnight.core.paths import Home
from overnight.core.settings import Settings
from overnight.platform.attempts import conclude, conclude_ended
from overnight.platform.health import Health
from overnight.platform.pools import open_pool
from overnight.platform.scheduler.loop import SchedulerLoop
from overnight.store import attempts, devices, leaders, nodes, proposals, spool, transitions, trials
from overnight.store.engine import Store
from overnight.testing.clock import FakeClock
from overnight.testing.faults import FaultScript


@dataclass
class House:
    """A store, a fake pool's reports, and the scheduler's loop, without a server or processes."""

    home: Home
    clock: FakeClock
    store: Store
    loop: SchedulerLoop
    published: list[str]
    node_id: str = ""
    pool_spec: str = "fake:2"
    health: Health = field(default_factory=Health)

    def write(self, fn: Callable[[Connection], Any]) -> Any:
        return self.store.write(fn)

    def read(self, fn: Callable[[Connection], Any]) -> Any:
        with self.store.read() as conn:
            return fn(conn)

    def reports(self) -> tuple[DeviceReport, ...]:
        self.pool = getattr(self, "pool", None) or open_pool(self.pool_spec, self.home, self.clock)
        return tuple(self.pool.probe())

    def hello(self) -> None:
        reports = self.reports()
        message = NodeHello(name="node1", pid=1, boot_id="b", version="1", devices=reports)

        def write(conn: Connection) -> str:
            node = nodes.hello(conn, ids=new_id, now=self.clock.now(), hello=message)
            self.health.observe(conn, node.id, reports, self.clock.now())
            return node.id

        self.node_id = self.write(write)

    def report(self) -> None:
        reports = self.reports()

        def write(conn: Connection) -> None:
            nodes.seen(conn, node_id=self.node_id, now=self.clock.now())
            self.health.observe(conn, self.node_id, reports, self.clock.now())

        self.write(write)

    def propose(self, x: int, gpus: int | str = 1, **config: Any) -> str:
        proposal = ProposalIn(
            config=TrialConfig(
                experiment="e",
                run=Command(kind=RunKind.SCRIPT, target="a.py"),
                workdir="/tmp",
                compute=Compute(gpus=gpus),
                **config,
            ),
            params={"x": x},
        )
        answer = self.write(
            lambda conn: proposals.accept(conn, ids=new_id, now=self.clock.now(), actor="me", proposal=proposal)
        )
        return str(answer.trials[0].id)

    def trial(self, trial_id: str) -> Trial:
        return self.read(lambda conn: trials.get(conn, trial_id))  # type: ignore[no-any-return]

    def state(self, trial_id: str) -> TrialState:
        return self.trial(trial_id).state

    def attempt_id(self, trial_id: str) -> str:
        return self.trial(trial_id).attempts[-1].id

    def device(self, index: int) -> Device:
        return self.read(devices.list_)[index]  # type: ignore[no-any-return]

    def spool(self, trial_id: str, *events: tuple[str, dict[str, Any]], first: int = 1) -> None:
        """What the attempt's supervisor would post."""
        attempt = self.trial(trial_id).attempts[-1]
        posted = [
            SpoolEvent(seq=first + i, kind=kind, generation=1, at=self.clock.now().timestamp(), data=data)  # type: ignore[arg-type]
            for i, (kind, data) in enumerate(events)
        ]
        self.write(lambda conn: spool.ingest(conn, attempt.id, 1, posted, self.clock.now()))

    def running(self, trial_id: str) -> None:
        self.spool(trial_id, ("started", {"pids": {"0": 1}, "warm": True}))

    def ended(self, trial_id: str) -> Outcome | None:
        """The node says that no process is left."""
        ended = Ended(attempt_id=self.attempt_id(trial_id))
        return self.write(  # type: ignore[no-any-return]
            lambda conn: conclude_ended(conn, ended=ended, now=self.clock.now(), actor="node")
        )

    def beat(self, trial_id: str, counter: int) -> None:
        attempt_id = self.attempt_id(trial_id)
        self.write(lambda conn: attempts.beat(conn, attempt_id, counter))

    async def tick(self, seconds: float = 0.0) -> None:
        """Lets time pass in steps, as the loop's own timer does, and decides."""
        while seconds > 0:
            step = min(seconds, 1.0)
            self.clock.advance(step)
            seconds -= step
            await self.loop.tick()
        await self.loop.tick()


@pytest_asyncio.fixture
async def house(overnight_home: Home, overnight_clock: FakeClock) -> AsyncIterator[House]:
    settings = Settings(home=overnight_home.root)
    with Store.open(settings.effective_store_url, overnight_clock) as store:
        published: list[str] = []
        loop = SchedulerLoop(store, published.append, overnight_clock, settings)
        made = House(overnight_home, overnight_clock, store, loop, published)
        made.hello()
        await made.tick()
        published.clear()
        yield made
        loop.close()


async def test_a_queued_trial_is_begun_and_its_node_told(house: House) -> None:
    trial_id = house.propose(1)
    await house.tick()
    trial = house.trial(trial_id)
    assert trial.state is TrialState.STARTING
    assert trial.attempts[0].devices == ("node1:0",)
    assert trial.attempts[0].lease_state is LeaseState.ACTIVE
    assert house.published == [house.node_id]


async def test_starts_in_order_and_no_device_twice(house: House) -> None:
    ids = [house.propose(x) for x in range(5)]
    urgent = house.propose(9, priority=PriorityClass.URGENT)
    assert house.loop.queue() == []
    await house.tick()
    assert [house.state(t) for t in [urgent, *ids]] == [TrialState.STARTING] * 2 + [TrialState.QUEUED] * 4
    assert house.loop.queue() == ids[1:]
    assert house.loop.queue(limit=2) == ids[1:3]
    for number in range(1, 5):
        house.running(ids[number - 1])
        assert house.ended(ids[number - 1]) is Outcome.VANISHED
        await house.tick()
        assert house.state(ids[number]) is TrialState.STARTING


async def test_a_device_is_leased_again_only_when_clean(house: House) -> None:
    gang = house.propose(1, gpus=2)
    await house.tick()
    house.running(gang)
    house.spool(gang, ("exit", {"exit_codes": [0, 0]}), first=2)
    attempt_id = house.attempt_id(gang)
    house.write(lambda conn: conclude(conn, attempt_id=attempt_id, now=house.clock.now()))
    waiting = house.propose(2)
    await house.tick()
    assert house.state(gang) is TrialState.COMPLETED
    assert house.state(waiting) is TrialState.QUEUED
    house.ended(gang)
    await house.tick()
    assert house.state(waiting) is TrialState.STARTING


async def test_pre_empts_and_gives_the_place_back(house: House) -> None:
    gang = house.propose(1, gpus=2, priority=PriorityClass.EXPLORATORY, resume=Resume())
    await house.tick()
    house.running(gang)
    house.published.clear()
    urgent = house.propose(2, priority=PriorityClass.URGENT)
    await house.tick()
    assert house.state(gang) is TrialState.YIELDING
    attempt_id = house.attempt_id(gang)
    directive = house.read(lambda conn: attempts.directive(conn, attempt_id))
    assert (directive.action, directive.reason) == (DirectiveAction.YIELD, "preempted")
    assert house.published == [house.node_id]
    assert "yielding" in house.loop.explain(house.trial(urgent)).reason
    house.spool(gang, ("exit", {"exit_codes": [75, 75], "left": "yield", "saved": True}), first=2)
    house.write(lambda conn: conclude(conn, attempt_id=attempt_id, now=house.clock.now()))
    assert house.ended(gang) is None
    await house.tick()
    assert house.state(urgent) is TrialState.STARTING
    trial = house.trial(gang)
    assert (trial.state, trial.preemptions, trial.retries_used) == (TrialState.QUEUED, 1, 0)


@pytest.mark.parametrize("restart_at", ["yielding", "releasing"])
async def test_what_a_victim_frees_is_its_pre_emptors_after_a_restart_too(house: House, restart_at: str) -> None:
    victim = house.propose(1, priority=PriorityClass.EXPLORATORY, resume=Resume())
    house.propose(2)  # never a victim: a gang cannot have both devices
    await house.tick()
    house.running(victim)
    gang = house.propose(3, gpus=2, priority=PriorityClass.URGENT)
    urgent = house.propose(4, priority=PriorityClass.URGENT)
    await house.tick()
    assert house.state(victim) is TrialState.YIELDING
    attempt_id = house.attempt_id(victim)

    def end() -> None:
        house.spool(victim, ("exit", {"exit_codes": [75], "left": "yield", "saved": True}), first=2)
        house.write(lambda conn: conclude(conn, attempt_id=attempt_id, now=house.clock.now()))

    if restart_at == "releasing":
        end()
    house.loop.close()
    house.loop = SchedulerLoop(house.store, house.published.append, house.clock, Settings(home=house.home.root))
    await house.tick()
    assert house.loop.explain(house.trial(urgent)).waits_for == (house.trial(victim).name,)
    if restart_at == "yielding":
        end()
    house.ended(victim)
    await house.tick()
    assert house.state(urgent) is TrialState.STARTING, "the gang is before it, and would hold the device for later"
    assert house.state(gang) is TrialState.QUEUED
    assert house.loop._state.bindings == {}


async def test_a_trial_that_says_nothing_about_resuming_is_no_victim(house: House) -> None:
    for x in range(2):
        house.propose(x, priority=PriorityClass.EXPLORATORY)
    await house.tick()
    urgent = house.propose(9, priority=PriorityClass.URGENT)
    await house.tick()
    assert house.state(urgent) is TrialState.QUEUED


async def test_a_checkpoint_makes_a_victim(house: House) -> None:
    trial_id = house.propose(1, gpus=2, priority=PriorityClass.EXPLORATORY)
    await house.tick()
    house.running(trial_id)
    urgent = house.propose(9, priority=PriorityClass.URGENT)
    await house.tick()
    assert house.state(trial_id) is TrialState.RUNNING
    house.spool(trial_id, ("checkpoint", {"step": 5, "uri": "x", "bytes": 1, "generation": 1}), first=2)
    await house.tick(seconds=6)
    assert house.state(trial_id) is TrialState.YIELDING
    assert house.state(urgent) is TrialState.QUEUED


async def test_who_ignores_the_yield_is_killed(house: House) -> None:
    gang = house.propose(1, gpus=2, priority=PriorityClass.EXPLORATORY, resume=Resume())
    await house.tick()
    house.running(gang)
    house.propose(2, priority=PriorityClass.URGENT)
    await house.tick()
    for second in range(60):
        house.beat(gang, second)
        await house.tick(seconds=1)
        if house.loop.kills(house.node_id):
            break
    assert 44 <= second <= 47, "grace, then the supervisor's own TERM and KILL, then the node"
    assert house.loop.kills(house.node_id) == (house.attempt_id(gang),)
    assert house.loop.kills("another") == ()
    assert house.ended(gang) is Outcome.PREEMPTED or house.trial(gang).state is TrialState.QUEUED
    await house.tick()
    assert house.loop.kills(house.node_id) == ()


async def test_a_broken_device_costs_its_attempt_and_is_avoided(house: House, overnight_faults: FaultScript) -> None:
    trial_id = house.propose(1)
    await house.tick()
    house.running(trial_id)
    overnight_faults.fail(0, cause="xid_48")
    house.report()
    assert house.device(0).state is DeviceState.QUARANTINED
    await house.tick()
    assert house.loop.kills(house.node_id) == (house.attempt_id(trial_id),)
    assert house.ended(trial_id) is Outcome.INFRA_FAULT
    trial = house.trial(trial_id)
    assert (trial.state, trial.retries_used) == (TrialState.QUEUED, 1)
    assert "xid_48" in trial.attempts[0].cause
    await house.tick()
    assert "infrastructure fault" in house.loop.explain(house.trial(trial_id)).reason
    house.report()
    await house.tick(seconds=2)
    assert house.trial(trial_id).attempts[-1].devices == ("node1:1",)


async def test_a_repaired_device_is_used_again_elsewhere_is_preferred(
    house: House, overnight_faults: FaultScript
) -> None:
    trial_id = house.propose(1)
    await house.tick()
    house.running(trial_id)
    overnight_faults.fail(0, cause="xid_48")
    house.report()
    await house.tick()
    house.ended(trial_id)
    house.write(
        lambda conn: devices.set_state(
            conn, device_id="node1:0", state=DeviceState.HEALTHY, cause="", now=house.clock.now(), actor="me"
        )
    )
    await house.tick(seconds=2)
    assert house.trial(trial_id).attempts[-1].devices == ("node1:1",)


async def test_a_device_off_the_bus_keeps_new_work_from_its_whole_node(
    house: House, overnight_faults: FaultScript
) -> None:
    hit, beside = house.propose(1), house.propose(2)
    await house.tick()
    for trial_id in (hit, beside):
        house.running(trial_id)
    assert house.trial(hit).attempts[-1].devices == ("node1:0",)
    overnight_faults.fail(0, cause="xid_79", clear_after_seconds=60)
    house.report()
    assert house.device(0).state is DeviceState.QUARANTINED
    assert (house.device(1).state, house.device(1).cause) == (
        DeviceState.DRAINING,
        "xid_79 on node1:0: the GPU is no longer reachable over the bus",
    )
    await house.tick()
    assert house.loop.kills(house.node_id) == (house.attempt_id(hit),), "nothing is wrong with its neighbour's trial"
    house.ended(hit)
    house.ended(beside)
    await house.tick(seconds=2)
    assert house.state(hit) is TrialState.QUEUED
    house.clock.advance(3 * 3600)
    house.report()
    assert [house.device(index).state for index in (0, 1)] == [DeviceState.HEALTHY, DeviceState.HEALTHY]
    await house.tick()
    assert house.state(hit) is TrialState.STARTING


async def test_a_silent_attempt_ends_after_a_whole_period(house: House) -> None:
    trial_id = house.propose(1)
    await house.tick()
    house.running(trial_id)
    for second in range(40):
        house.beat(trial_id, second)
        house.report()
        await house.tick(seconds=1)
    assert house.state(trial_id) is TrialState.RUNNING
    for _ in range(24):
        house.report()
        await house.tick(seconds=1)
    assert house.state(trial_id) is TrialState.RUNNING
    for _ in range(20):
        house.report()
        await house.tick(seconds=1)
    attempt = house.trial(trial_id).attempts[0]
    assert (attempt.outcome, attempt.cause) == (Outcome.VANISHED, "no sign of life for 30 s")
    assert attempt.lease_state is LeaseState.RELEASING, "its node has not said that it is clean"


async def test_a_launch_may_outlast_a_lease_while_its_node_speaks(house: House) -> None:
    slow, stuck = house.propose(1), house.propose(2)
    await house.tick()
    for _ in range(200):
        house.report()
        await house.tick(seconds=1)
    assert house.state(slow) is TrialState.STARTING, "a slow import is no death"
    house.running(slow)
    for second in range(150):
        house.beat(slow, second)
        house.report()
        await house.tick(seconds=1)
    assert house.state(slow) is TrialState.RUNNING
    attempt = house.trial(stuck).attempts[0]
    assert (attempt.outcome, attempt.cause) == (Outcome.VANISHED, "it was not launched in time")


async def test_a_launch_on_a_silent_node_ends_after_one_period(house: House) -> None:
    trial_id = house.propose(1)
    await house.tick()
    for _ in range(40):
        await house.tick(seconds=1)
    assert house.trial(trial_id).attempts[0].outcome is Outcome.VANISHED


async def test_after_a_pause_of_its_own_a_whole_period_passes_first(house: House) -> None:
    trial_id = house.propose(1)
    await house.tick()
    house.running(trial_id)
    await house.tick(seconds=20)
    house.clock.advance(3600)
    await house.tick()
    await house.tick(seconds=25)
    assert house.state(trial_id) is TrialState.RUNNING
    await house.tick(seconds=15)
    assert house.state(trial_id) is not TrialState.RUNNING


async def test_a_wall_clock_that_jumps_ends_nothing(house: House) -> None:
    trial_id = house.propose(1)
    await house.tick()
    house.running(trial_id)
    house.clock.jump(365 * 86400)
    await house.tick(seconds=6)
    house.clock.jump(-730 * 86400)
    await house.tick(seconds=6)
    assert house.state(trial_id) is TrialState.RUNNING
    assert house.device(0).state is DeviceState.HEALTHY


async def test_the_devices_of_a_silent_node_are_lost_until_it_speaks(house: House) -> None:
    trial_id = house.propose(1)
    await house.tick()
    house.running(trial_id)
    await house.tick(seconds=45)
    assert [house.device(i).state for i in range(2)] == [DeviceState.LOST] * 2
    assert house.trial(trial_id).attempts[0].outcome is Outcome.VANISHED
    await house.tick(seconds=60)
    assert house.state(trial_id) is TrialState.QUEUED, "nowhere to run"
    assert "lost" in house.loop.explain(house.trial(trial_id)).reason
    house.report()
    house.ended(trial_id)
    await house.tick()
    assert house.state(trial_id) is TrialState.STARTING


async def test_a_new_scheduler_adopts_what_runs(house: House) -> None:
    running = house.propose(1)
    await house.tick()
    house.running(running)
    waiting = [house.propose(x) for x in (2, 3)]
    house.loop.close()
    again = SchedulerLoop(house.store, house.published.append, house.clock, Settings(home=house.home.root))
    await again.tick()
    assert house.state(running) is TrialState.RUNNING
    assert [house.state(t) for t in waiting] == [TrialState.STARTING, TrialState.QUEUED]
    again.close()


async def test_only_one_scheduler_decides(house: House) -> None:
    trial_id = house.propose(1)
    house.write(lambda conn: leaders.release(conn, holder=leaders.read(conn).holder))  # type: ignore[union-attr]
    house.write(lambda conn: leaders.acquire(conn, holder="other", now=house.clock.now(), seen=None))
    await house.tick()
    assert house.state(trial_id) is TrialState.QUEUED, "its write is refused though it believes to lead"
    for _ in range(40):
        house.write(lambda conn: leaders.renew(conn, holder="other", now=house.clock.now()))
        await house.tick(seconds=1)
    assert house.state(trial_id) is TrialState.QUEUED
    await house.tick(seconds=45)
    assert house.state(trial_id) is TrialState.STARTING, "the other has been silent for a period"


async def test_a_refused_action_is_dropped_and_corrected(house: House) -> None:
    """The store changes behind the loop's back: nothing is told to it until it tries."""
    first, second = house.propose(1, gpus=2), house.propose(2)
    house.loop.close()
    blind = SchedulerLoop(house.store, house.published.append, house.clock, Settings(home=house.home.root))
    blind._unsubscribe()
    await blind.tick()
    assert house.state(first) is TrialState.STARTING
    house.ended(first)
    house.write(lambda conn: transitions.cancel(conn, trial_id=second, actor="me", reason="", now=house.clock.now()))
    third = house.propose(3)
    blind._topics.add("leases")
    await blind.tick()
    assert house.state(second) is TrialState.CANCELLED
    assert house.state(third) is TrialState.QUEUED
    await blind.tick()
    assert house.state(third) is TrialState.STARTING


async def test_cancelled_and_held_trials_leave_the_line(house: House) -> None:
    house.propose(0, gpus=2)
    await house.tick()
    first, second = house.propose(1), house.propose(2)
    await house.tick()
    house.write(lambda conn: transitions.cancel(conn, trial_id=first, actor="me", reason="", now=house.clock.now()))
    house.write(lambda conn: transitions.hold(conn, trial_id=second, actor="me", reason="", now=house.clock.now()))
    await house.tick()
    assert house.loop.queue() == []
    assert house.loop.explain(house.trial(second)).reason == "it is held"
    house.write(lambda conn: transitions.unhold(conn, trial_id=second, actor="me", reason="", now=house.clock.now()))
    await house.tick()
    assert house.loop.queue() == [second]


async def test_says_what_can_never_be_given(house: House) -> None:
    assert house.loop.unsatisfiable(Compute(gpus=2)) is None
    assert "only 2" in (house.loop.unsatisfiable(Compute(gpus=3)) or "")


async def test_runs_by_itself_and_wakes_on_commits(house: House) -> None:
    woken = asyncio.Event()
    house.loop._publish = lambda node_id: woken.set()
    task = asyncio.create_task(house.loop.run())
    trial_id = house.propose(1)
    async with asyncio.timeout(10):
        await woken.wait()
    assert house.state(trial_id) is TrialState.STARTING
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
