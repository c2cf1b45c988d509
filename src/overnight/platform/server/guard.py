"""What every request passes first: Host, token, and the last catch of errors. Plain ASGI, since it is on every path."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overnight.core.errors import AuthError, ForbiddenError
from overnight.core.text import sanitize
from overnight.platform.server.errors import envelope, unknown_error
from overnight.platform.server.tokens import TokenBook, is_loopback

OPEN_PATHS: Final = frozenset({"/v1/health"})
PRINCIPAL: Final = "overnight.principal"


class Guard:
    """Outermost middleware.

    Args:
        app: The application behind it.
        tokens: Who may call.
        host: The address that the server listens on.
    """

    def __init__(self, app: ASGIApp, tokens: TokenBook, host: str) -> None:
        self._app = app
        self._tokens = tokens
        self._names = {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_host(headers.get(b"host", b"").decode("latin1"))
            if scope["path"] not in OPEN_PATHS:
                scope[PRINCIPAL] = self._tokens.identify(headers.get(b"authorization"))
        except AuthError as error:
            await envelope(error)(scope, receive, send)
            return
        await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            answer = unknown_error(error, f"{scope['method']} {sanitize(scope['path'], limit=200, one_line=True)}")
            if started:
                raise
            await envelope(answer)(scope, receive, send)

    def _check_host(self, header: str) -> None:
        """A page that rebinds its own name to 127.0.0.1 would otherwise be the same origin as this server."""
        if self._names is None:
            return
        name = header.rpartition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
        if name.lower() not in self._names:
            raise ForbiddenError(
                f"the Host header {sanitize(header, limit=200, one_line=True)!r} does not name this server",
                hint="Call it as 127.0.0.1 or localhost.",
            )
