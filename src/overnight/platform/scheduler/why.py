"""Why a trial is not running, and what would change that."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from overnight.core.enums import CLASS_ORDER, TrialState
from overnight.core.models.api import Why
from overnight.core.models.spec import Compute
from overnight.platform.scheduler.core import Rules, State
from overnight.platform.scheduler.events import Demand, DeviceView, Live, Phase, Waiting
from overnight.platform.scheduler.place import choose, group_by_node


class _Located(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def node_id(self) -> str: ...
    @property
    def type(self) -> str: ...


def unsatisfiable(devices: Iterable[_Located], compute: Compute, rules: Rules | None = None) -> str | None:
    """Why no devices that exist, healthy or not, could ever give what is asked; None if they could.

    Without any device nothing is known yet: a node may still come.
    """
    span_nodes = (rules or Rules()).span_nodes
    demand = Demand.of(compute)
    if demand.smallest is None:
        return f"{_count(demand.min_devices)} cannot be spread evenly over {_shape(demand)}"
    every = list(devices)
    if not every:
        return None
    suitable = [device for device in every if not demand.types or device.type.lower() in demand.types]
    types = ", ".join(sorted({device.type for device in every}))
    if not suitable:
        return f"there is no device of type {' or '.join(demand.types)}; there are {types}"
    per_node: dict[str, int] = {}
    for device in suitable:
        per_node[device.node_id] = per_node.get(device.node_id, 0) + 1
    most = len(suitable) if span_nodes else max(per_node.values())
    of_type = f" of type {' or '.join(demand.types)}" if demand.types else ""
    if demand.min_devices > most:
        where = "" if span_nodes or len(per_node) == 1 else " on one node"
        return f"it asks for {_count(demand.min_devices)}{of_type}, and there are only {most}{where}"
    if not any(_fits(per_node, size.nodes, size.per_node, span_nodes) for size in demand.sizes(most)):
        return f"it asks for {_count(demand.min_devices)}{of_type} on {_shape(demand)}, which no set of nodes here has"
    return None


def _fits(per_node: Mapping[str, int], nodes: int | None, each: int, span_nodes: bool) -> bool:
    if nodes is None:
        return True
    return (nodes == 1 or span_nodes) and sum(count >= each for count in per_node.values()) >= nodes


def _count(number: int) -> str:
    return f"{number} device{'s' if number != 1 else ''}"


def _shape(demand: Demand) -> str:
    nodes = f"{demand.nodes} node{'s' if demand.nodes != 1 else ''}" if demand.nodes else "nodes"
    return f"{nodes} with {demand.per_node} each" if demand.per_node else nodes


@dataclass(frozen=True)
class _Scene:
    """Who has the devices that would suit a waiting trial."""

    suitable: list[DeviceView]
    usable: list[DeviceView]
    holders: list[Live]
    idle: list[DeviceView]


def explain(
    state: State, trial_id: str, *, now: float, trial_state: TrialState, name: Callable[[str], str] = str
) -> Why:
    """The reason in one sentence, what would change it, and whom the trial waits for.

    Args:
        state: The scheduler's state.
        trial_id: The trial.
        now: On the scheduler's clock.
        trial_state: What the store says, for trials that do not wait.
        name: What people call a trial.
    """
    trial = state.line.trials.get(trial_id)
    if trial is None:
        why_not, advice = _NOT_WAITING.get(trial_state, ("it has just been queued", ("Ask again in a moment.",)))
        return Why(trial_id=trial_id, state=trial_state, reason=why_not, changes=advice)
    scene = _look(state, trial)
    reason, changes, waits_for = _reason(state, trial, scene, now, name)
    return Why(
        trial_id=trial_id,
        state=trial_state,
        reason=reason,
        changes=tuple(changes),
        position=state.line.position(trial_id),
        waits_for=tuple(dict.fromkeys(name(other) for other in waits_for)),
    )


_NOT_WAITING: dict[TrialState, tuple[str, tuple[str, ...]]] = {
    TrialState.HELD: ("it is held", ("Release it with `overnight unhold`.",)),
    TrialState.STARTING: ("it is starting", ()),
    TrialState.RUNNING: ("it is running", ()),
    TrialState.YIELDING: ("it is saving its state to make room, and then waits at its old place", ()),
    TrialState.STOPPING: ("it is being stopped", ()),
    TrialState.COMPLETED: ("it is complete", ("Run it again with `overnight rerun`.",)),
    TrialState.PRUNED: ("it was pruned: others were better at the same step", ("Run it with `overnight rerun`.",)),
    TrialState.FAILED: ("it failed; `overnight show` has the error", ("Fix it, then `overnight rerun`.",)),
    TrialState.CANCELLED: ("it was cancelled", ("Run it with `overnight rerun`.",)),
}


def _look(state: State, trial: Waiting) -> _Scene:
    types = trial.demand.types
    suitable = [d for d in state.fleet.devices.values() if not types or d.type.lower() in types]
    usable = [d for d in suitable if d.is_leasable]
    holders = {live.attempt_id: live for d in usable if (live := state.holder(d.id)) is not None}
    idle = [d for d in usable if state.holder(d.id) is None]
    return _Scene(suitable, usable, sorted(holders.values(), key=lambda live: live.attempt_id), idle)


_Answer = tuple[str, list[str], list[str]]


def _reason(state: State, trial: Waiting, scene: _Scene, now: float, name: Callable[[str], str]) -> _Answer:
    if trial.not_before > now:
        wait = max(1, round(trial.not_before - now))
        return f"it met an infrastructure fault and is tried again in {wait} s", [f"Waiting {wait} s."], []
    if not scene.suitable:
        return "no node with suitable devices has connected yet", ["A node with such devices connects."], []
    if not _could_start(state, trial, scene.usable):
        return _unhealthy(trial, scene)
    bound = [live for live in scene.holders if live.for_trial_id == trial.trial_id and live.phase is not Phase.RUNNING]
    if bound:
        names = ", ".join(name(live.trial_id) for live in bound)
        return (
            f"{names} is yielding its devices to it",
            ["They are free within the grace."],
            [b.trial_id for b in bound],
        )
    if _could_start(state, trial, scene.idle):
        return _passed_over(state, trial, scene, now, name)
    return _busy(state, trial, scene)


def _could_start(state: State, trial: Waiting, devices: Iterable[DeviceView]) -> bool:
    return choose(trial.demand, group_by_node(devices), span_nodes=state.rules.span_nodes) is not None


def _unhealthy(trial: Waiting, scene: _Scene) -> _Answer:
    out = [d for d in scene.suitable if not d.is_leasable]
    states = ", ".join(f"{d.id} is {d.state}" for d in sorted(out, key=lambda d: d.id)[:8])
    reason = f"it needs {_count(trial.demand.min_devices)}, and only {len(scene.usable)} can be used: {states}"
    return reason, ["A device is released (`overnight devices`)."], []


def _passed_over(state: State, trial: Waiting, scene: _Scene, now: float, name: Callable[[str], str]) -> _Answer:
    owners = {owner for d in scene.idle if (owner := state.bound_trial(d.id, now)) not in (None, trial.trial_id)}
    if owners:
        ids = sorted(owner for owner in owners if owner is not None)
        return f"idle devices are kept for {', '.join(map(name, ids))}", ["That trial starts."], ids
    if trial.avoid and not _could_start(state, trial, [d for d in scene.idle if d.id not in trial.avoid]):
        return "the idle devices are those on which it failed before", ["Another device becomes free."], []
    first = next(
        (t for t in state.line.ordered() if t != trial.trial_id and state.line.trials[t].key < trial.key), None
    )
    if first is None:
        return "it is about to start", [], []
    return (
        f"idle devices are held for {name(first)}, which is before it and needs more",
        ["That trial starts."],
        [first],
    )


def _busy(state: State, trial: Waiting, scene: _Scene) -> _Answer:
    ahead = (state.line.position(trial.trial_id) or 1) - 1
    before = f" and {ahead} trial{'s are' if ahead != 1 else ' is'} before it" if ahead else ""
    free = (
        f"only {len(scene.idle)} of {len(scene.usable)} suitable devices are" if scene.idle else "no suitable device is"
    )
    reason = f"it needs {_count(trial.demand.min_devices)}; {free} free{before}"
    changes = ["A running trial ends."]
    if ahead:
        changes.append("`overnight bump` puts it first in its class.")
    if trial.priority and any(live.is_resumable and live.priority > trial.priority - 1 for live in scene.holders):
        changes.append(f"Priority {CLASS_ORDER[trial.priority - 1]} lets it pre-empt.")
    return reason, changes, [live.trial_id for live in scene.holders]
