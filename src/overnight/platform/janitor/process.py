"""The sweeper: the process that looks into checkpoint places and deletes there, warm, niced and expendable.

It runs ``overnight.trainer.checkpoint.sweeper``, which describes the lines that pass. It ends when the pipe to it does,
so that it never outlives the server.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from overnight.core.errors import UnavailableError, from_dict
from overnight.platform.child import Child

COMMAND = (sys.executable, "-P", "-m", "overnight.trainer.checkpoint.sweeper")
SILENCE_SECONDS = 900.0
"""Hashing a large checkpoint on a busy disk takes minutes, and nothing is said meanwhile."""

_LINE_BYTES = 64 * 1024 * 1024
Told = Callable[[dict[str, Any]], Awaitable[None]]


class SweeperFailedError(UnavailableError):
    """The sweeper died, hung or answered nonsense. What it had not deleted is found again by the next sweep."""

    code = "sweeper_failed"


class SweeperProcess:
    """One child that answers questions about places, started when first asked and again after it was lost.

    Args:
        command: What to run.
        silence_seconds: Longest wait for a line; the process is killed after it.
    """

    def __init__(self, command: Sequence[str] = COMMAND, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._child = Child(command, _LINE_BYTES)
        self._silence_seconds = silence_seconds
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._child.pid

    async def ask(self, question: dict[str, Any], told: Told | None = None) -> dict[str, Any]:
        """Asks a question.

        Args:
            question: See :mod:`overnight.trainer.checkpoint.sweeper`.
            told: Awaited for each deletion, as soon as it has happened.

        Raises:
            SweeperFailedError: No answer; the next call starts a new process.
            OvernightError: What the sweeper itself refused.
        """
        async with self._turn:
            try:
                answer = await self._ask(question, told)
            except TimeoutError:
                await self._child.kill()
                raise SweeperFailedError(f"nothing was heard for {self._silence_seconds:g} s") from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                await self._child.kill()
                raise SweeperFailedError(f"the sweeper failed: {error or type(error).__name__}") from error
            except asyncio.CancelledError:
                await self._child.kill()
                raise
        if "error" in answer:
            raise from_dict(answer["error"])
        done: dict[str, Any] = answer["done"]
        return done

    async def close(self) -> None:
        """Ends the process, whatever it is at."""
        await self._child.kill()

    async def _ask(self, question: dict[str, Any], told: Told | None) -> dict[str, Any]:
        await self._child.write(json.dumps(question).encode())
        while True:
            async with asyncio.timeout(self._silence_seconds):
                answer: dict[str, Any] = json.loads(await self._child.read())
            if "deleted" not in answer:
                return answer
            if told is not None:
                await told(answer["deleted"])
