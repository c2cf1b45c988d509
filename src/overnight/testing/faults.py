"""Breaks a fake device on purpose: what is written here is read by the fake pool's own probe."""

import json
import os
from typing import Any

from overnight.core.clock import Clock, SystemClock
from overnight.core.paths import Home


class FaultScript:
    """Writes the faults of a home's fake pool.

    Args:
        home: The home whose node uses ``fake:N``.
        clock: From what ``after_seconds`` counts.
    """

    def __init__(self, home: Home, clock: Clock | None = None) -> None:
        self._path = home.faults_file
        self._clock = clock or SystemClock()

    def fail(
        self,
        device: int,
        *,
        cause: str = "xid_48",
        after_seconds: float = 0.0,
        clear_after_seconds: float | None = None,
    ) -> None:
        """Lets a device show a fault from ``after_seconds`` from now on.

        Args:
            device: Index of the device in its pool.
            cause: A cause of the health table (``xid_48``, ``row_remap_failed``, ``xid_13`` …), or ``busy`` for
                somebody else's process. Those such as ``xid_79`` keep the other devices of the pool from new work too.
            after_seconds: From now to the fault.
            clear_after_seconds: From the fault's beginning to its end; None is for ever.
        """
        line: dict[str, Any] = {"device": device, "cause": cause, "at": self._at(after_seconds)}
        if clear_after_seconds is not None:
            line["clear_after_seconds"] = clear_after_seconds
        self._append(line)

    def clear(self, device: int, *, after_seconds: float = 0.0) -> None:
        """Ends all faults of a device that have begun by then."""
        self._append({"device": device, "clear": True, "at": self._at(after_seconds)})

    def _at(self, after_seconds: float) -> float:
        return self._clock.now().timestamp() + after_seconds

    def _append(self, line: dict[str, Any]) -> None:
        """One write in append mode: a probe, or another writer, never meets half a line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)
