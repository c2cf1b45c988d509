"""What node daemons and supervisors say, and what they are told. Everything here may be sent twice."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from overnight.core.enums import Role
from overnight.core.models.node import Directive, NodeHello, NodeReport, NodeWelcome, SpoolAnswer, SpoolPost, Work
from overnight.platform.server import intake
from overnight.platform.server.wake import poll
from overnight.platform.server.web import House, Wait, answer, right, takes

router = APIRouter(tags=["nodes"], dependencies=[right(Role.NODE)])

After = Annotated[int | None, Query(ge=-1, le=2**62, description="Version of the answer before; wait for another.")]


@router.post("/nodes", response_model=NodeWelcome, openapi_extra=takes(NodeHello))
async def hello(request: Request, house: House) -> Response:
    """A daemon's first call, and again after each reconnect: its devices and what lives on it."""
    return answer(await intake.hello(house, await house.bodies.read(request, NodeHello)))


@router.get("/nodes/{node_id}/work", response_model=Work)
async def work(node_id: str, house: House, after: After = None, wait: Wait = 0.0) -> Response:
    """What should be on the node. Level-triggered: the daemon makes the world match it. Counts as a sign of life."""
    intake.seen(house, node_id)

    def news() -> Work | None:
        return house.peek(house.engine.news, node_id, after)

    with house.hub.watch(f"node:{node_id}") as watch:
        found = await poll(watch, news, lambda work: work is not None, wait)
    return answer(found or house.peek(house.engine.work, node_id))


@router.post("/nodes/{node_id}/reports", openapi_extra=takes(NodeReport))
async def report(node_id: str, request: Request, house: House) -> Response:
    """Probe results, attempts of which no process is left, and launches that could not be made."""
    await intake.report(house, node_id, await house.bodies.read(request, NodeReport))
    return JSONResponse({"ok": True})


@router.post("/attempts/{attempt_id}/spool", response_model=SpoolAnswer, openapi_extra=takes(SpoolPost))
async def spool(attempt_id: str, request: Request, house: House) -> Response:
    """What an attempt's supervisor has to tell, in order; also its heartbeat. The answer repeats the directive."""
    return answer(await intake.spool(house, attempt_id, await house.bodies.read(request, SpoolPost)))


@router.get("/attempts/{attempt_id}/directive", response_model=Directive)
async def directive(attempt_id: str, house: House, after: After = None, wait: Wait = 0.0) -> Response:
    """What the attempt is told now. With `after` it answers within milliseconds of a change."""

    def read() -> Directive:
        return house.peek(intake.current_directive, attempt_id)

    with house.hub.watch(f"attempt:{attempt_id}") as watch:
        found = await poll(watch, read, lambda told: told.version != after, wait)
    return answer(found)
