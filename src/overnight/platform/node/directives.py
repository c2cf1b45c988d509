"""What an attempt is told, and everyone who waits to hear it.

Standard library only: runs in the user's interpreter too.
"""

import asyncio
import contextlib
from typing import Any

CONTINUE: dict[str, Any] = {"version": 0, "action": "continue", "grace_seconds": 30.0, "reason": ""}


class DirectiveBoard:
    """The current directive, with a version of its own that rises at each change.

    The server's directives and those made here (time limit, shutdown, stale) share it; one made here stays.
    """

    def __init__(self) -> None:
        self.current = dict(CONTINUE)
        self._server_version = 0
        self._local = False
        self._changed = asyncio.Event()

    @property
    def leaving(self) -> bool:
        """Whether the ranks are told to leave."""
        return self.current["action"] in ("yield", "stop")

    def from_server(self, directive: dict[str, Any]) -> bool:
        """Takes a directive of the server; False if it is not news."""
        version = int(directive["version"])
        if version <= self._server_version:
            return False
        self._server_version = version
        if self._local:
            return False
        self._set(str(directive["action"]), float(directive["grace_seconds"]), str(directive["reason"]))
        return True

    def from_here(self, action: str, grace_seconds: float, reason: str) -> None:
        """A directive of the supervisor itself."""
        self._local = True
        self._set(action, grace_seconds, reason)

    async def wait(self, after: int, seconds: float) -> dict[str, Any]:
        """The current directive, as soon as its version is not ``after``, at latest in ``seconds``."""
        if self.current["version"] == after:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await changed.wait()
        return self.current

    def _set(self, action: str, grace_seconds: float, reason: str) -> None:
        self.current = {
            "version": self.current["version"] + 1, "action": action, "grace_seconds": grace_seconds, "reason": reason,
        }  # fmt: skip
        self._changed.set()
        self._changed = asyncio.Event()
