"""Sweeps: starting, watching and stopping a search."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from overnight.core.enums import Role
from overnight.core.models.api import Page, Sweep, SweepIn
from overnight.platform.server.web import Caller, House, Reason, answer, answer_items, right, takes
from overnight.store import sweeps

router = APIRouter(prefix="/sweeps", tags=["sweeps"], dependencies=[right(Role.VIEWER)])


@router.post("", response_model=Sweep, openapi_extra=takes(SweepIn), dependencies=[right(Role.AGENT)])
async def start(request: Request, house: House, caller: Caller) -> Response:
    """Starts a sweep; with a schedule it is registered, and each run is a sweep of its own."""
    body = await house.bodies.read(request, SweepIn)
    house.code.require(body.config.code)
    return answer(await house.sweeps.start(body, actor=caller.name))


@router.get("", response_model=Page)
async def list_all(house: House) -> Response:
    """All sweeps, newest first."""
    return answer_items(await house.read(sweeps.list_))


@router.get("/{sweep_id}", response_model=Sweep)
async def show(sweep_id: str, house: House) -> Response:
    """One sweep: how far it is, and its best trial."""
    return answer(await house.read(sweeps.get, sweep_id))


@router.post("/{sweep_id}/stop", response_model=Sweep, openapi_extra=takes(Reason), dependencies=[right(Role.AGENT)])
async def stop(sweep_id: str, request: Request, house: House, caller: Caller) -> Response:
    """Ends a sweep: nothing new is proposed, what is queued is cancelled, what runs is stopped."""
    reason = (await house.bodies.read(request, Reason)).reason
    return answer(await house.sweeps.stop(sweep_id, actor=caller.name, reason=reason))
