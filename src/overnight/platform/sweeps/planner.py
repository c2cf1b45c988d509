"""The warm planner process: a planner that crashes, hangs or prints nonsense costs one question, never the server."""

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from overnight.core.canonical import canonical
from overnight.core.errors import OvernightError, UnavailableError, from_dict
from overnight.planning.observations import Request, Suggestions

COMMAND = (sys.executable, "-P", "-m", "overnight.planning")
TIMEOUT_SECONDS = 120.0
_ANSWER_BYTES = 256 * 1024 * 1024
_COMPLAINT_LINES = 20


class PlannerFailedError(UnavailableError):
    """The planner process died, hung or answered nonsense. Asking again starts a new one and repeats nothing."""

    code = "planner_failed"


class PlannerProcess:
    """One child that answers proposals, started when first asked and again after it was lost.

    A question holds everything that its answer depends on, so that a lost one is simply asked again.

    Args:
        command: What to run; it speaks the lines of :mod:`overnight.planning.__main__`.
        timeout_seconds: Longest wait for one answer; the process is killed after it.
    """

    def __init__(self, command: Sequence[str] = COMMAND, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._command = tuple(command)
        self._timeout_seconds = timeout_seconds
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._complaints: deque[str] = deque(maxlen=_COMPLAINT_LINES)
        self._listener: asyncio.Task[None] | None = None
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def propose(self, request: Request) -> Suggestions:
        """The planner's answer.

        Raises:
            PlannerFailedError: No answer: the process died, took too long, or broke the protocol. The next call
                starts a new one.
            OvernightError: What the planner itself refused, such as ``InvalidSpecError``.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    answer = await self._ask(request)
            except TimeoutError:
                await self._kill()
                raise PlannerFailedError(
                    f"the planner {request.config.planner} gave no answer in {self._timeout_seconds:g} s"
                ) from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                await self._kill()
                raise PlannerFailedError(
                    f"the planner process failed: {error or type(error).__name__}", hint="\n".join(self._complaints)
                ) from error
            except asyncio.CancelledError:
                await self._kill()
                raise
        if "error" in answer:
            raise _refusal(answer["error"])
        return Suggestions(answer["params"], answer["exhausted"])

    async def close(self) -> None:
        """Ends the process."""
        async with self._turn:
            await self._kill()

    async def _ask(self, request: Request) -> dict[str, Any]:
        process = await self._alive()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._asked += 1
        line = json.dumps({"id": self._asked, **request.to_wire()}, allow_nan=False).encode()
        with contextlib.suppress(ConnectionError):  # it has ended: what it said, and how, comes from reading
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
        text = await process.stdout.readline()
        if not text.endswith(b"\n"):
            raise OSError(f"it ended with status {await process.wait()}")
        answer = json.loads(text)
        if answer["id"] != self._asked:
            raise ValueError(f"it answered question {answer['id']!r} instead of {self._asked}")
        if "error" not in answer:
            answer["params"] = [_params(item) for item in answer["params"]]
            answer["exhausted"] = bool(answer["exhausted"])
        return dict(answer)

    async def _alive(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._complaints.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_ANSWER_BYTES,
            start_new_session=True,  # a Ctrl-C in the terminal is the server's to handle
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stderr is not None, "it is a pipe"
        self._listener = asyncio.create_task(self._listen(self._process.stderr))
        return self._process

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(64 * 1024):
            self._complaints.extend(chunk.decode(errors="replace").splitlines()[-_COMPLAINT_LINES:])

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if self._listener is not None:
            await self._listener


def _params(item: Any) -> dict[str, Any]:
    value = canonical(item)
    if not isinstance(value, dict):
        raise ValueError(f"it proposed {value!r}, which is no mapping of params")
    return value


def _refusal(data: dict[str, Any]) -> OvernightError:
    # An error without a code of ours is a defect of the planner; its message ends in the traceback's last lines.
    error = from_dict(data)
    return PlannerFailedError(error.message, error.hint) if type(error) is OvernightError else error
