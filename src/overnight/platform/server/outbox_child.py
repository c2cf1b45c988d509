"""Keeps the MLflow outbox running beside the server: a process of its own, restarted when it dies."""

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from overnight.core.settings import Settings
from overnight.platform.server.environment import settings_environment

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
HEALTHY_SECONDS = 60.0
"""A child that lived this long starts again at once."""

STOP_SECONDS = 0.3
"""It may be killed at any moment, and while it imports mlflow it does not listen."""


class OutboxChild:
    """Supervises ``python -m overnight.platform.outbox``.

    Its standard input is a pipe that nobody writes to: it ends when the server does, even by SIGKILL.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts supervising."""
        self._task = asyncio.create_task(self._run(), name="outbox")

    async def stop(self) -> None:
        """Ends the child: asks, and kills it when it does not listen."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = loop.time()
            code = await self._once()
            pause = FIRST_PAUSE_SECONDS if loop.time() - began > HEALTHY_SECONDS else pause
            log.warning("the MLflow outbox ended with %s; starting it again in %.1f s", code, pause)
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    async def _once(self) -> int:
        path = self._settings.paths.logs / "outbox.log"
        with path.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "overnight.platform.outbox",
                "--home",
                str(self._settings.home),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(os.environ) | settings_environment(self._settings),
                cwd=Path("/"),
            )
        return await self._process.wait()
