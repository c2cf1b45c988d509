"""Code snapshots: upload once, run as submitted."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from overnight.core.enums import Role
from overnight.platform.server.web import House, right

router = APIRouter(prefix="/code", tags=["code"])


@router.head("/{digest}", dependencies=[right(Role.VIEWER)])
async def has(digest: str, house: House) -> Response:
    """200 when the snapshot is here, 404 when it is not."""
    house.code.require(digest)
    return Response()


@router.put(
    "/{digest}",
    dependencies=[right(Role.AGENT)],
    openapi_extra={"requestBody": {"required": True, "content": {"application/x-tar": {"schema": {"type": "string"}}}}},
)
async def put(digest: str, request: Request, house: House) -> Response:
    """Stores a snapshot: an uncompressed tar of at most 256 MiB, named by the SHA-256 of its bytes (verified)."""
    if house.code.has(digest):
        return JSONResponse({"hash": digest, "stored": False})
    with house.code.receive(digest) as upload:
        async for chunk in request.stream():
            upload.write(chunk)
        await house.work(upload.commit)
    return JSONResponse({"hash": digest, "stored": True})
