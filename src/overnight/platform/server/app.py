"""Puts the API together: routes, errors, guard, OpenAPI."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI

from overnight import __version__
from overnight.platform.server import errors
from overnight.platform.server.guard import Guard
from overnight.platform.server.routes import (
    checkpoints,
    code,
    devices,
    events,
    experiments,
    house,
    nodes,
    proposals,
    sweeps,
    trials,
)
from overnight.platform.server.tokens import TokenBook
from overnight.platform.server.web import body_schemas

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

ROUTERS = (nodes, proposals, trials, house, experiments, sweeps, devices, events, code, checkpoints)
"""Those on the way to a trial's start come first, as routes are tried one after the other."""


def create_app(tokens: TokenBook, host: str, lifespan: Lifespan) -> FastAPI:
    """The application. ``lifespan`` sets ``app.state.services`` and starts what runs beside the routes.

    Args:
        tokens: Who may call.
        host: The address that it will listen on; on loopback other Host headers are refused.
        lifespan: See above.
    """
    app = FastAPI(
        title="overnight",
        version=__version__,
        description='Runs PyTorch experiments while people sleep. Errors are `{"error": {code, message, hint, …}}`.',
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    for module in ROUTERS:
        app.include_router(module.router, prefix="/v1")
    errors.install(app)
    app.add_middleware(Guard, tokens=tokens, host=host)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Adds what FastAPI cannot know: bodies that we parse strictly ourselves, the token, the error envelope."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = plain()
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(body_schemas() | {"Error": _ERROR})
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "What went wrong.", "content": content}
        return schema

    app.openapi = described  # type: ignore[method-assign]


_ERROR = {
    "title": "Error",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "hint", "retryable", "details"],
            "properties": {
                "code": {"type": "string", "description": "Stable; what programs compare."},
                "message": {"type": "string", "description": "What happened."},
                "hint": {"type": "string", "description": "What to do next."},
                "retryable": {"type": "boolean"},
                "details": {"type": "object"},
            },
        }
    },
    "required": ["error"],
}
