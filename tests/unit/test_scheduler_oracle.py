"""The incremental core against one that rescans everything, and against exhaustive search, on random histories."""

import itertools
import math
from collections.abc import Iterator
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from overnight.core.enums import DeviceState
from overnight.platform.scheduler.claim import claim, make_zones
from overnight.platform.scheduler.core import MAX_CLAIMS, Rules, State
from overnight.platform.scheduler.events import (
    Action,
    CheckpointCommitted,
    Demand,
    DeviceChanged,
    DeviceGone,
    DeviceView,
    Event,
    LeaseClean,
    LeaseReleasing,
    Live,
    Phase,
    Preempt,
    ResumableChanged,
    Start,
    TrialGone,
    TrialQueued,
    TrialStarted,
    TrialStopping,
    TrialYielding,
    Waiting,
)
from overnight.platform.scheduler.place import choose, group_by_node

STATES = [DeviceState.HEALTHY] * 4 + [DeviceState.SUSPECT, DeviceState.PROBATION, DeviceState.QUARANTINED]
NODES, PER_NODE = 3, 3
DEVICE_IDS = [f"n{n}/{i}" for n in range(NODES) for i in range(PER_NODE)]
DEMANDS = [
    *[Demand(1, 1)] * 4,
    Demand(2, 2),
    Demand(3, 3),
    Demand(4, 4),
    Demand(1, 3),
    Demand(2, 6),
    Demand(1, 1, types=("b",)),
    Demand(2, 2, types=("a",)),
    Demand(4, 4, nodes=2, per_node=2),
    Demand(2, 6, nodes=2),
]


def naive(state: State, now: float) -> Iterator[Action]:
    """The rules as written down, with no index: only the state's plain records are read."""
    records = state.snapshot()
    lives = {live.attempt_id: live for live in records.live}
    holder = {device_id: live for live in records.live for device_id in live.device_ids}
    bindings = dict(records.bindings)
    bound_trials = {binding.trial_id for binding in bindings.values()}
    span_nodes = state.rules.span_nodes
    taken: set[str] = set()
    victims: set[str] = set()
    closed: set[object] = set()
    num_claims = 0
    for trial in records.waiting:
        kind = (trial.priority, trial.demand, trial.avoid, trial.trial_id if trial.trial_id in bound_trials else None)
        if trial.not_before > now or kind in closed:
            continue

        def suits(device: DeviceView, trial: Waiting = trial) -> bool:
            canary = trial.priority == 2 and trial.demand.max_devices == 1
            return (
                device.is_leasable
                and (canary or device.state is not DeviceState.PROBATION)
                and (not trial.demand.types or device.type in trial.demand.types)
            )

        suitable = [device for device in records.devices if suits(device)]
        elsewhere = [device for device in suitable if device.id not in trial.avoid]
        if choose(trial.demand, group_by_node(elsewhere), span_nodes=span_nodes) is not None:
            suitable = elsewhere
        suitable = [
            device
            for device in suitable
            if device.id not in taken
            and (
                (binding := bindings.get(device.id)) is None
                or binding.until <= now
                or binding.trial_id == trial.trial_id
            )
        ]
        free = [device for device in suitable if device.id not in holder]
        chosen = choose(trial.demand, group_by_node(free), span_nodes=span_nodes)
        if chosen is not None:
            yield Start(trial.trial_id, tuple(device.id for device in chosen))
            taken.update(device.id for device in chosen)
            continue
        promised = any(
            (binding := bindings.get(device.id)) is not None and binding.trial_id == trial.trial_id
            for device in suitable
        )
        if trial.demand.min_devices == 1 and promised:
            continue
        wanted = [
            live
            for live in lives.values()
            if live.is_resumable and live.phase is Phase.RUNNING and live.priority > trial.priority
        ]
        if num_claims >= MAX_CLAIMS or (
            trial.demand.min_devices == 1 and not wanted and trial.trial_id not in bound_trials
        ):
            closed.add(kind)
            continue
        found = claim(
            trial.demand,
            make_zones(
                suitable,
                holder.get,
                lambda live, trial=trial: (  # type: ignore[misc]
                    live.is_resumable and live.priority > trial.priority and live.attempt_id not in victims
                ),
                merged=span_nodes and trial.demand.nodes is None and trial.demand.per_node is None,
            ),
            lives,
            now,
            span_nodes=span_nodes,
        )
        if found is None or not found.is_enough:
            closed.add(kind)
        if found is not None:
            num_claims += 1
            taken.update(found.device_ids)
            victims.update(found.victims)
            yield from (Preempt(a, lives[a].trial_id, trial.trial_id) for a in found.victims)


class World:
    """A house in which things happen; every decision is checked. Choices are numbers, so that anybody can make them."""

    def __init__(self, span_nodes: bool) -> None:
        self.rules = Rules(span_nodes=span_nodes)
        self.state = State(self.rules)
        self.log: list[Event] = []
        self.now = 0.0
        self.num_attempts = 0
        self.trials: dict[str, Waiting] = {}
        for number in range(len(DEVICE_IDS)):
            self.device(number, DeviceState.HEALTHY)

    def tell(self, event: Event) -> None:
        self.log.append(event)
        self.state.apply(event)

    def device(self, number: int, state: DeviceState | None) -> None:
        device_id = DEVICE_IDS[number]
        if state is None:
            self.tell(DeviceGone(device_id))
            return
        node, index = device_id.split("/")
        self.tell(DeviceChanged(DeviceView(device_id, node, int(index), "b" if number % 3 == 2 else "a", state)))

    def queue(self, priority: int, rank: int, demand: Demand, avoid: tuple[str, ...], delay: float) -> None:
        number = len(self.trials) + 1
        not_before = self.now + delay if delay else -math.inf
        trial = Waiting(f"t{number}", priority, rank, number, demand, frozenset(avoid), not_before)
        self.trials[trial.trial_id] = trial
        self.tell(TrialQueued(trial))

    def withdraw(self, number: int) -> None:
        if waiting := sorted(self.state.line.trials):
            self.tell(TrialGone(waiting[number % len(waiting)]))

    def progress(self, number: int, what: str) -> None:
        if not (running := sorted(self.state.live)):
            return
        attempt_id = running[number % len(running)]
        live = self.state.live[attempt_id]
        if what == "end":
            self.tell(LeaseReleasing(attempt_id))
            if live.phase is Phase.YIELDING:
                self.tell(TrialQueued(self.trials[live.trial_id]))
            self.tell(LeaseClean(attempt_id))
        elif what == "release":
            self.tell(LeaseReleasing(attempt_id))
        elif what == "stop":
            self.tell(TrialStopping(attempt_id))
        elif what == "commit":
            self.tell(CheckpointCommitted(attempt_id, self.now))
        else:
            self.tell(ResumableChanged(attempt_id, not live.is_resumable))

    def decide(self, accepted: list[bool]) -> None:
        before = self.state.snapshot()
        expected = list(naive(self.state, self.now))
        actions = self.state.decide(self.now)
        assert actions == expected
        assert self.state.snapshot() == before, "deciding changes nothing"
        assert State.rebuild(before, self.rules).decide(self.now) == actions
        assert {binding.trial_id for _, binding in before.bindings} <= self.state.line.trials.keys()
        self.check(actions)
        for number, action in enumerate(actions):
            if number >= len(accepted) or accepted[number]:
                self.carry_out(action)

    def check(self, actions: list[Action]) -> None:
        starts = [action for action in actions if isinstance(action, Start)]
        used = [device_id for start in starts for device_id in start.device_ids]
        assert len(used) == len(set(used)), "no device twice"
        held = {device_id for live in self.state.live.values() for device_id in live.device_ids}
        for start in starts:
            demand = self.state.line.trials[start.trial_id].demand
            assert demand.min_devices <= len(start.device_ids) <= demand.max_devices, "whole or not at all"
            assert not held & set(start.device_ids)
            assert all(self.state.fleet.devices[d].is_leasable for d in start.device_ids)
            nodes = {self.state.fleet.devices[d].node_id for d in start.device_ids}
            assert self.rules.span_nodes or len(nodes) == 1
            assert demand.nodes is None or len(nodes) == demand.nodes
        preempts = [action for action in actions if isinstance(action, Preempt)]
        assert len({action.attempt_id for action in preempts}) == len(preempts)
        for action in preempts:
            victim = self.state.live[action.attempt_id]
            assert victim.is_resumable and victim.phase is Phase.RUNNING
            assert victim.priority > self.state.line.trials[action.for_trial_id].priority

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Preempt):
            self.tell(TrialYielding(action.attempt_id, action.for_trial_id, self.now + 60.0))
            return
        self.num_attempts += 1
        trial = self.state.line.trials[action.trial_id]
        resumable = self.num_attempts % 4 != 0
        self.tell(
            TrialStarted(
                f"a{self.num_attempts}", action.trial_id, action.device_ids, trial.priority, resumable, self.now
            )
        )

    def replay(self) -> None:
        """The log alone gives the same state, and the line's order is that of a plain sort."""
        again = State(self.rules)
        for event in self.log:
            again.apply(event)
        assert again.snapshot() == self.state.snapshot()
        assert State.rebuild(self.state.snapshot()).snapshot() == self.state.snapshot()
        waiting = [t for t in self.state.snapshot().waiting if t.not_before <= self.now]
        self.state.line.admit(self.now)
        assert list(self.state.line.ordered(len(waiting))) == [trial.trial_id for trial in waiting]
        assert [self.state.line.position(trial.trial_id) for trial in waiting] == list(range(1, len(waiting) + 1))


NUMBER = st.integers(0, 99)
PRIORITIES = [0, 1, 1, 2, 2, 2]
RANKS = [0, 0, 0, 1, 5]
AVOIDS: list[tuple[str, ...]] = [(), (), (), ("n0/0",), ("n0/0", "n1/1")]
DELAYS = [0.0, 0.0, 0.0, 5.0]
PROGRESS = ["end", "end", "end", "release", "stop", "commit", "resumable"]


class SchedulerMachine(RuleBasedStateMachine):
    """Random histories that hypothesis can shrink."""

    @initialize(span_nodes=st.booleans())
    def begin(self, span_nodes: bool) -> None:
        self.world = World(span_nodes)

    @rule(number=st.integers(0, len(DEVICE_IDS) - 1), state=st.sampled_from([*STATES, None]))
    def device(self, number: int, state: DeviceState | None) -> None:
        self.world.device(number, state)

    @rule(
        priority=st.sampled_from(PRIORITIES),
        rank=st.sampled_from(RANKS),
        demand=st.sampled_from(DEMANDS),
        avoid=st.sampled_from(AVOIDS),
        delay=st.sampled_from(DELAYS),
    )
    def queue(self, priority: int, rank: int, demand: Demand, avoid: tuple[str, ...], delay: float) -> None:
        self.world.queue(priority, rank, demand, avoid, delay)

    @rule(number=NUMBER)
    def withdraw(self, number: int) -> None:
        self.world.withdraw(number)

    @rule(number=NUMBER, what=st.sampled_from(PROGRESS))
    def progress(self, number: int, what: str) -> None:
        self.world.progress(number, what)

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(accepted=st.lists(st.booleans(), max_size=6))
    def decide(self, accepted: list[bool]) -> None:
        self.world.decide(accepted)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.replay()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(8))
def test_a_long_busy_history(seed: int) -> None:
    random = Random(seed)
    world = World(span_nodes=bool(seed % 2))
    for _ in range(200):
        match random.choice("qqqqppppdww"):
            case "q":
                demand = random.choice(DEMANDS)
                world.queue(random.choice(PRIORITIES), random.choice(RANKS), demand, random.choice(AVOIDS), 0.0)
            case "p":
                world.progress(random.randrange(99), random.choice(PROGRESS))
            case "d":
                world.device(random.randrange(len(DEVICE_IDS)), random.choice([*STATES, None]))
            case "w":
                world.now += random.choice([0.5, 3.0, 40.0])
                if random.random() < 0.3:
                    world.withdraw(random.randrange(99))
        world.decide([random.random() < 0.9 for _ in range(6)])
    world.replay()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_placement_uses_the_fewest_nodes_that_exist(free: list[int], need: int, more: int, span: bool) -> None:
    zones = group_by_node(
        DeviceView(f"n{n}/{i}", f"n{n}", i, "a", DeviceState.HEALTHY) for n, num in enumerate(free) for i in range(num)
    )
    chosen = choose(Demand(need, need + more), zones, span_nodes=span)
    most = sum(free) if span else max(free)
    if most < need:
        assert chosen is None
        return
    assert chosen is not None
    size = min(need + more, most)
    assert len(chosen) == len(set(chosen)) == size
    fewest = next(
        num for num in range(1, len(free) + 1) if any(sum(nodes) >= size for nodes in itertools.combinations(free, num))
    )
    assert len({device.node_id for device in chosen}) == fewest


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(0, 30)), max_size=6),
    st.integers(0, 2),
    st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_victims_suffice_and_none_is_superfluous(lives: list[tuple[int, int, int]], free: int, need: int) -> None:
    attempts: dict[str, Live] = {}
    devices = [DeviceView(f"n0/{i}", "n0", i, "a", DeviceState.HEALTHY) for i in range(free)]
    for number, (num, priority, since) in enumerate(lives):
        mine = [
            DeviceView(f"n0/{i}", "n0", i, "a", DeviceState.HEALTHY) for i in range(len(devices), len(devices) + num)
        ]
        devices += mine
        attempts[f"a{number}"] = Live(
            f"a{number}", f"t{number}", tuple(d.id for d in mine), priority, True, float(since)
        )
    holder = {device_id: live for live in attempts.values() for device_id in live.device_ids}
    zones = make_zones(devices, holder.get, lambda live: True, merged=True)
    found = claim(Demand(need, need), zones, attempts, 30.0, span_nodes=True)
    gain = {attempt_id: len(live.device_ids) for attempt_id, live in attempts.items()}
    if free + sum(gain.values()) < need:
        assert found is None
        return
    assert found is not None
    assert found.is_enough
    total = free + sum(gain[a] for a in found.victims)
    assert total >= need
    assert all(total - gain[a] < need for a in found.victims)
    assert len(set(found.device_ids)) == need
    if any(attempts[a].priority == 1 for a in found.victims):
        lowest = sum(gain[a] for a, live in attempts.items() if live.priority == 2)
        assert free + lowest < need, "a higher class is touched only when the lower ones are not enough"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_trial_starts_though_small_ones_keep_coming(sizes: list[int], random: object) -> None:
    state = State()
    for number in range(6):
        state.apply(DeviceChanged(DeviceView(f"n0/{number}", "n0", number, "a", DeviceState.HEALTHY)))
    pending = set()
    for place, size in enumerate(sizes):
        state.apply(TrialQueued(Waiting(f"t{place}", 1, 0, place, Demand(size, size))))
        pending.add(f"t{place}")
    for step in range(20 * len(sizes)):
        state.apply(TrialQueued(Waiting(f"s{step}", 1, 0, 1_000 + step, Demand(1, 1))))
        for action in state.decide(float(step)):
            assert isinstance(action, Start)
            state.apply(TrialStarted(f"{action.trial_id}", action.trial_id, action.device_ids, 1, True, float(step)))
            pending.discard(action.trial_id)
        if not pending:
            return
        state.apply(LeaseClean(random.choice(sorted(state.live))))  # type: ignore[attr-defined]
    raise AssertionError(f"{sorted(pending)} never started")
