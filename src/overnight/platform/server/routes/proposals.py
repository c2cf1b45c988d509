"""Proposals: the one way in for work, from people and planners alike."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from overnight.core.enums import Role
from overnight.core.errors import OvernightError
from overnight.core.models.api import Page, Proposal, ProposalBatchIn, ProposalIn
from overnight.platform.server.web import Caller, House, answer, error_object, right, takes

router = APIRouter(prefix="/proposals", tags=["proposals"], dependencies=[right(Role.AGENT)])


@router.post("", response_model=Proposal, openapi_extra=takes(ProposalIn))
async def propose(request: Request, house: House, caller: Caller) -> Response:
    """Submits work: accepted with new trials, `duplicate` with the existing ones, or an error that says why not.

    The same `key` with the same body gives the same answer, so that a retry cannot submit twice.
    """
    proposal = await house.bodies.read(request, ProposalIn)
    return answer(await house.submissions.one(caller.name, proposal))


@router.post("/batch", response_model=Page, openapi_extra=takes(ProposalBatchIn))
async def propose_many(request: Request, house: House, caller: Caller) -> Response:
    """Submits up to 1,000 proposals in one transaction. Each gets its own answer: a proposal, or `{"error": …}`."""
    batch = await house.bodies.read(request, ProposalBatchIn)
    answers = await house.submissions.many(caller.name, batch.items)
    items = [
        error_object(item) if isinstance(item, OvernightError) else item.model_dump(mode="json") for item in answers
    ]
    return JSONResponse({"items": items, "cursor": None})
