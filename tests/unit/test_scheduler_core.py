"""The scheduler's rules, one by one."""

import math

import pytest

from overnight.core.enums import DeviceState, TrialState
from overnight.core.models.spec import Compute
from overnight.platform.scheduler.core import Rules, State
from overnight.platform.scheduler.events import (
    CheckpointCommitted,
    Demand,
    DeviceChanged,
    DeviceGone,
    DeviceView,
    LeaseClean,
    LeaseReleasing,
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
from overnight.platform.scheduler.why import explain, unsatisfiable

URGENT, NORMAL, EXPLORATORY = 0, 1, 2


class House:
    """A state whose actions are carried out at once, as the loop does after the store has accepted them."""

    def __init__(self, *nodes: int, types: dict[str, str] | None = None, span_nodes: bool = True) -> None:
        self.state = State(Rules(span_nodes=span_nodes))
        self.now = 0.0
        self.num_attempts = 0
        self.place = 0
        for node, num in enumerate(nodes):
            for index in range(num):
                device_id = f"n{node}/{index}"
                self.device(device_id, type_=(types or {}).get(device_id, "h100"))

    def device(self, device_id: str, state: DeviceState = DeviceState.HEALTHY, type_: str = "h100") -> None:
        node, index = device_id.split("/")
        self.state.apply(DeviceChanged(DeviceView(device_id, node, int(index), type_, state)))

    def queue(self, trial_id: str, devices: int = 1, priority: int = NORMAL, **more: object) -> None:
        self.place += 1
        demand = more.pop("demand", None) or Demand(devices, devices)
        values = {"rank": 0, "place": self.place, **more}
        self.state.apply(TrialQueued(Waiting(trial_id, priority, demand=demand, **values)))  # type: ignore[arg-type]

    def decide(self, *, resumable: bool = True) -> dict[str, tuple[str, ...]]:
        """Starts by trial; victims are told to yield. What is carried out is returned."""
        started: dict[str, tuple[str, ...]] = {}
        for action in self.state.decide(self.now):
            if isinstance(action, Start):
                self.num_attempts += 1
                trial = self.state.line.trials[action.trial_id]
                self.state.apply(
                    TrialStarted(
                        f"{action.trial_id}.{self.num_attempts}",
                        action.trial_id,
                        action.device_ids,
                        trial.priority,
                        resumable,
                        self.now,
                    )
                )
                started[action.trial_id] = action.device_ids
            else:
                self.state.apply(TrialYielding(action.attempt_id, action.for_trial_id, self.now + 90))
                started[f"yield {action.trial_id}"] = (action.for_trial_id,)
        return started

    def end(self, trial_id: str) -> None:
        for live in list(self.state.live.values()):
            if live.trial_id == trial_id:
                self.state.apply(LeaseReleasing(live.attempt_id))
                self.state.apply(LeaseClean(live.attempt_id))

    def attempt(self, trial_id: str) -> str:
        return next(live.attempt_id for live in self.state.live.values() if live.trial_id == trial_id)


def test_class_then_rank_then_place() -> None:
    house = House(1)
    house.queue("exploratory", priority=EXPLORATORY)
    house.queue("late")
    house.queue("ranked", rank=5)
    house.queue("urgent", priority=URGENT)
    assert list(house.state.line.ordered()) == ["urgent", "ranked", "late", "exploratory"]
    assert [house.state.line.position(t) for t in house.state.line.ordered()] == [1, 2, 3, 4]
    order = []
    for _ in range(4):
        (trial_id,) = house.decide()
        order.append(trial_id)
        house.end(trial_id)
    assert order == ["urgent", "ranked", "late", "exploratory"]


def test_a_gang_starts_whole_or_not_at_all() -> None:
    house = House(4)
    house.queue("single")
    house.decide()
    house.queue("gang", devices=4)
    assert house.decide() == {}
    house.end("single")
    assert house.decide() == {"gang": ("n0/0", "n0/1", "n0/2", "n0/3")}


def test_small_trials_cannot_starve_a_gang() -> None:
    house = House(2)
    house.queue("a")
    house.queue("b")
    house.decide()
    house.queue("gang", devices=2)
    for i in range(10):
        house.queue(f"small{i}")
    house.end("a")
    assert house.decide() == {}, "the free device is held for the gang"
    house.end("b")
    assert house.decide() == {"gang": ("n0/0", "n0/1")}


def test_a_gang_that_too_few_devices_could_serve_holds_none() -> None:
    house = House(3)
    house.device("n0/2", DeviceState.QUARANTINED)
    house.queue("gang", devices=3)
    house.queue("small")
    assert house.decide() == {"small": ("n0/0",)}


def test_only_the_first_gang_of_a_kind_holds_devices() -> None:
    house = House(3, 3, span_nodes=False)
    for trial_id in ("a", "b"):
        house.queue(trial_id, devices=2)
    assert house.decide() == {"a": ("n0/0", "n0/1"), "b": ("n1/0", "n1/1")}
    house.queue("gang", devices=3)
    house.queue("gang2", devices=3)
    house.queue("small")
    assert house.decide() == {"small": ("n1/2",)}


def test_gangs_hold_only_what_they_need() -> None:
    house = House(4)
    house.queue("a", devices=3)
    house.decide()
    house.queue("gang", devices=2)
    house.queue("small")
    assert house.decide() == {}
    house.end("a")
    assert set(house.decide()) == {"gang", "small"}


def test_packs_on_the_tightest_node_and_the_fewest() -> None:
    house = House(4, 4, 2)
    house.queue("one")
    assert house.decide() == {"one": ("n2/0",)}
    house.queue("four", devices=4)
    assert house.decide() == {"four": ("n0/0", "n0/1", "n0/2", "n0/3")}
    house.queue("five", devices=5)
    assert house.decide() == {"five": ("n1/0", "n1/1", "n1/2", "n1/3", "n2/1")}


def test_nodes_and_devices_per_node_are_exact() -> None:
    house = House(4, 3, 1)
    house.queue("pair", demand=Demand(4, 4, nodes=2, per_node=2))
    assert house.decide() == {"pair": ("n0/0", "n0/1", "n1/0", "n1/1")}
    house.queue("uneven", demand=Demand(5, 5, nodes=2))
    assert house.decide() == {}


def test_an_attempt_stays_on_one_node_if_told_so() -> None:
    house = House(3, 3, span_nodes=False)
    house.queue("four", devices=4)
    house.queue("three", devices=3)
    assert house.decide() == {"three": ("n0/0", "n0/1", "n0/2")}


def test_an_elastic_trial_takes_what_there_is() -> None:
    house = House(4)
    house.queue("fixed")
    house.queue("elastic", demand=Demand(2, 8))
    assert house.decide() == {"fixed": ("n0/0",), "elastic": ("n0/1", "n0/2", "n0/3")}


def test_types_are_respected() -> None:
    house = House(2, types={"n0/1": "A100"})
    house.queue("a100", demand=Demand(1, 1, types=("a100",)))
    house.queue("other", demand=Demand(1, 1, types=("b200",)))
    assert house.decide() == {"a100": ("n0/1",)}


def test_doubtful_devices_come_last() -> None:
    house = House(2)
    house.device("n0/0", DeviceState.SUSPECT)
    house.queue("a")
    house.queue("b")
    assert house.decide() == {"a": ("n0/1",), "b": ("n0/0",)}


def test_a_device_on_probation_takes_exploratory_trials_only() -> None:
    house = House(1)
    house.device("n0/0", DeviceState.PROBATION)
    house.queue("normal")
    house.queue("exploratory", priority=EXPLORATORY)
    assert house.decide() == {"exploratory": ("n0/0",)}


@pytest.mark.parametrize(
    "state", [DeviceState.QUARANTINED, DeviceState.DRAINING, DeviceState.BUSY, DeviceState.LOST], ids=str
)
def test_a_device_out_of_service_is_not_leased(state: DeviceState) -> None:
    house = House(1)
    house.device("n0/0", state)
    house.queue("a")
    assert house.decide() == {}
    house.device("n0/0", DeviceState.HEALTHY)
    assert house.decide() == {"a": ("n0/0",)}


def test_a_retry_goes_elsewhere_unless_there_is_no_elsewhere() -> None:
    house = House(2)
    house.queue("a", avoid=frozenset({"n0/0"}))
    assert house.decide() == {"a": ("n0/1",)}
    house.queue("b", avoid=frozenset({"n0/0"}))
    assert house.decide() == {}, "the other device will be free one day"
    house.queue("c")
    assert house.decide() == {"c": ("n0/0",)}
    house.end("c")
    house.device("n0/1", DeviceState.QUARANTINED)
    assert house.decide() == {"b": ("n0/0",)}


def test_backoff_ends() -> None:
    house = House(1)
    house.queue("a", not_before=10.0)
    assert house.decide() == {}
    assert house.state.next_wake() == 10.0
    house.now = 9.9
    assert house.decide() == {}
    house.now = 10.0
    assert house.decide() == {"a": ("n0/0",)}
    assert house.state.next_wake() is None


def test_preempts_across_classes_only() -> None:
    house = House(1)
    house.queue("running", priority=NORMAL)
    house.decide()
    house.queue("ranked", priority=NORMAL, rank=100)
    assert house.decide() == {}
    house.queue("urgent", priority=URGENT)
    assert house.decide() == {"yield running": ("urgent",)}
    assert house.decide() == {}, "one victim is enough"
    house.end("running")
    house.queue("running", priority=NORMAL, place=1)
    assert house.decide() == {"urgent": ("n0/0",)}
    house.end("urgent")
    assert house.decide() == {"ranked": ("n0/0",)}


def test_only_resumable_trials_are_victims() -> None:
    house = House(1)
    house.queue("stuck", priority=EXPLORATORY)
    house.decide(resumable=False)
    house.queue("urgent", priority=URGENT)
    assert house.decide() == {}
    house.state.apply(ResumableChanged(house.attempt("stuck"), True))
    assert house.decide() == {"yield stuck": ("urgent",)}


def test_the_least_loss_is_chosen() -> None:
    house = House(3)
    for trial_id in ("a", "b", "c"):
        house.queue(trial_id, priority=EXPLORATORY)
    house.decide()
    house.now = 100.0
    house.state.apply(CheckpointCommitted(house.attempt("b"), 99.0))
    house.state.apply(CheckpointCommitted(house.attempt("c"), 50.0))
    house.queue("urgent", priority=URGENT)
    assert house.decide() == {"yield b": ("urgent",)}


def test_lower_classes_lose_first_and_none_loses_in_vain() -> None:
    house = House(4)
    house.queue("normal")
    house.queue("cheap", priority=EXPLORATORY)
    house.decide()
    house.now = 50.0
    house.queue("dear", devices=2, priority=EXPLORATORY)
    house.decide()
    house.now = 60.0
    house.state.apply(CheckpointCommitted(house.attempt("cheap"), 59.0))
    house.queue("urgent", devices=2, priority=URGENT)
    assert house.decide() == {"yield dear": ("urgent",)}, "cheap alone is not enough, and with dear not needed"


def test_two_urgent_trials_take_two_victims() -> None:
    house = House(2)
    house.queue("a", priority=EXPLORATORY)
    house.queue("b", priority=EXPLORATORY)
    house.decide()
    house.queue("u", priority=URGENT)
    house.queue("v", priority=URGENT)
    assert house.decide() == {"yield a": ("u",), "yield b": ("v",)}


def test_devices_coming_free_anyway_spare_a_victim() -> None:
    house = House(2)
    house.queue("a", priority=EXPLORATORY)
    house.queue("b", priority=EXPLORATORY)
    house.decide()
    house.state.apply(TrialStopping(house.attempt("a")))
    house.queue("urgent", priority=URGENT)
    assert house.decide() == {}
    house.end("a")
    assert house.decide() == {"urgent": ("n0/0",)}


def test_what_a_victim_frees_is_kept_for_the_pre_emptor() -> None:
    house = House(1)
    house.queue("victim", priority=EXPLORATORY)
    house.decide()
    house.queue("urgent", priority=URGENT)
    house.decide()
    house.queue("ranked", priority=URGENT, rank=9)
    house.end("victim")
    assert house.decide() == {"urgent": ("n0/0",)}


def test_a_binding_ends() -> None:
    house = House(1)
    house.queue("victim", priority=EXPLORATORY)
    house.decide()
    house.queue("urgent", priority=URGENT)
    house.decide()
    house.end("victim")
    house.queue("first", priority=URGENT, rank=9)
    house.state.apply(DeviceChanged(DeviceView("n0/0", "n0", 0, "h100", DeviceState.BUSY)))
    assert house.decide() == {}
    house.now = 200.0
    house.device("n0/0")
    assert house.decide() == {"first": ("n0/0",)}


def test_a_pre_emptor_that_leaves_frees_what_it_was_promised() -> None:
    house = House(1)
    house.queue("victim", priority=EXPLORATORY)
    house.decide()
    house.queue("urgent", priority=URGENT)
    house.decide()
    house.state.apply(TrialGone("urgent"))
    house.end("victim")
    house.queue("victim", priority=EXPLORATORY)
    assert house.decide() == {"victim": ("n0/0",)}


def test_a_device_that_leaves_while_leased_comes_back_leased() -> None:
    house = House(1)
    house.queue("a")
    house.decide()
    house.state.apply(DeviceGone("n0/0"))
    house.device("n0/0")
    house.queue("b")
    assert house.decide() == {}
    house.end("a")
    assert house.decide() == {"b": ("n0/0",)}


def test_nothing_new_costs_nothing() -> None:
    house = House(1)
    house.queue("a")
    house.queue("b")
    house.decide()
    assert house.state.decide(house.now) == []
    house.state.line.heads = None  # type: ignore[method-assign, assignment]
    assert house.state.decide(house.now) == [], "does not even look"


def test_a_repeated_event_changes_nothing() -> None:
    house = House(1)
    house.queue("a")
    house.decide()
    live = next(iter(house.state.live.values()))
    before = house.state.snapshot()
    house.state.apply(
        TrialStarted(live.attempt_id, live.trial_id, live.device_ids, live.priority, live.is_resumable, 5.0)
    )
    house.state.apply(LeaseClean("unknown"))
    house.state.apply(TrialGone("unknown"))
    house.state.apply(TrialYielding("unknown", "a", math.inf))
    assert house.state.snapshot() == before


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (Compute(gpus=4), None),
        (Compute(gpus=5), "only 4"),
        (Compute(gpus="3-9"), None),
        (Compute(gpus=1, type=("b200",)), "no device of type b200"),
        (Compute(gpus=3, type=("a100",)), "only 1"),
        (Compute(nodes=2, gpus_per_node=2), "which no set of nodes here has"),
        (Compute(gpus=3, nodes=2), "evenly"),
    ],
)
def test_what_can_never_be_given_is_named(compute: Compute, words: str | None) -> None:
    house = House(3, 1, types={"n1/0": "A100"})
    house.device("n0/0", DeviceState.QUARANTINED)
    reason = unsatisfiable(house.state.fleet.devices.values(), compute)
    assert (reason is None) if words is None else (reason is not None and words in reason)
    assert unsatisfiable([], compute) is None or words == "evenly"


def test_one_node_at_a_time_limits_what_can_be_given() -> None:
    devices = House(3, 2).state.fleet.devices.values()
    assert unsatisfiable(devices, Compute(gpus=4)) is None
    reason = unsatisfiable(devices, Compute(gpus=4), Rules(span_nodes=False))
    assert reason == "it asks for 4 devices, and there are only 3 on one node"


def why(house: House, trial_id: str, state: TrialState = TrialState.QUEUED) -> str:
    return explain(house.state, trial_id, now=house.now, trial_state=state).reason


def test_explains_what_a_trial_waits_for() -> None:
    house = House(2)
    assert "running" in why(house, "x", TrialState.RUNNING)
    house.queue("big", devices=2, priority=EXPLORATORY)
    assert why(house, "big") == "it is about to start"
    house.decide()
    house.queue("next")
    house.decide()
    assert "big is yielding its devices to it" in why(house, "next")
    house.queue("later")
    answer = explain(house.state, "later", now=house.now, trial_state=TrialState.QUEUED)
    assert answer.position == 2
    assert answer.waits_for == ("big",)
    house.queue("delayed", not_before=30.0)
    assert "30 s" in why(house, "delayed")


def test_explains_reservations_health_and_types() -> None:
    house = House(2)
    house.queue("a")
    house.decide()
    house.queue("gang", devices=2)
    house.queue("small")
    house.decide()
    assert why(house, "small") == "idle devices are held for gang, which is before it and needs more"
    house.device("n0/1", DeviceState.QUARANTINED)
    assert why(house, "gang") == "it needs 2 devices, and only 1 can be used: n0/1 is quarantined"
    house.queue("typed", demand=Demand(1, 1, types=("b200",)))
    assert "no node" in why(house, "typed")


def test_a_preempt_names_attempt_and_pre_emptor() -> None:
    house = House(1)
    house.queue("a", priority=EXPLORATORY)
    house.decide()
    house.queue("u", priority=URGENT)
    assert house.state.decide(0.0) == [Preempt(house.attempt("a"), "a", "u")]
