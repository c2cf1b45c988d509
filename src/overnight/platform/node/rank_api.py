"""The supervisor's API for its ranks: see docs/architecture.md, "The supervisor's API for ranks".

What a rank sends comes from the user's code: it is checked and bounded here, so that nothing later chokes on it.
Standard library only: runs in the user's interpreter too.
"""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from overnight.platform.node.evidence import make_error
from overnight.platform.node.objective import as_value
from overnight.platform.node.wire import HttpError, Request

MAX_WAIT_SECONDS = 60.0
PROGRESS_SECONDS = 1.0


class Attempt(Protocol):
    """What the API needs of the supervisor."""

    @property
    def generation(self) -> int:
        """Of the current start of the ranks, from 1."""
        ...

    def spool(self, kind: str, data: dict[str, Any], *, urgent: bool = False) -> None:
        """Records an event."""
        ...

    def directive(self) -> dict[str, Any]:
        """What the ranks are told now."""
        ...

    async def directive_after(self, version: int, seconds: float) -> dict[str, Any]:
        """The current directive, as soon as its version is not ``version``, at latest in ``seconds``."""
        ...

    def rank_said(self, what: str, rank: int, data: dict[str, Any]) -> None:
        """``hello``, ``error`` or ``leaving``."""
        ...

    def committed(self, step: int, *, forked: bool) -> None:
        """A checkpoint of this step was committed, or the ranks went on from it (``forked``)."""
        ...

    def heard(self, rank: int, told: dict[str, Any]) -> None:
        """A rank said where it is: fields of :class:`overnight.platform.node.watchdog.Whereabouts`."""
        ...

    async def control(self, body: dict[str, Any]) -> dict[str, Any]:
        """An instruction of the daemon."""
        ...


class RankApi:
    """Routes requests of ranks.

    Args:
        attempt: The supervisor.
        objective: The objective of the order, or None.
    """

    def __init__(self, attempt: Attempt, objective: dict[str, Any] | None) -> None:
        self._attempt = attempt
        reported = objective is not None and objective["source"] == "report"
        self._objective = objective if reported else None
        self._progress_at = -math.inf
        self._untold: dict[str, Any] | None = None
        self._routes: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]] = {
            "POST /v1/hello": self._hello,
            "POST /v1/forked": self._forked,
            "POST /v1/push": self._push,
            "POST /v1/report": self._report,
            "POST /v1/checkpoint": self._checkpoint,
            "POST /v1/error": self._error,
            "POST /v1/leaving": self._leaving,
            "GET /v1/directive": self._directive,
            "POST /v1/control": attempt.control,
        }

    async def answer(self, request: Request) -> tuple[int, Any]:
        """Answers one request.

        Raises:
            HttpError: No such route, or a body that is not as the contract says.
        """
        route = self._routes.get(f"{request.method} {request.path}")
        if route is None:
            raise HttpError(404, f"no {request.method} {request.path}", "not_found")
        body: dict[str, Any] = dict(request.query) if request.method == "GET" else request.json()
        result = route(body)
        return 200, result if isinstance(result, dict) else await result

    def metrics(self, rows: list[list[Any]]) -> None:
        """Records rows [key, step, value, time]; those of the objective's name also count as reports."""
        if not rows:
            return
        self._attempt.spool("metrics", {"rows": rows})
        if self._objective is None:
            return
        mine = [row for row in rows if row[0] == self._objective["metric"]]
        for row in _telling(mine, self._objective):
            self._attempt.spool("report", {"step": row[1], "values": {row[0]: row[2]}}, urgent=True)

    def _hello(self, body: dict[str, Any]) -> dict[str, Any]:
        self._attempt.rank_said("hello", _rank(body), body)
        return {"directive": self._attempt.directive(), "generation": self._attempt.generation}

    def _forked(self, body: dict[str, Any]) -> dict[str, Any]:
        step = _int(body, "step")
        fork = {"generation": self._attempt.generation, "fork_step": step, "trainer": True, **_parent(body)}
        self._attempt.committed(step, forked=True)
        self._attempt.spool("generation", fork, urgent=True)
        return {"directive": self._attempt.directive()}

    def _push(self, body: dict[str, Any]) -> dict[str, Any]:
        self.metrics([_row(row) for row in _list(body, "metrics")])
        ledger = body.get("ledger")
        if ledger:
            self._attempt.spool("ledger", {name: _numbers(ledger, name) for name in ("seconds", "counts")})
        if body.get("step") is not None:
            self._untold = {"step": _int(body, "step"), "phase": str(body.get("phase") or "")[:250]}
            if time.monotonic() - self._progress_at >= PROGRESS_SECONDS:
                self.tell_progress()
        self._attempt.heard(_rank(body), _whereabouts(body))
        return {"directive": self._attempt.directive()}

    def tell_progress(self) -> None:
        """Records the newest progress that was held back; called at the end too, so that no step is missing."""
        if self._untold is not None:
            self._progress_at = time.monotonic()
            self._attempt.spool("progress", self._untold)
            self._untold = None

    def _report(self, body: dict[str, Any]) -> dict[str, Any]:
        values = body.get("values")
        if not isinstance(values, dict) or not values:
            raise HttpError(400, "values must be an object with at least one value")
        data = {"step": _int(body, "step"), "values": {str(k)[:250]: as_value(v) for k, v in values.items()}}
        self._attempt.spool("report", data, urgent=True)
        return {"directive": self._attempt.directive()}

    def _checkpoint(self, body: dict[str, Any]) -> dict[str, Any]:
        uri = body.get("uri")
        if not isinstance(uri, str):
            raise HttpError(400, "uri must be a text")
        step = _int(body, "step")
        data = {"step": step, "uri": uri[:4096], "bytes": _int(body, "bytes")}
        self._attempt.committed(step, forked=False)
        self._attempt.spool("checkpoint", {**data, "generation": self._attempt.generation}, urgent=True)
        return {"directive": self._attempt.directive()}

    def _error(self, body: dict[str, Any]) -> dict[str, Any]:
        step = body.get("step")
        error = make_error(
            str(body.get("type") or "Exception"),
            str(body.get("message") or ""),
            str(body.get("traceback") or ""),
            step if isinstance(step, int) else None,
        )
        rank = _rank(body)
        self._attempt.rank_said("error", rank, {**error, "rank": rank})
        return {}

    def _leaving(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("why") not in ("yield", "stop"):
            raise HttpError(400, "why must be 'yield' or 'stop'")
        self._attempt.rank_said("leaving", _rank(body), {"why": body["why"], "saved": bool(body.get("saved"))})
        return {}

    async def _directive(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            after, seconds = int(body.get("after", -1)), float(body.get("wait", 0))
        except ValueError:
            raise HttpError(400, "after and wait must be numbers") from None
        return await self._attempt.directive_after(after, min(max(seconds, 0.0), MAX_WAIT_SECONDS))


def _whereabouts(body: dict[str, Any]) -> dict[str, Any]:
    """What a push says of where its rank is."""
    whole = {name: _int(body, name) for name in ("step", "beats") if body.get(name) is not None}
    return whole | {name: str(body[name] or "")[:250] for name in ("phase", "doing") if name in body}


def _telling(rows: list[list[Any]], objective: dict[str, Any]) -> list[list[Any]]:
    """Of many values of the objective in one push: the newest, and the best before it where the best counts."""
    if not rows:
        return []
    numbers = [row for row in rows[:-1] if isinstance(row[2], float)]
    if objective["reduce"] == "last" or not numbers:
        return rows[-1:]
    choose = min if objective["mode"] == "min" else max
    return [choose(numbers, key=lambda row: row[2]), rows[-1]]


def _parent(body: dict[str, Any]) -> dict[str, Any]:
    """Whose checkpoint was restored, where the trainer tells: [attempt, generation], or null for none."""
    if "parent" not in body:
        return {}
    token = body["parent"]
    if token is None:
        return {"parent": None}
    if not isinstance(token, list) or len(token) != 2 or not all(_is_count(number) for number in token):
        raise HttpError(400, "parent must be null or [attempt, generation]")
    return {"parent": token}


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 < number < 2**31


def _rank(body: dict[str, Any]) -> int:
    return _int(body, "rank") if body.get("rank") is not None else 0


def _int(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**62:
        raise HttpError(400, f"{name} must be a whole number, not {str(value)[:80]!r}")
    return value


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise HttpError(400, f"{name} must be a list")
    return value


def _row(row: Any) -> list[Any]:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str) or not 0 < len(row[0]) <= 250:
        raise HttpError(400, f"a metric is [key, step, value, time], not {str(row)[:200]!r}")
    when = row[3]
    if isinstance(when, bool) or not isinstance(when, (int, float)) or not math.isfinite(when):
        raise HttpError(400, f"the time of a metric is Unix seconds, not {str(when)[:80]!r}")
    return [row[0], _int({"step": row[1]}, "step"), as_value(row[2]), float(when)]


def _numbers(ledger: Any, name: str) -> dict[str, float]:
    part = ledger.get(name) if isinstance(ledger, dict) else None
    if not isinstance(part, dict):
        return {}
    return {
        str(key)[:250]: float(value)
        for key, value in part.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
