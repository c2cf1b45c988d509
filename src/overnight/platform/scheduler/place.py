"""Which of the free devices a trial gets: the fewest nodes, whole nodes left free, doubtful devices last."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overnight.core.enums import DeviceState
from overnight.platform.scheduler.events import Demand, DeviceView, Size

Zones = Mapping[str, Sequence[DeviceView]]
"""Devices by node."""

_DOUBT = {DeviceState.HEALTHY: 0, DeviceState.PROBATION: 1, DeviceState.SUSPECT: 2}


@dataclass(frozen=True, slots=True)
class Fit:
    """Which devices suit a trial, whoever holds them.

    Attributes:
        types: As in the demand.
        avoid: Devices that it must not get.
        canary: Whether devices on probation suit.
        bound_trial_id: The trial, if devices are bound to it.
    """

    types: tuple[str, ...]
    avoid: frozenset[str]
    canary: bool
    bound_trial_id: str | None

    def suits(self, device: DeviceView) -> bool:
        """Type, health and exclusions."""
        return (
            device.is_leasable
            and (not self.types or device.type.lower() in self.types)
            and device.id not in self.avoid
            and (self.canary or device.state is not DeviceState.PROBATION)
        )


def preference(device: DeviceView) -> tuple[int, int, str]:
    """Sorts the devices of a node: healthy before doubtful, then by index."""
    return (_DOUBT.get(device.state, 3), device.index, device.id)


def choose(demand: Demand, zones: Zones, *, span_nodes: bool) -> tuple[DeviceView, ...] | None:
    """The devices for a start, or None if the demand does not fit.

    Args:
        demand: What is asked for; the largest size that fits is taken.
        zones: Free devices that suit, each node's sorted by :func:`preference`.
        span_nodes: Whether a trial may use several nodes.
    """
    total = sum(map(len, zones.values())) if span_nodes else max(map(len, zones.values()), default=0)
    if total < demand.min_devices:
        return None
    sound = {node: sound for node, devices in zones.items() if (sound := _sound(devices))}
    for size in demand.sizes(total):
        for candidates in (sound, zones) if len(sound) < len(zones) or _smaller(sound, zones) else (zones,):
            chosen = _choose_size(size, candidates, span_nodes)
            if chosen is not None:
                return chosen
    return None


def _sound(devices: Sequence[DeviceView]) -> Sequence[DeviceView]:
    """The leading devices that are not under suspicion."""
    if not devices or devices[-1].state is not DeviceState.SUSPECT:
        return devices
    return [device for device in devices if device.state is not DeviceState.SUSPECT]


def _smaller(some: Zones, all_: Zones) -> bool:
    return any(len(some[node]) < len(devices) for node, devices in all_.items())


def _choose_size(size: Size, zones: Zones, span_nodes: bool) -> tuple[DeviceView, ...] | None:
    if size.nodes is None:
        return _anywhere(size.total, zones, span_nodes)
    if size.nodes > 1 and not span_nodes:
        return None
    fitting = sorted((len(devices), node) for node, devices in zones.items() if len(devices) >= size.per_node)
    if len(fitting) < size.nodes:
        return None
    return tuple(d for node in sorted(n for _, n in fitting[: size.nodes]) for d in zones[node][: size.per_node])


def _anywhere(total: int, zones: Zones, span_nodes: bool) -> tuple[DeviceView, ...] | None:
    """One node if one suffices, the tightest; else the fullest nodes and, for the rest, the tightest again."""
    counts = [(len(devices), node) for node, devices in zones.items()]
    taken: list[tuple[str, int]] = []
    while total:
        tight = min((item for item in counts if item[0] >= total), default=None)
        if tight is not None:
            taken.append((tight[1], total))
            break
        if not counts or not span_nodes:
            return None
        largest = max(counts, key=lambda item: (item[0], item[1]))
        counts.remove(largest)
        taken.append((largest[1], largest[0]))
        total -= largest[0]
    return tuple(device for node, num in sorted(taken) for device in zones[node][:num])


def group_by_node(devices: Iterable[DeviceView]) -> dict[str, list[DeviceView]]:
    """Zones of the devices, each sorted by :func:`preference`."""
    zones: dict[str, list[DeviceView]] = {}
    for device in devices:
        zones.setdefault(device.node_id, []).append(device)
    for node_devices in zones.values():
        node_devices.sort(key=preference)
    return zones
