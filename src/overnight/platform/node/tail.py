"""Follow a log in bounded memory, whatever a script prints: floods, progress bars, binary, one line of 100 MB.

Standard library only: runs in the user's interpreter too.
"""

import os
from pathlib import Path

CHUNK_BYTES = 64 * 1024
LINE_BYTES = 8 * 1024
MAX_BEHIND_BYTES = 8 * 1024 * 1024
"""A reader this far behind jumps ahead: older output is about to be dropped from the file anyway."""


class LineSplitter:
    """Bytes in, lines of text out. Keeps at most :data:`LINE_BYTES` of a line and only what follows its last
    ``\\r``."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *complete, rest = data.split(b"\n")
        lines = []
        for part in complete:
            self._hold(part)
            lines.append(self._take())
        self._hold(rest)
        return lines

    def finish(self) -> list[str]:
        """The last line, if it had no newline."""
        return [self._take()] if self._held or self._dropped else []

    def _hold(self, part: bytes) -> None:
        # A trailing \r may belong to the \r\n that the next chunk completes: it does not start a new state.
        start = part.rfind(b"\r", 0, max(0, len(part) - 1))
        if self._held.endswith(b"\r") and part:
            self._held.clear()
            self._dropped = 0
        if start >= 0:
            self._held.clear()
            self._dropped = 0
            part = part[start + 1 :]
        room = LINE_BYTES - len(self._held)
        self._held += part[:room]
        self._dropped += max(0, len(part) - room)

    def _take(self) -> str:
        text = bytes(self._held).rstrip(b"\r").decode("utf-8", "replace")
        suffix = f" …[+{self._dropped} bytes]" if self._dropped else ""
        self._held.clear()
        self._dropped = 0
        return text + suffix


class Tail:
    """Reads what a growing file has gained since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._splitter = LineSplitter()
        self._offset = 0
        self.skipped_bytes = 0

    def read(self, max_bytes: int = 4 * 1024 * 1024) -> list[str]:
        """Complete lines gained, reading at most ``max_bytes``. A file that is not there yet has none."""
        lines: list[str] = []
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return lines
        try:
            self._catch_up(os.fstat(descriptor).st_size)
            while max_bytes > 0 and (data := os.pread(descriptor, min(CHUNK_BYTES, max_bytes), self._offset)):
                self._offset += len(data)
                max_bytes -= len(data)
                lines += self._splitter.feed(data)
        finally:
            os.close(descriptor)
        return lines

    def finish(self) -> list[str]:
        """The rest, with the last line even if it has no newline."""
        return self.read(MAX_BEHIND_BYTES) + self._splitter.finish()

    def _catch_up(self, size: int) -> None:
        if size < self._offset:  # the file was cut: start again
            self._offset = 0
        if size - self._offset > MAX_BEHIND_BYTES:
            target = size - MAX_BEHIND_BYTES // 2
            self.skipped_bytes += target - self._offset
            self._offset = target
            self._splitter = LineSplitter()


def last_lines(path: Path, num_lines: int = 50, max_bytes: int = 64 * 1024, since: int = 0) -> list[str]:
    """The end of a log, newest line last; fewer lines when they are long, none from before byte ``since``."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(since if since <= size else 0, size - max_bytes)
            file.seek(start)
            data = file.read(max_bytes)
    except FileNotFoundError:
        return []
    if start > since and b"\n" in data:
        data = data.partition(b"\n")[2]
    splitter = LineSplitter()
    lines = splitter.feed(data.lstrip(b"\0")) + splitter.finish()
    return lines[-num_lines:]
