"""An attempt's durable record of what happened, until the server has it: append-only JSON lines, numbered from 1.

The server says up to which number it is durable; everything after that is sent again, in order. A supervisor killed at
any byte leaves at most a torn last line, which the next opener cuts off. Events stay in the file, not in memory: a
server that is away for a night costs disk only.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overnight.platform.node.files import write_atomic

Event = dict[str, Any]


class Spool:
    """The spool of one attempt. One writer at a time; the attempt's ``launch.lock`` sees to that.

    Args:
        folder: The attempt's folder; holds ``spool.jsonl`` and ``spool.acked``.
        now: Unix seconds.

    Raises:
        OSError: The files cannot be opened or written.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._acked_file = folder / "spool.acked"
        self._descriptor = os.open(folder / "spool.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        self.last_seq = 0
        self.last_kind: str | None = None
        self.last_generation = 0
        self._recover()
        self.acked = min(self._read_acked(), self.last_seq)
        self._cursor = (0, 0)  # every event up to this seq ends before this offset
        self._dirty = False

    def append(self, kind: str, generation: int, data: dict[str, Any], *, durable: bool = False) -> Event:
        """Adds an event. It survives the death of any process at once, that of the machine after :meth:`sync`.

        Args:
            kind: A ``SpoolKind``.
            generation: The generation that it speaks of.
            data: JSON-able, finite numbers only.
            durable: Sync before returning.

        Raises:
            OSError: The disk is full or the folder is gone; the spool is unchanged.
        """
        event = {
            "seq": self.last_seq + 1, "kind": kind, "generation": generation, "at": self._now(), "data": data,
        }  # fmt: skip
        line = json.dumps(event, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(28, "no space left for the spool")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(line)
        self.last_seq += 1
        self.last_kind = kind
        self.last_generation = generation
        self._dirty = True
        if durable:
            self.sync()
        return event

    def sync(self) -> None:
        """Makes everything so far survive the machine."""
        if self._dirty:
            os.fdatasync(self._descriptor)
            self._dirty = False

    def pending(self, max_events: int = 1_000, max_bytes: int = 1024 * 1024) -> list[Event]:
        """The next events that the server does not have, oldest first."""
        if self._cursor[0] > self.acked:
            self._cursor = (0, 0)
        events: list[Event] = []
        for seq, offset, event in self._scan(*self._cursor):
            if seq <= self.acked:
                self._cursor = (seq, offset)
                continue
            events.append(event)
            if len(events) >= max_events or offset - self._cursor[1] >= max_bytes:
                break
        return events

    @property
    def drained(self) -> bool:
        """Whether the server has everything."""
        return self.acked >= self.last_seq

    def ack(self, seq: int) -> None:
        """The server's highest contiguous number; it may be lower than before when its database was restored."""
        seq = max(0, min(seq, self.last_seq))
        if seq != self.acked:
            self.acked = seq
            with contextlib.suppress(OSError):  # only saves a resend after a restart
                write_atomic(self._acked_file, str(seq))

    def close(self) -> None:
        """Releases the file."""
        os.close(self._descriptor)

    def _scan(self, seq: int, offset: int) -> Any:
        """Yields (seq, offset after the line, event) of complete lines from a known position."""
        buffer = b""
        position = offset
        while data := os.pread(self._descriptor, 256 * 1024, position):
            position += len(data)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                offset += len(line) + 1
                seq += 1
                try:
                    event = json.loads(line)
                    intact = isinstance(event, dict) and event["seq"] == seq
                except (ValueError, KeyError):
                    intact = False
                if not intact:
                    return
                yield seq, offset, event

    def _recover(self) -> None:
        for seq, offset, event in self._scan(0, 0):
            self.last_seq, self._size, self.last_kind = seq, offset, str(event.get("kind"))
            self.last_generation = int(event.get("generation", 0))
        if os.fstat(self._descriptor).st_size > self._size:
            os.ftruncate(self._descriptor, self._size)

    def _read_acked(self) -> int:
        try:
            return int(self._acked_file.read_text())
        except (OSError, ValueError):
            return 0
