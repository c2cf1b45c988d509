"""CPU slots: a machine without a GPU still runs trials side by side, a slot each."""

import platform
from collections.abc import Collection, Sequence
from pathlib import Path

from overnight.core.models.node import DeviceReport
from overnight.platform.pools.pool import process_is_alive


class CpuPool:
    """``num_slots`` devices of kind ``cpu``. They are counted, not pinned: the operating system shares the cores."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._memory_bytes = _memory_bytes() // num_slots
        self._type = platform.machine() or "cpu"

    def probe(self) -> list[DeviceReport]:
        """Every slot; a slot has no health of its own."""
        return [
            DeviceReport(index=i, kind="cpu", type=self._type, memory_bytes=self._memory_bytes, uuid=f"cpu-{i}")
            for i in range(self._num_slots)
        ]

    def visible(self, indices: Sequence[int]) -> dict[str, str]:
        """Hides all GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ""}

    def is_clean(self, index: int, pids: Collection[int]) -> bool:
        """Whether all of the processes are gone."""
        return not any(process_is_alive(pid) for pid in pids)

    def describe(self) -> str:
        """E.g. ``4 CPU slots``."""
        return f"{self._num_slots} CPU slot{'s' if self._num_slots != 1 else ''}"


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0
