"""Parsing server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), bytes in, messages out.

Lines end at CR, LF or CRLF only. ``str.splitlines`` also cuts at U+2028 and others, which JSON may hold.
"""

import re
from dataclasses import dataclass

_LINE = re.compile(rb"\r\n|\n|\r(?!$)")


@dataclass(frozen=True)
class Message:
    """One event of a stream."""

    event: str
    data: str
    id: str | None


class SseParser:
    """Feed it what arrives; it gives back the messages that are complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._id: str | None = None
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by these bytes."""
        *lines, self._rest = _LINE.split(self._rest + data)
        return [message for line in lines if (message := self._line(line)) is not None]

    def _line(self, line: bytes) -> Message | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._event = text
        elif name == b"id" and "\0" not in text:
            self._id = text
        return None

    def _dispatch(self) -> Message | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return Message(event or "message", "\n".join(data), self._id) if data else None
