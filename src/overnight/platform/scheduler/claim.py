"""What a trial that cannot start yet lays its hand on: free devices, those coming free, and those of victims.

Without it, small trials would take every device that a gang waits for, one by one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from overnight.platform.scheduler.events import Demand, DeviceView, Live, Phase, Size


@dataclass(frozen=True, slots=True)
class Claim:
    """The result.

    Attributes:
        device_ids: Devices that nobody behind the trial may have now.
        victims: Attempts that must yield.
        is_enough: Whether the trial can start once all of that is free; else it only holds what there is.
    """

    device_ids: tuple[str, ...]
    victims: tuple[str, ...]
    is_enough: bool


@dataclass(slots=True)
class Zone:
    """The suitable devices of one node, or of all nodes together, by how they can be had."""

    name: str
    free: list[str] = field(default_factory=list)
    coming: list[str] = field(default_factory=list)
    by_victim: dict[str, list[str]] = field(default_factory=dict)
    num_busy: int = 0

    @property
    def num_devices(self) -> int:
        """All of them, also those that cannot be had now."""
        return len(self.free) + len(self.coming) + sum(map(len, self.by_victim.values())) + self.num_busy


@dataclass(frozen=True, slots=True)
class Offer:
    """How a zone can give what is needed, and what that costs."""

    zone: str
    cost: tuple[int, float]
    device_ids: tuple[str, ...]
    victims: tuple[str, ...]


def make_zones(
    devices: Iterable[DeviceView],
    holder: Callable[[str], Live | None],
    is_victim: Callable[[Live], bool],
    *,
    merged: bool,
) -> list[Zone]:
    """Zones of suitable devices, by name.

    Args:
        devices: Those that suit, that nobody ahead has claimed and that are bound to nobody else.
        holder: The attempt that has a device.
        is_victim: Whether an attempt may be asked to yield.
        merged: One zone for all nodes.
    """
    zones: dict[str, Zone] = {}
    for device in sorted(devices, key=lambda d: (d.node_id, d.index, d.id)):
        name = "" if merged else device.node_id
        zone = zones.get(name) or zones.setdefault(name, Zone(name))
        live = holder(device.id)
        if live is None:
            zone.free.append(device.id)
        elif live.phase is not Phase.RUNNING:
            zone.coming.append(device.id)
        elif is_victim(live):
            zone.by_victim.setdefault(live.attempt_id, []).append(device.id)
        else:
            zone.num_busy += 1
    return [zones[name] for name in sorted(zones)]


def claim(demand: Demand, zones: list[Zone], lives: dict[str, Live], now: float, *, span_nodes: bool) -> Claim | None:
    """The claim of a blocked trial; None if the devices of these zones could never satisfy it, or it holds none."""
    size = demand.smallest
    if size is None or ((size.nodes or 1) > 1 and not span_nodes):
        return None
    num_zones = size.nodes or 1
    offers = sorted(
        (offer for zone in zones if (offer := _offer(zone, size, lives, now)) is not None),
        key=lambda offer: (offer.cost, offer.zone),
    )
    if len(offers) >= num_zones:
        chosen = offers[:num_zones]
        victims = dict.fromkeys(victim for offer in chosen for victim in offer.victims)
        return Claim(tuple(d for offer in chosen for d in offer.device_ids), tuple(victims), True)
    return _hold(zones, size) if size.total > 1 else None


def _offer(zone: Zone, size: Size, lives: dict[str, Live], now: float) -> Offer | None:
    """The least loss: the lowest classes first, then the fewest device-seconds since a commit; none too many."""
    have = len(zone.free) + len(zone.coming)
    order = sorted(zone.by_victim, key=lambda a: (-lives[a].priority, lives[a].loss(now), a))
    chosen: list[str] = []
    for attempt_id in order:
        if have >= size.per_node:
            break
        chosen.append(attempt_id)
        have += len(zone.by_victim[attempt_id])
    if have < size.per_node:
        return None
    for attempt_id in sorted(chosen, key=lambda a: (lives[a].priority, -lives[a].loss(now), a)):
        if have - len(zone.by_victim[attempt_id]) >= size.per_node:
            chosen.remove(attempt_id)
            have -= len(zone.by_victim[attempt_id])
    devices = [*zone.free, *zone.coming, *(d for a in chosen for d in zone.by_victim[a])]
    highest = min((lives[a].priority for a in chosen), default=99)
    cost = (-highest, sum(lives[a].loss(now) for a in chosen))
    return Offer(zone.name, cost, tuple(devices[: size.per_node]), tuple(chosen))


def _hold(zones: list[Zone], size: Size) -> Claim | None:
    """The free devices of the zones that are nearest to what a gang needs, so that they add up in time."""
    able = [zone for zone in zones if zone.num_devices >= size.per_node]
    if len(able) < (size.nodes or 1):
        return None
    able.sort(key=lambda zone: (-len(zone.free), -len(zone.coming), zone.name))
    held = tuple(d for zone in able[: size.nodes or 1] for d in zone.free[: size.per_node])
    return Claim(held, (), False) if held else None
