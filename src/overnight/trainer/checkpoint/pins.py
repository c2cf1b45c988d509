"""Pins: "somebody is reading this checkpoint", as files in the place, so that nobody deletes it meanwhile.

A pin must end with its holder, even if that dies, and the clocks of two machines must not decide about it:

- On the holder's own machine its process is looked for (pid, start time, boot, pid namespace). Dead is stale, at once.
- Elsewhere the holder's beat counts: it rewrites the pin now and then. Whoever has watched a pin for ``STALE_SECONDS``
  on a monotonic clock of its own, and has seen it unchanged, takes it for stale. A glance alone never does.

Deleting and pinning cannot miss each other: who deletes hides the checkpoint first and looks for pins after; who pins
writes the pin first and looks for the checkpoint after.
"""

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overnight.core.errors import CheckpointError, NotFoundError
from overnight.trainer.checkpoint.manifest import MANIFEST
from overnight.trainer.checkpoint.place import CheckpointName, Place

BEAT_SECONDS = 30.0
STALE_SECONDS = 600.0
REAPPEAR_SECONDS = 1.0
"""How long a checkpoint may be hidden because somebody who wanted to delete it is just seeing the pin."""

_PIN = re.compile(r"\.pin-(?P<checkpoint>.+)\.(?P<number>[0-9a-f]{12})\.json")


@dataclass(frozen=True)
class Pin:
    """A pin as it is found.

    Attributes:
        entry: Name of its file.
        checkpoint: What must stay.
        holder: Who reads, for people.
        content: The file's bytes; they change with every beat.
        process: The holder's process, None if the pin cannot be read.
    """

    entry: str
    checkpoint: CheckpointName
    holder: str
    content: bytes
    process: dict[str, Any] | None


@contextmanager
def pin(place: Place, name: CheckpointName, holder: str, beat_seconds: float = BEAT_SECONDS) -> Iterator[None]:
    """Keeps a checkpoint from being deleted while the context is open.

    Args:
        place: Where it is.
        name: Which one.
        holder: Who reads it and why, for people: ``"warm start of digits-9"``.
        beat_seconds: Between two signs of life.

    Raises:
        NotFoundError: There is no such checkpoint (any more).
        CheckpointError: The place takes no pins; what is read there could vanish.
    """
    entry = f".pin-{name}.{secrets.token_hex(6)}.json"
    _write(place, entry, name, holder, 0)
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(place, entry, name, holder, over, beat_seconds), daemon=True)
    try:
        _require(place, name)
        beating.start()
        yield
    finally:
        over.set()
        if beating.ident is not None:
            beating.join()
        with contextlib.suppress(OSError):
            place.remove(entry)


def _write(place: Place, entry: str, name: CheckpointName, holder: str, beat: int) -> None:
    body = {"checkpoint": str(name), "holder": holder, "beat": beat, "process": _myself()}
    try:
        place.write(entry, json.dumps(body).encode())
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be pinned in {place}: {error.strerror or error}",
            hint="Reading it without a pin is possible while nothing else is working on that trial.",
        ) from None


def _require(place: Place, name: CheckpointName) -> None:
    deadline = time.monotonic() + REAPPEAR_SECONDS
    while MANIFEST not in place.entries(str(name)):
        if time.monotonic() > deadline:
            raise NotFoundError(f"there is no {name} in {place}", hint="See: overnight checkpoints list")
        time.sleep(0.01)


def _beat(place: Place, entry: str, name: CheckpointName, holder: str, over: threading.Event, seconds: float) -> None:
    beat = 0
    while not over.wait(seconds):
        beat += 1
        with contextlib.suppress(CheckpointError):  # a full disk: the next beat tries again
            _write(place, entry, name, holder, beat)


def read_pins(place: Place) -> list[Pin]:
    """All pins of a place, living or not. One that cannot be read still names its checkpoint."""
    found = []
    for entry in place.entries():
        match = _PIN.fullmatch(entry)
        name = CheckpointName.parse(match["checkpoint"]) if match else None
        if name is None:
            continue
        try:
            content = place.read(entry)
        except FileNotFoundError:
            continue  # it has just ended
        except OSError:
            content = b""
        body: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(content)
        body = body if isinstance(body, dict) else {}
        process = body.get("process")
        known = process if isinstance(process, dict) else None
        found.append(Pin(entry, name, str(body.get("holder", "unknown")), content, known))
    return found


class PinWatch:
    """Tells living pins from stale ones; keep one for as long as possible, its patience begins anew with each.

    Args:
        monotonic: Seconds on a clock that never jumps.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[tuple[str, str], tuple[bytes, float]] = {}

    def living(self, place: Place) -> dict[CheckpointName, str]:
        """Pinned checkpoints and their holders."""
        now = self._monotonic()
        return {pin.checkpoint: pin.holder for pin in read_pins(place) if not self._is_stale(place, pin, now)}

    def clear(self, place: Place) -> list[str]:
        """Removes stale pins; returns their names."""
        now = self._monotonic()
        stale = [pin.entry for pin in read_pins(place) if self._is_stale(place, pin, now)]
        for entry in stale:
            with contextlib.suppress(OSError):
                place.remove(entry)
            self._seen.pop((place.url, entry), None)
        return stale

    def _is_stale(self, place: Place, pin: Pin, now: float) -> bool:
        if pin.process is not None and (alive := _is_alive(pin.process)) is not None:
            return not alive
        key = (place.url, pin.entry)
        content, since = self._seen.get(key, (None, now))
        if content != pin.content:
            self._seen[key] = (pin.content, now)
            return False
        return now - since >= STALE_SECONDS


def _is_alive(process: dict[str, Any]) -> bool | None:
    """Whether a process lives; None if it is not one that this process could see."""
    here = _machine()
    if here is None or process.get("machine") != here:
        return None
    pid = process.get("pid")
    return isinstance(pid, int) and process.get("start") == _start_of(pid)


def _myself() -> dict[str, Any]:
    return {"pid": os.getpid(), "start": _start_of(os.getpid()), "machine": _machine()}


def _machine() -> str | None:
    """This boot of this machine, and the namespace in which its pids mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_of(pid: int) -> int | None:
    """Start time in clock ticks since boot; None if there is no such process, or only a zombie of it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
