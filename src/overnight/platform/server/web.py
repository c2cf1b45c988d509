"""What route handlers share: dependencies, answers, and descriptions for OpenAPI of bodies that we parse ourselves."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Scope

from overnight.core.enums import Role
from overnight.core.errors import OvernightError
from overnight.core.models.base import Wire
from overnight.platform.server.guard import PRINCIPAL
from overnight.platform.server.services import Services
from overnight.platform.server.tokens import Principal

MAX_PAGE = 1_000
_BODY_MODELS: dict[str, type[BaseModel]] = {}

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most items in the answer.")]
Cursor = Annotated[str | None, Query(max_length=500, description="From the page before; leave it out for the first.")]
Wait = Annotated[
    float, Query(ge=0, le=600, allow_inf_nan=False, description="Seconds to wait for news; at most 60 count.")
]


class Reason(Wire):
    """Why a person does something. It goes on record."""

    reason: str = ""


async def services(request: Request) -> Services:
    """The server's parts."""
    found: Services = request.app.state.services
    return found


async def principal(request: Request) -> Principal:
    """Who calls."""
    found: Principal = request.scope[PRINCIPAL]
    return found


House = Annotated[Services, Depends(services)]
Caller = Annotated[Principal, Depends(principal)]


def right(role: Role) -> Any:
    """A dependency that lets through only callers with that right."""

    async def check(caller: Caller) -> None:
        caller.require(role)

    return Depends(check)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is read by :class:`~overnight.platform.server.body.Bodies`."""
    _BODY_MODELS[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas() -> dict[str, Any]:
    """JSON schemas of all bodies, and of what they refer to, for OpenAPI's components."""
    found: dict[str, Any] = {}
    for name, model in _BODY_MODELS.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        found.update(schema.pop("$defs", {}))
        found[name] = schema
    return found


def answer(model: BaseModel, status: int = 200) -> Response:
    """A model as JSON, serialised once by pydantic and not again by the framework."""
    return Response(model.model_dump_json(), status, media_type="application/json")


def answer_items(items: Iterable[BaseModel], cursor: str | None = None) -> Response:
    """A page of models."""
    text = ",".join(item.model_dump_json() for item in items)
    return Response(f'{{"items":[{text}],"cursor":{json.dumps(cursor)}}}', media_type="application/json")


def error_object(error: OvernightError) -> dict[str, Any]:
    """An error as one item of a list."""
    return {"error": error.to_dict()}


def is_streaming(scope: Scope) -> bool:
    """Whether the caller asked for server-sent events."""
    accept: Sequence[bytes] = [value for name, value in scope["headers"] if name == b"accept"]
    return any(b"text/event-stream" in value for value in accept)
