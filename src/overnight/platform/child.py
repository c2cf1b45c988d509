"""A warm child process that is asked and answers in lines: what planners and the sweeper of checkpoints have in common.

It may crash, hang or print nonsense: whoever asked hears of it and kills it, and the next question starts a new one. It
ends when the pipe to it does, so that it never outlives the server.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

_COMPLAINT_LINES = 20


class Child:
    """One process at a time, started when first written to and again after it was lost.

    Args:
        command: What to run.
        line_bytes: Longest line that it may answer with.
        env: Its environment, None for this process's.
        listens: Keep its last lines on standard error as complaints; else they go where this process's go.

    Attributes:
        complaints: See ``listens``.
    """

    def __init__(
        self, command: Sequence[str], line_bytes: int, env: Mapping[str, str] | None = None, *, listens: bool = False
    ) -> None:
        self._command = tuple(command)
        self._line_bytes = line_bytes
        self._env = env
        self._listens = listens
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self.complaints: deque[str] = deque(maxlen=_COMPLAINT_LINES)

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def write(self, line: bytes) -> None:
        """Sends a line. If the process is gone, :meth:`read` tells how it ended.

        Raises:
            OSError: It cannot be started.
        """
        process = await self._alive()
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line + b"\n")
            await process.stdin.drain()

    async def read(self) -> bytes:
        """The next line.

        Raises:
            OSError: It ended instead; the message says with which status.
            ValueError: The line is too long.
        """
        process = self._process
        if process is None:
            raise OSError("it was ended")
        assert process.stdout is not None, "it is a pipe"
        text = await process.stdout.readline()
        if not text.endswith(b"\n"):
            raise OSError(f"it ended with status {await process.wait()}")
        return text

    async def kill(self) -> None:
        """Ends the process, whatever it is at."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if self._listener is not None:
            await self._listener

    async def _alive(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self.complaints.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if self._listens else None,
            limit=self._line_bytes,
            start_new_session=True,  # a Ctrl-C in the terminal is the server's to handle
            env=self._env,
        )
        if self._process.stderr is not None:
            self._listener = asyncio.create_task(self._listen(self._process.stderr))
        return self._process

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(64 * 1024):
            self.complaints.extend(chunk.decode(errors="replace").splitlines()[-_COMPLAINT_LINES:])
