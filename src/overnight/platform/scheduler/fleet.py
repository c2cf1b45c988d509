"""Which devices exist, who holds them, and which are free: kept up to date device by device, never recounted."""

from collections.abc import Iterable, Iterator

from overnight.platform.scheduler.events import DeviceView
from overnight.platform.scheduler.place import Fit

ByNode = dict[str, dict[str, DeviceView]]


class Fleet:
    """All devices of all nodes."""

    def __init__(self) -> None:
        self.devices: dict[str, DeviceView] = {}
        self.holders: dict[str, str] = {}
        self.leasable: ByNode = {}
        self.free: ByNode = {}
        self._counts: dict[object, dict[str, int]] = {}

    def put(self, device: DeviceView) -> None:
        """Adds a device, or replaces what is known of it."""
        self.remove(device.id)
        self.devices[device.id] = device
        self._counts.clear()
        if device.is_leasable:
            self.leasable.setdefault(device.node_id, {})[device.id] = device
            if device.id not in self.holders:
                self.free.setdefault(device.node_id, {})[device.id] = device

    def remove(self, device_id: str) -> None:
        """Forgets a device. Who holds it stays known: it may come back while held."""
        device = self.devices.pop(device_id, None)
        if device is not None:
            self._counts.clear()
            _discard(self.leasable, device)
            _discard(self.free, device)

    def hold(self, device_ids: Iterable[str], attempt_id: str) -> None:
        """Takes devices out of the free ones."""
        for device_id in device_ids:
            self.holders[device_id] = attempt_id
            if (device := self.devices.get(device_id)) is not None:
                _discard(self.free, device)

    def release(self, device_ids: Iterable[str], attempt_id: str) -> list[str]:
        """Gives back those that the attempt still holds, and returns them."""
        given = [device_id for device_id in device_ids if self.holders.get(device_id) == attempt_id]
        for device_id in given:
            del self.holders[device_id]
            if (device := self.devices.get(device_id)) is not None and device.is_leasable:
                self.free.setdefault(device.node_id, {})[device_id] = device
        return given

    def all_leasable(self) -> Iterator[DeviceView]:
        """Every device whose state allows a lease, held or free."""
        for devices in self.leasable.values():
            yield from devices.values()

    def count_suitable(self, fit: Fit) -> dict[str, int]:
        """How many devices of each node suit, held or free. Counted again only when a device has changed."""
        key = (fit.types, fit.avoid, fit.canary)
        counts = self._counts.get(key)
        if counts is None:
            counts = {node: sum(map(fit.suits, devices.values())) for node, devices in self.leasable.items()}
            self._counts[key] = counts
        return dict(counts)


def _discard(by_node: ByNode, device: DeviceView) -> None:
    devices = by_node.get(device.node_id)
    if devices is not None and devices.pop(device.id, None) is not None and not devices:
        del by_node[device.node_id]
