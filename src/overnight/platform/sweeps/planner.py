"""The warm planner process: a planner that crashes, hangs or prints nonsense costs one question, never the server."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from overnight.core.canonical import canonical
from overnight.core.errors import OvernightError, UnavailableError, from_dict
from overnight.planning.observations import Request, Suggestions
from overnight.platform.child import Child

COMMAND = (sys.executable, "-P", "-m", "overnight.planning")
TIMEOUT_SECONDS = 120.0
_ANSWER_BYTES = 256 * 1024 * 1024


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
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._child = Child(command, _ANSWER_BYTES, env, listens=True)
        self._timeout_seconds = timeout_seconds
        self._turn = asyncio.Lock()
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._child.pid

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
                await self._child.kill()
                raise PlannerFailedError(
                    f"the planner {request.config.planner} gave no answer in {self._timeout_seconds:g} s"
                ) from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                await self._child.kill()
                raise PlannerFailedError(
                    f"the planner process failed: {error or type(error).__name__}",
                    hint="\n".join(self._child.complaints),
                ) from error
            except asyncio.CancelledError:
                await self._child.kill()
                raise
        if "error" in answer:
            raise _refusal(answer["error"])
        return Suggestions(answer["params"], answer["exhausted"])

    async def close(self) -> None:
        """Ends the process."""
        async with self._turn:
            await self._child.kill()

    async def _ask(self, request: Request) -> dict[str, Any]:
        self._asked += 1
        await self._child.write(json.dumps({"id": self._asked, **request.to_wire()}, allow_nan=False).encode())
        answer = json.loads(await self._child.read())
        if answer["id"] != self._asked:
            raise ValueError(f"it answered question {answer['id']!r} instead of {self._asked}")
        if "error" not in answer:
            answer["params"] = [_params(item) for item in answer["params"]]
            answer["exhausted"] = bool(answer["exhausted"])
        return dict(answer)


def _params(item: Any) -> dict[str, Any]:
    value = canonical(item)
    if not isinstance(value, dict):
        raise ValueError(f"it proposed {value!r}, which is no mapping of params")
    return value


def _refusal(data: dict[str, Any]) -> OvernightError:
    # An error without a code of ours is a defect of the planner; its message ends in the traceback's last lines.
    error = from_dict(data)
    return PlannerFailedError(error.message, error.hint) if type(error) is OvernightError else error
