"""Errors as they leave the server: one envelope, one table of status codes, never a traceback."""

import logging
import secrets
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from overnight.core import errors as e
from overnight.core.text import sanitize

log = logging.getLogger(__name__)

STATUS: tuple[tuple[type[e.OvernightError], int], ...] = (
    (e.NotFoundError, 404),
    (e.RefusedError, 403),
    (e.BodyTooLargeError, 413),
    (e.BadInputError, 422),
    (e.ConflictError, 409),
    (e.UnauthorizedError, 401),
    (e.AuthError, 403),
    (e.UnavailableError, 503),
)
"""The first class that fits decides; everything else is 500."""

MAX_PROBLEMS = 10
SHOWN = 200


def status_of(error: e.OvernightError) -> int:
    """The HTTP status of an error."""
    return next((status for cls, status in STATUS if isinstance(error, cls)), 500)


def envelope(error: e.OvernightError) -> Response:
    """The response for an error."""
    headers = {}
    if isinstance(error, e.UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if error.retryable:
        headers["Retry-After"] = "1"
    return JSONResponse({"error": error.to_dict()}, status_of(error), headers)


def validation_error(problems: list[Any]) -> e.InvalidSpecError:
    """What pydantic found, in words: the first problem in the message, more of them in the details."""
    shown = [
        {"field": _field(p["loc"]), "problem": p["msg"].removeprefix("Value error, "), "value": _short(p.get("input"))}
        for p in problems
    ]
    first = shown[0]
    more = f" (and {len(shown) - 1} more)" if len(shown) > 1 else ""
    return e.InvalidSpecError(
        f"{first['field']}: {first['problem']}, got {first['value']}{more}",
        hint="The fields are described in /v1/openapi.json.",
        problems=shown[:MAX_PROBLEMS],
    )


def _field(loc: tuple[Any, ...]) -> str:
    parts = [str(part)[:SHOWN] for part in loc if part not in ("body", "query", "path")]
    return ".".join(parts) or "body"


def _short(value: Any) -> str:
    """A value for a message: never longer than a line, whatever was sent."""
    if isinstance(value, (dict, list, tuple)) and len(value) > 5:
        return f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return sanitize(repr(value), limit=SHOWN, one_line=True)


def unknown_error(error: Exception, what: str) -> e.OvernightError:
    """An error of our own making: logged in full under an id, told without its inside."""
    number = secrets.token_hex(6)
    log.error("internal error %s in %s", number, what, exc_info=error)
    return e.OvernightError(
        f"the server made an error of its own in {what}",
        hint=f"Look for {number} in HOME/logs/server.log, and report it.",
        id=number,
    )


def install(app: FastAPI) -> None:
    """Registers the handlers."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, e.OvernightError)
        if status_of(error) == 500:
            log.error("%s %s: %s", request.method, request.url.path, error)
        return envelope(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return envelope(validation_error(list(error.errors())))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = sanitize(request.url.path, limit=SHOWN, one_line=True)
        if error.status_code == 405:
            answer = e.BadInputError(f"{request.method} is no method of {path}")
        else:
            answer = e.NotFoundError(f"there is no {path}", hint="The routes are listed in /v1/openapi.json.")
        return JSONResponse({"error": answer.to_dict()}, error.status_code)

    app.add_exception_handler(e.OvernightError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
