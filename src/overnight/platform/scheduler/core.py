"""The scheduler's decisions: pure, incremental, replayable.

The state is what events made it; :meth:`State.decide` reads it and answers with actions, which become events once
the store has accepted them. Nothing here knows a database, a process or the time.

The rules, for each trial in the order of the line (class, then rank, then place):

1. It starts if enough suitable devices are free: the fewest nodes, doubtful devices last.
2. Else it claims devices, which nobody behind it may have: free ones, those coming free and, if that is still not
   enough, those of resumable trials of lower classes, which are told to yield (least loss first). What a victim frees
   is bound to its pre-emptor until that starts or a time is over.
3. A gang that can claim no full set holds the free devices of the best place, so that they add up in time.

Only the first blocked trial of those that ask for the same holds devices.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import singledispatchmethod

from overnight.platform.scheduler.claim import Claim, Zone, claim, make_zones
from overnight.platform.scheduler.events import (
    Action,
    CheckpointCommitted,
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
from overnight.platform.scheduler.fleet import Fleet
from overnight.platform.scheduler.line import Group, Line
from overnight.platform.scheduler.place import Fit, choose, group_by_node

MAX_CLAIMS = 64
"""Claims examined in one decision. The rest follow in the next one, which the first ones' events bring about."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an installation can vary.

    Attributes:
        span_nodes: Whether one attempt may use devices of several nodes.
    """

    span_nodes: bool = True


@dataclass(frozen=True, slots=True)
class Binding:
    """A device that is kept for a pre-emptor."""

    trial_id: str
    until: float


@dataclass(frozen=True)
class Snapshot:
    """Everything that the state knows; equal states have equal snapshots."""

    devices: tuple[DeviceView, ...]
    waiting: tuple[Waiting, ...]
    live: tuple[Live, ...]
    bindings: tuple[tuple[str, Binding], ...]


class State:
    """What the scheduler knows. Changed by :meth:`apply` alone."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.fleet = Fleet()
        self.line = Line()
        self.live: dict[str, Live] = {}
        self.bindings: dict[str, Binding] = {}
        self._preemptible: dict[int, set[str]] = {}
        self._leaving: set[str] = set()
        self._bound: dict[str, set[str]] = {}
        self._expiries: list[tuple[float, str]] = []
        self._changed = False

    def snapshot(self) -> Snapshot:
        """The state as a value."""
        return Snapshot(
            tuple(sorted(self.fleet.devices.values(), key=lambda d: d.id)),
            tuple(sorted(self.line.trials.values(), key=lambda t: t.key)),
            tuple(sorted(self.live.values(), key=lambda a: a.attempt_id)),
            tuple(sorted(self.bindings.items(), key=lambda item: item[0])),
        )

    @classmethod
    def rebuild(cls, snapshot: Snapshot, rules: Rules | None = None) -> "State":
        """The state of a snapshot."""
        state = cls(rules)
        for device in snapshot.devices:
            state.fleet.put(device)
        for trial in snapshot.waiting:
            state.line.put(trial, -math.inf)
        for live in snapshot.live:
            state._set_live(live)
            state.fleet.hold(live.device_ids, live.attempt_id)
        for device_id, binding in snapshot.bindings:
            state._bind(device_id, binding)
        state._changed = True
        return state

    @singledispatchmethod
    def _apply(self, event: Event) -> None:
        raise TypeError(f"{event!r} is no event of the scheduler")

    def apply(self, event: Event) -> None:
        """Takes note of what has happened. Events may come twice; what they say replaces what was known."""
        self._apply(event)
        if not isinstance(event, CheckpointCommitted):
            self._changed = True

    @_apply.register
    def _(self, event: DeviceChanged) -> None:
        self.fleet.put(event.device)

    @_apply.register
    def _(self, event: DeviceGone) -> None:
        self.fleet.remove(event.device_id)

    @_apply.register
    def _(self, event: TrialQueued) -> None:
        self.line.put(event.trial, -math.inf)

    @_apply.register
    def _(self, event: TrialGone) -> None:
        self.line.remove(event.trial_id)
        self._unbind_all(event.trial_id)

    @_apply.register
    def _(self, event: TrialStarted) -> None:
        self.line.remove(event.trial_id)
        self._unbind_all(event.trial_id)
        if event.attempt_id in self.live:
            return
        for device_id in event.device_ids:
            self._unbind(device_id)
        live = Live(
            event.attempt_id, event.trial_id, event.device_ids, event.priority, event.is_resumable, since=event.at
        )
        self._set_live(live)
        self.fleet.hold(live.device_ids, live.attempt_id)

    @_apply.register
    def _(self, event: TrialYielding) -> None:
        live = self.live.get(event.attempt_id)
        if live is None:
            return
        if live.phase is Phase.RUNNING:
            live = replace(live, phase=Phase.YIELDING)
        if event.for_trial_id is not None and event.for_trial_id in self.line.trials:
            live = replace(live, for_trial_id=event.for_trial_id, bound_until=event.bound_until)
            for device_id in live.device_ids:
                self._bind(device_id, Binding(event.for_trial_id, event.bound_until))
        self._set_live(live)

    @_apply.register
    def _(self, event: TrialStopping) -> None:
        self._set_phase(event.attempt_id, Phase.STOPPING)

    @_apply.register
    def _(self, event: LeaseReleasing) -> None:
        self._set_phase(event.attempt_id, Phase.RELEASING)

    @_apply.register
    def _(self, event: ResumableChanged) -> None:
        if (live := self.live.get(event.attempt_id)) is not None:
            self._set_live(replace(live, is_resumable=event.is_resumable))

    @_apply.register
    def _(self, event: CheckpointCommitted) -> None:
        if (live := self.live.get(event.attempt_id)) is not None:
            self._set_live(replace(live, since=max(live.since, event.at)))

    @_apply.register
    def _(self, event: LeaseClean) -> None:
        live = self.live.pop(event.attempt_id, None)
        if live is not None:
            self._preemptible.get(live.priority, set()).discard(live.attempt_id)
            self._leaving.discard(live.attempt_id)
            self.fleet.release(live.device_ids, live.attempt_id)

    def _set_phase(self, attempt_id: str, phase: Phase) -> None:
        if (live := self.live.get(attempt_id)) is not None:
            self._set_live(replace(live, phase=phase))

    def _set_live(self, live: Live) -> None:
        self.live[live.attempt_id] = live
        (self._leaving.discard if live.phase is Phase.RUNNING else self._leaving.add)(live.attempt_id)
        members = self._preemptible.setdefault(live.priority, set())
        if live.is_resumable and live.phase is Phase.RUNNING:
            members.add(live.attempt_id)
        else:
            members.discard(live.attempt_id)

    def _bind(self, device_id: str, binding: Binding) -> None:
        self._unbind(device_id)
        self.bindings[device_id] = binding
        self._bound.setdefault(binding.trial_id, set()).add(device_id)
        self.line.bind(binding.trial_id, True)
        heapq.heappush(self._expiries, (binding.until, device_id))

    def _unbind(self, device_id: str) -> None:
        binding = self.bindings.pop(device_id, None)
        if binding is None:
            return
        devices = self._bound[binding.trial_id]
        devices.discard(device_id)
        if not devices:
            del self._bound[binding.trial_id]
            self.line.bind(binding.trial_id, False)

    def _unbind_all(self, trial_id: str) -> None:
        for device_id in list(self._bound.get(trial_id, ())):
            self._unbind(device_id)

    def bound_trial(self, device_id: str, now: float) -> str | None:
        """The pre-emptor that a device is kept for."""
        binding = self.bindings.get(device_id)
        return binding.trial_id if binding is not None and binding.until > now else None

    def devices_bound_to(self, trial_id: str | None) -> Iterable[str]:
        """The devices kept for a pre-emptor, whether or not their time is over."""
        return self._bound.get(trial_id, ()) if trial_id is not None else ()

    def holder(self, device_id: str) -> Live | None:
        """The attempt that has the device."""
        attempt_id = self.fleet.holders.get(device_id)
        return None if attempt_id is None else self.live.get(attempt_id)

    def coming_free(self) -> Iterator[DeviceView]:
        """Leasable devices whose attempt has ended or was told to leave."""
        for attempt_id in self._leaving:
            for device_id in self.live[attempt_id].device_ids:
                device = self.fleet.devices.get(device_id)
                if device is not None and device.is_leasable and self.fleet.holders.get(device_id) == attempt_id:
                    yield device

    def has_victims(self, priority: int) -> bool:
        """Whether some attempt of a lower class could be pre-empted."""
        return any(members for of_class, members in self._preemptible.items() if of_class > priority)

    def decide(self, now: float) -> list[Action]:
        """What to do now. Changes nothing that :meth:`snapshot` shows; cheap when nothing has happened."""
        due = self._expire(now)
        due = self.line.admit(now) or due
        if not (self._changed or due):
            return []
        actions = list(Decision(self, now).actions())
        self._changed = bool(actions)
        return actions

    def next_wake(self) -> float | None:
        """When to decide again even if nothing happens: a backoff or a binding ends."""
        times = [
            time for time in (self.line.next_admission(), self._expiries[0][0] if self._expiries else None) if time
        ]
        return min(times, default=None)

    def _expire(self, now: float) -> bool:
        found = False
        while self._expiries and self._expiries[0][0] <= now:
            _, device_id = heapq.heappop(self._expiries)
            binding = self.bindings.get(device_id)
            if binding is not None and binding.until <= now:
                found = True
        return found


class Decision:
    """One walk along the line. Keeps what it has given away apart from the state."""

    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._now = now
        self._taken: set[str] = set()
        self._victims: set[str] = set()
        self._zones: dict[Fit, dict[str, list[DeviceView]]] = {}

    def actions(self) -> Iterator[Action]:
        """Starts and pre-emptions, in the order of the line."""
        num_claims = 0
        heads = self._state.line.heads()
        for trial_id, group in heads:
            fit = self._fit(group)
            started = choose(group.demand, self._free(fit), span_nodes=self._state.rules.span_nodes)
            if started is not None:
                yield Start(trial_id, tuple(device.id for device in started))
                self._take(device.id for device in started)
                heads.go_on()
            elif num_claims < MAX_CLAIMS and (claimed := self._claim(group, fit)) is not None:
                num_claims += 1
                yield from self._preempt(trial_id, claimed)
                if claimed.is_enough:
                    heads.go_on()

    def _preempt(self, trial_id: str, claimed: Claim) -> Iterator[Preempt]:
        self._take(claimed.device_ids)
        for attempt_id in claimed.victims:
            self._victims.add(attempt_id)
            yield Preempt(attempt_id, self._state.live[attempt_id].trial_id, trial_id)

    def _fit(self, group: Group) -> Fit:
        fit = Fit(group.demand.types, group.avoid, group.takes_canaries, group.bound_trial_id)
        if group.avoid and not self._is_possible(group, fit):
            return replace(fit, avoid=frozenset())  # elsewhere does not exist: better there again than never
        return fit

    def _is_possible(self, group: Group, fit: Fit) -> bool:
        zones = group_by_node(device for device in self._state.fleet.all_leasable() if fit.suits(device))
        return choose(group.demand, zones, span_nodes=self._state.rules.span_nodes) is not None

    def _is_open(self, device: DeviceView, fit: Fit) -> bool:
        """Whether the device suits and is promised to nobody else."""
        if device.id in self._taken or not fit.suits(device):
            return False
        bound = self._state.bound_trial(device.id, self._now)
        return bound is None or bound == fit.bound_trial_id

    def _free(self, fit: Fit) -> dict[str, list[DeviceView]]:
        zones = self._zones.get(fit)
        if zones is None:
            free = (d for devices in self._state.fleet.free.values() for d in devices.values())
            zones = self._zones[fit] = group_by_node(d for d in free if self._is_open(d, fit))
        return zones

    def _take(self, device_ids: Iterable[str]) -> None:
        for device_id in device_ids:
            self._taken.add(device_id)
            device = self._state.fleet.devices[device_id]
            for zones in self._zones.values():
                devices = zones.get(device.node_id)
                if devices is not None and device in devices:
                    devices.remove(device)

    def _has_enough_bound(self, group: Group, fit: Fit) -> bool:
        """Whether a single device is on its way: nothing to look for, and nobody else may take it anyway."""
        devices = self._state.fleet.devices
        return group.demand.min_devices == 1 and any(
            (device := devices.get(device_id)) is not None and self._is_open(device, fit)
            for device_id in self._state.devices_bound_to(group.bound_trial_id)
        )

    def _claim(self, group: Group, fit: Fit) -> Claim | None:
        if group.bound_trial_id is not None and self._has_enough_bound(group, fit):
            return Claim((), (), True)
        has_victims = self._state.has_victims(group.priority)
        if group.demand.min_devices == 1 and not has_victims and group.bound_trial_id is None:
            return None
        is_one_zone = group.demand.nodes is None and group.demand.per_node is None
        merged = is_one_zone and self._state.rules.span_nodes
        if not has_victims and not self._state.bindings:
            zones = self._zones_without_victims(fit, merged=merged, is_one_zone=is_one_zone)
            return claim(group.demand, zones, {}, self._now, span_nodes=self._state.rules.span_nodes)
        zones = make_zones(
            (device for device in self._state.fleet.all_leasable() if self._is_open(device, fit)),
            self._state.holder,
            lambda live: live.is_resumable and live.priority > group.priority and live.attempt_id not in self._victims,
            merged=merged,
        )
        return claim(group.demand, zones, self._state.live, self._now, span_nodes=self._state.rules.span_nodes)

    def _zones_without_victims(self, fit: Fit, *, merged: bool, is_one_zone: bool) -> list[Zone]:
        """What :func:`make_zones` gives when nobody can be pre-empted, from what is free or coming free alone."""
        coming = [d for d in self._state.coming_free() if self._is_open(d, fit)]
        free = [device for devices in self._free(fit).values() for device in devices]
        zones = make_zones([*free, *coming], self._state.holder, lambda live: False, merged=merged)
        totals = self._state.fleet.count_suitable(fit)
        for device_id in self._taken:
            device = self._state.fleet.devices[device_id]
            if fit.suits(device):
                totals[device.node_id] -= 1
        if merged:
            totals = {"": sum(totals.values())}
        by_name = {zone.name: zone for zone in zones}
        # A busy node matters only where the nodes are counted: where one is enough, it has nothing to hold.
        names = by_name.keys() if is_one_zone else totals.keys()
        for name in [name for name in names if totals.get(name)]:
            zone = by_name.setdefault(name, Zone(name))
            zone.num_busy = totals[name] - zone.num_devices
        return [by_name[name] for name in sorted(by_name)]
