"""Health and status: is it there, and what is going on."""

import os
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from overnight import __version__
from overnight.core.enums import Role, SweepState, TrialState
from overnight.core.errors import StaleAttemptError
from overnight.core.models.api import Status
from overnight.core.states import LIVE_STATES
from overnight.platform.server.services import Services
from overnight.platform.server.web import Caller, House, Reason, answer, right, takes
from overnight.store import attempts, devices, nodes, outbox, sweeps, transitions, trials
from overnight.store.trials import TrialFilter

if TYPE_CHECKING:
    from overnight.store.engine import Connection

router = APIRouter(tags=["house"])

MAX_RUNNING = 1_000


@router.get("/health")
async def health(house: House) -> Response:
    """Whether the server answers, and which one it is. The only route without a token."""
    body: dict[str, Any] = {
        "status": "ok",
        "version": __version__,
        "home": str(house.settings.home),
        "pid": os.getpid(),
    }
    return JSONResponse(body)


@router.get("/status", response_model=Status, dependencies=[right(Role.VIEWER)])
async def status(house: House) -> Response:
    """The state of the whole house in one answer: devices, nodes, running trials, sweeps, MLflow's lag."""
    return answer(await house.read(_status, house))


def _status(conn: "Connection", house: Services) -> Status:
    counts = trials.counts(conn)
    running = trials.page(conn, TrialFilter(states=LIVE_STATES), limit=MAX_RUNNING)
    return Status(
        version=__version__,
        home=str(house.settings.home),
        pid=os.getpid(),
        started_at=house.started_at,
        trials_by_state=counts,
        devices=tuple(devices.list_(conn)),
        nodes=tuple(nodes.list_(conn)),
        running=running.items,
        queued=counts.get(TrialState.QUEUED, 0),
        sweeps=tuple(sweeps.list_(conn, states={SweepState.ACTIVE, SweepState.PAUSED, SweepState.BROKEN})),
        mlflow_uri=house.settings.effective_mlflow_uri,
        mlflow_lag_rows=outbox.lag(conn),
        store_url=_without_password(house.settings.effective_store_url),
    )


@router.post("/shutdown", openapi_extra=takes(Reason), dependencies=[right(Role.OPERATOR)])
async def shutdown(request: Request, house: House, caller: Caller) -> Response:
    """Starts nothing more, and tells every worker to save and leave; answers how many are still there (`live`).

    Their trials are queued again at their place. Ask again until none is left, then stop the server.
    """
    reason = (await house.bodies.read(request, Reason)).reason or "shutdown"
    house.stop_scheduling()
    now = house.clock.now()
    live = await house.store.awrite(lambda conn: _yield_all(conn, house, caller.name, reason, now))
    return JSONResponse({"live": live})


def _yield_all(conn: "Connection", house: Services, actor: str, reason: str, now: datetime) -> int:
    running = [attempt for attempt in attempts.live(conn) if attempt.ended_at is None]
    for attempt in running:
        with suppress(StaleAttemptError):  # it is leaving already
            transitions.preempt(
                conn,
                trial_id=attempt.trial_id,
                attempt=attempt.number,
                actor=actor,
                cause=reason,
                reason="shutdown",
                now=now,
                grace_seconds=house.settings.grace_seconds,
            )
    return len(running)


def _without_password(url: str) -> str:
    """``scheme://user:secret@host`` with the secret hidden."""
    scheme, mark, rest = url.partition("://")
    user, at, place = rest.rpartition("@")
    if not at or ":" not in user:
        return url
    return f"{scheme}{mark}{user.partition(':')[0]}:***@{place}"
