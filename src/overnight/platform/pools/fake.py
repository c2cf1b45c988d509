"""Fake GPUs whose faults come from a file, so that everything above the probe is the code that real GPUs run."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overnight.core.clock import Clock
from overnight.core.models.node import DeviceReport
from overnight.core.paths import Home
from overnight.platform.health.causes import CauseTable, shipped_causes
from overnight.platform.pools.pool import process_is_alive

MEMORY_BYTES = 80 * 2**30
BUSY = "busy"


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """A line of the faults file.

    Attributes:
        cause: A cause of the health table, or ``busy``; None ends all earlier faults of the device.
        begins_at: Unix seconds.
        ends_at: Unix seconds, infinity if it stays.
        line: Its place in the file, from 1; orders what begins at the same moment.
    """

    device: int
    cause: str | None
    begins_at: float
    ends_at: float
    line: int


class FakePool:
    """``num_devices`` devices of kind ``fake`` and type ``fake-gpu``.

    At every probe it reads what is new in ``home.faults_file``, JSON lines such as
    ``{"device": 2, "cause": "xid_48", "after_seconds": 3, "clear_after_seconds": 60}``. ``at`` (Unix seconds) may stand
    for ``after_seconds``, which counts from the probe that first sees the line; ``{"device": 2, "clear": true}`` ends
    the device's faults. A line that makes no sense is skipped and named in the evidence of every device.
    """

    def __init__(self, num_devices: int, home: Home, clock: Clock, causes: CauseTable | None = None) -> None:
        self._num_devices = num_devices
        self._file = _FaultsFile(home.faults_file)
        self._clock = clock
        self._causes = causes or shipped_causes()

    def probe(self) -> list[DeviceReport]:
        """Every device with the faults that are on at this moment."""
        now = self._clock.now().timestamp()
        self._file.read_new(now)
        return [self._report(index, now) for index in range(self._num_devices)]

    def _report(self, index: int, now: float) -> DeviceReport:
        names = self._file.active(index, now)
        fatal, soft = self._causes.split(n for n in names if n != BUSY)
        evidence: dict[str, Any] = {"faults": names} if names else {}
        if self._file.bad_lines:
            evidence["bad_lines"] = self._file.bad_lines[-10:]
        return DeviceReport(
            index=index,
            kind="fake",
            type="fake-gpu",
            memory_bytes=MEMORY_BYTES,
            uuid=f"fake-{index}",
            fatal=fatal,
            soft=soft,
            busy=BUSY in names,
            evidence=evidence,
        )

    def visible(self, indices: Sequence[int]) -> dict[str, str]:
        """Hides all GPUs: a fake one trains on the CPU."""
        return {"CUDA_VISIBLE_DEVICES": ""}

    def is_clean(self, index: int, pids: Collection[int]) -> bool:
        """Whether all of the processes are gone."""
        return not any(process_is_alive(pid) for pid in pids)

    def describe(self) -> str:
        """E.g. ``4 fake GPUs``."""
        return f"{self._num_devices} fake GPU{'s' if self._num_devices != 1 else ''}"


class _FaultsFile:
    """Follows the file from where it stopped; a file that became shorter is read again from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_lines = 0
        self._faults: list[ScriptedFault] = []
        self.bad_lines: list[str] = []

    def read_new(self, now: float) -> None:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._num_lines, self._faults, self.bad_lines = 0, 0, [], []
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            self._offset, self._num_lines, self._faults, self.bad_lines = 0, 0, [], []
            return
        whole = text[: text.rfind(b"\n") + 1]  # a line without its end is still being written
        self._offset += len(whole)
        for line in whole.splitlines():
            self._num_lines += 1
            if not line.strip():
                continue
            try:
                self._faults.append(_parse(line, now, self._num_lines))
            except (ValueError, TypeError, KeyError) as error:
                self.bad_lines.append(f"line {self._num_lines}: {error!r}"[:200])
        self._faults.sort(key=lambda fault: (fault.begins_at, fault.line))

    def active(self, device: int, now: float) -> list[str]:
        """Causes that are on, oldest first. A `clear` ends what began before it, not what is yet to come."""
        found: list[str] = []
        for fault in self._faults:
            if fault.device != device or fault.begins_at > now:
                continue
            if fault.cause is None:
                found.clear()
            elif now < fault.ends_at and fault.cause not in found:
                found.append(fault.cause)
        return found


def _parse(line: bytes, now: float, number: int) -> ScriptedFault:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError("a fault is a JSON object")
    begins_at = float(data["at"]) if "at" in data else now + float(data.get("after_seconds", 0.0))
    ends_at = begins_at + float(data["clear_after_seconds"]) if data.get("clear_after_seconds") else math.inf
    cause = None if data.get("clear") else data["cause"]
    if cause is not None and not isinstance(cause, str):
        raise ValueError(f"the cause must be text, not {cause!r}")
    return ScriptedFault(int(data["device"]), cause, begins_at, ends_at, number)
