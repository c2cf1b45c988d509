"""Request bodies: bounded, and parsed strictly, since a key that comes twice or a NaN must not pass silently."""

import asyncio
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from overnight.core.canonical import loads_strict
from overnight.core.errors import BodyTooLargeError
from overnight.core.models.base import Wire
from overnight.platform.server.errors import validation_error

MAX_BODY_BYTES = 16 * 1024 * 1024
LARGE_BODY_BYTES = 256 * 1024
MAX_LARGE_BODIES = 8
"""Larger bodies take turns: what a thousand callers can make the server hold stays bounded."""

M = TypeVar("M", bound=Wire)


class Bodies:
    """Reads JSON bodies within limits; one per server."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(MAX_LARGE_BODIES)

    async def read(self, request: Request, model: type[M]) -> M:
        """The body as a model.

        Raises:
            BodyTooLargeError: More than :data:`MAX_BODY_BYTES`.
            InvalidParamsError: Not JSON, a key twice, NaN or infinity.
            InvalidSpecError: It does not validate; the message names the field and the value.
        """
        declared = int(request.headers.get("content-length", "0") or 0)
        if declared > MAX_BODY_BYTES:
            raise _too_large()
        if 0 < declared <= LARGE_BODY_BYTES:
            return _parse(await request.body(), model)
        async with self._large:
            return _parse(await _collect(request), model)


async def _collect(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(raw: bytes, model: type[M]) -> M:
    data: Any = loads_strict(raw, example='{"name": "value"}') if raw.strip() else {}
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise validation_error(list(error.errors(include_url=False, include_context=False))) from None


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB", hint="Send less at a time.", limit=MAX_BODY_BYTES
    )
