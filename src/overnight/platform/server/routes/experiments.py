"""Experiments: research goals, their best trials, and the digest that planners read."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from overnight.core.enums import Role
from overnight.core.models.api import Experiment, ExperimentIn, Leaderboard, Page
from overnight.platform.server.digest import digest_of
from overnight.platform.server.web import Caller, House, Limit, answer, answer_items, right, takes
from overnight.store import experiments, trials

router = APIRouter(prefix="/experiments", tags=["experiments"], dependencies=[right(Role.VIEWER)])


@router.post("", response_model=Experiment, openapi_extra=takes(ExperimentIn), dependencies=[right(Role.AGENT)])
async def create(request: Request, house: House, caller: Caller) -> Response:
    """Creates an experiment, or returns the one of that name. Its objective is set once and never changes."""
    body = await house.bodies.read(request, ExperimentIn)
    now = house.clock.now()
    row = await house.store.awrite(
        lambda conn: experiments.ensure(
            conn, house.ids, now, body.name, body.objective, body.description, actor=caller.name
        )
    )
    return answer(await house.read(experiments.to_wire, row))


@router.get("", response_model=Page)
async def list_all(house: House) -> Response:
    """All experiments, newest first."""
    return answer_items(await house.read(experiments.list_))


@router.get("/{ref}", response_model=Experiment)
async def show(ref: str, house: House) -> Response:
    """One experiment by name or id, with counts by state and its best trial."""
    return answer(await house.read(lambda conn: experiments.to_wire(conn, experiments.get(conn, ref))))


@router.get("/{ref}/leaderboard", response_model=Leaderboard)
async def leaderboard(ref: str, house: House, limit: Limit = 20) -> Response:
    """The best trials, best first by the experiment's mode."""
    return answer(await house.read(trials.leaderboard, ref, limit))


@router.get("/{ref}/digest")
async def digest(ref: str, house: House) -> Response:
    """A bounded summary: objective, counts, the best and the newest trials, failures grouped by cause."""
    return JSONResponse(await house.read(digest_of, ref))
