"""The way to the server, which may move or be away: its address and the token are files, read again after a failure.

Standard library only: runs in the user's interpreter too.
"""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from overnight.platform.node.files import read_json
from overnight.platform.node.wire import Client, WireError

FIRST_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 2.0


class ServerLink:
    """One connection to whatever server ``server.json`` names.

    Args:
        server_file: ``server.json``.
        token_file: The bearer token; a missing one means none.
    """

    def __init__(self, server_file: Path, token_file: Path) -> None:
        self._server_file = server_file
        self._token_file = token_file
        self._client: Client | None = None
        self._stamp: tuple[int, int] | None = None

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_seconds: float = 30.0
    ) -> tuple[int, Any]:
        """As :meth:`Client.request`, at the server's present address.

        Raises:
            WireError: No server is there.
        """
        client = self._current()
        try:
            return await client.request(method, path, body, timeout_seconds=timeout_seconds)
        except WireError:
            self._client = None
            raise

    def close(self) -> None:
        """Drops the connection."""
        if self._client is not None:
            self._client.close()
        self._client = self._stamp = None

    def _current(self) -> Client:
        try:
            stat = self._server_file.stat()
        except OSError:
            raise WireError(f"{self._server_file} is not there: no server runs") from None
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if self._client is None or stamp != self._stamp:
            self.close()
            url = (read_json(self._server_file) or {}).get("url")
            if not isinstance(url, str):
                raise WireError(f"{self._server_file} names no server")
            self._client, self._stamp = Client(url.rstrip("/"), self._token()), stamp
        return self._client

    def _token(self) -> str | None:
        try:
            return self._token_file.read_text().strip() or None
        except OSError:
            return None


class Backoff:
    """Growing pauses between tries, with jitter, cut short by :meth:`kick`."""

    def __init__(self, max_seconds: float = MAX_PAUSE_SECONDS) -> None:
        self._max = max_seconds
        self._next = FIRST_PAUSE_SECONDS
        self._kicked = asyncio.Event()

    def reset(self) -> None:
        """After a success."""
        self._next = FIRST_PAUSE_SECONDS

    def kick(self) -> None:
        """Try now: someone says that the server is back."""
        self._next = FIRST_PAUSE_SECONDS
        self._kicked.set()

    async def pause(self) -> None:
        """Waits for the next try."""
        self._kicked.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._kicked.wait(), self._next * random.uniform(0.5, 1.0))
        self._next = min(self._max, self._next * 2)
