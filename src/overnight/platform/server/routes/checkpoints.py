"""Checkpoints of a trial: what lies in its place, and deleting what nobody needs."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from overnight.core.enums import Role
from overnight.core.models.api import CheckpointPruneIn, CheckpointsPruned, StoredCheckpoints
from overnight.platform.server.web import Caller, House, answer, right, takes

router = APIRouter(tags=["checkpoints"])


@router.get("/trials/{ref}/checkpoints", response_model=StoredCheckpoints, dependencies=[right(Role.VIEWER)])
async def show(ref: str, house: House) -> Response:
    """What the trial's checkpoint place holds, oldest first. Manifests are read, data is not."""
    place, found = await house.janitor.survey(ref)
    return answer(StoredCheckpoints(place=place, bytes=found["bytes"], items=found["rows"]))


@router.post(
    "/trials/{ref}/checkpoints/prune",
    response_model=CheckpointsPruned,
    openapi_extra=takes(CheckpointPruneIn),
    dependencies=[right(Role.OPERATOR)],
)
async def prune(ref: str, request: Request, house: House, caller: Caller) -> Response:
    """Deletes what nobody needs. Never what is pinned, the last good checkpoint, or anything of a trial at work."""
    body = await house.bodies.read(request, CheckpointPruneIn)
    place, deleted = await house.janitor.prune(ref, body, actor=caller.name)
    return answer(CheckpointsPruned.model_validate({"place": place, "dry_run": body.dry_run, "deleted": deleted}))
