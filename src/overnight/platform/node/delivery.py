"""Brings a spool to the server: in order, again until acknowledged, at the server's pace; every post is a heartbeat.

Standard library only: runs in the user's interpreter too.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from overnight.platform.node.link import Backoff, ServerLink
from overnight.platform.node.spool import Spool
from overnight.platform.node.wire import WireError

GATHER_SECONDS = 0.1
"""Frequent small events wait this long for company; urgent ones do not."""

POST_TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 20.0


class StaleError(Exception):
    """The server no longer knows this attempt as the current one."""


def _is_stale(status: int, answer: Any) -> bool:
    if status == 409:
        return True
    error = answer.get("error") if isinstance(answer, dict) else None
    return status == 404 and isinstance(error, dict) and error.get("code") == "not_found"


class Delivery:
    """Delivers one attempt's spool.

    Args:
        spool: The spool.
        link: Way to the server; used by nobody else.
        attempt_id: The attempt.
        generation: Its current generation.
        heartbeat_seconds: Longest silence between two posts.
        on_directive: Called with the directive of each answer.

    Attributes:
        generation: The current one; rises when the ranks start again.
    """

    def __init__(
        self,
        spool: Spool,
        link: ServerLink,
        attempt_id: str,
        generation: int,
        heartbeat_seconds: float,
        on_directive: Callable[[dict[str, Any]], None] = lambda directive: None,
    ) -> None:
        self._spool = spool
        self._link = link
        self._attempt_id = attempt_id
        self.generation = generation
        self._heartbeat_seconds = heartbeat_seconds
        self._on_directive = on_directive
        self._counter = 0
        self._wanted = asyncio.Event()
        self._urgent = asyncio.Event()
        self._backoff = Backoff()

    def notify(self, *, urgent: bool) -> None:
        """Something was spooled."""
        self._wanted.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Delivers for ever.

        Raises:
            StaleError: The attempt is over for the server.
        """
        while True:
            try:
                await self.post()
                self._backoff.reset()
            except WireError:
                await self._backoff.pause()
                continue
            if self._spool.drained:
                await self._until_wanted()

    async def post(self) -> None:
        """Sends the next batch, or a bare heartbeat.

        Raises:
            WireError: No server, or it cannot take the batch now.
            StaleError: The attempt is over for the server.
        """
        self._wanted.clear()
        self._urgent.clear()
        self._counter += 1
        body = {"counter": self._counter, "generation": self.generation, "events": self._spool.pending()}
        path = f"/v1/attempts/{self._attempt_id}/spool"
        status, answer = await self._link.request("POST", path, body, timeout_seconds=POST_TIMEOUT_SECONDS)
        if _is_stale(status, answer):
            raise StaleError(f"the server answered {status}: {answer}")
        if status != 200 or not isinstance(answer, dict):
            raise WireError(f"the server refused the spool: {status} {str(answer)[:500]}")
        self._spool.ack(int(answer["acked"]))
        self._on_directive(answer["directive"])

    async def flush(self) -> None:
        """Sends everything that is left. Raises as :meth:`post`, at the first failure."""
        while not self._spool.drained:
            await self.post()

    async def _until_wanted(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_seconds):
                await self._wanted.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_SECONDS):
                        await self._urgent.wait()


async def follow_directives(link: ServerLink, attempt_id: str, on_directive: Callable[[dict[str, Any]], None]) -> None:
    """Holds the directive long-poll open for ever.

    Raises:
        StaleError: The attempt is over for the server.
    """
    backoff = Backoff()
    version = 0
    while True:
        path = f"/v1/attempts/{attempt_id}/directive?after={version}&wait={POLL_SECONDS:g}"
        try:
            status, answer = await link.request("GET", path, timeout_seconds=POLL_SECONDS + 10)
            if _is_stale(status, answer):
                raise StaleError(f"the server answered {status}: {answer}")
            if status != 200 or not isinstance(answer, dict):
                raise WireError(f"no directive: {status}")
        except WireError:
            await backoff.pause()
            continue
        backoff.reset()
        version = int(answer["version"])
        on_directive(answer)
