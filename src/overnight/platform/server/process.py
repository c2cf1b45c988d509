"""The server's process: lock, token, socket, store, then uvicorn, and an orderly end."""

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from overnight import __version__
from overnight.core.clock import SystemClock
from overnight.core.errors import SetupError
from overnight.core.settings import Settings
from overnight.platform.code import CodeStore
from overnight.platform.identity import LockFile, held
from overnight.platform.server.app import create_app
from overnight.platform.server.listen import announce, open_socket, url_of
from overnight.platform.server.parts import running_services
from overnight.platform.server.services import Services
from overnight.platform.server.tokens import TokenBook, check_bind, ensure_token
from overnight.store import events
from overnight.store.engine import Store

log = logging.getLogger(__name__)

GRACEFUL_SECONDS = 1
Hook = Callable[[], Awaitable[None]]


def serve(settings: Settings) -> None:
    """Runs the server until SIGTERM or SIGINT.

    Raises:
        HomeHeldError: Another server holds the home.
        BadTokenFileError, PortTakenError, NetworkFilesystemError, StoreFullError, StoreBusyError, SetupError:
            It cannot start; the message says why and the hint what to do.
    """
    prepare_home(settings)
    with ExitStack() as stack:
        lock = stack.enter_context(held(settings.paths.server_lock, "server"))
        tokens = TokenBook(ensure_token(settings.paths.token_file))
        check_bind(settings.host, tokens)
        listener = stack.enter_context(open_socket(settings))
        store = stack.enter_context(Store.open(settings.effective_store_url, SystemClock()))
        CodeStore(settings.paths).clean()
        _run(settings, store, tokens, listener, lock)


def prepare_home(settings: Settings) -> None:
    """Makes the home's folders.

    Raises:
        SetupError: That is not possible.
    """
    home = settings.paths
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (home.logs, home.code):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the home {home.root} cannot be used: {error.strerror}",
            hint="Choose a folder that you may write to: OVERNIGHT_HOME=/path overnight up",
        ) from None


def _run(settings: Settings, store: Store, tokens: TokenBook, listener: socket.socket, lock: LockFile) -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_services(settings, store) as services:
            app.state.services = services
            yield

    app = create_app(tokens, settings.host, lifespan)

    def services() -> Services:
        found: Services = app.state.services
        return found

    async def listening() -> None:
        lock.update(url=url_of(listener), version=__version__)
        await _record(services(), "started")
        announce(settings.paths.server_file, lock.identity)
        services().engine.poke()
        log.info("listening on %s as pid %d", url_of(listener), lock.identity.pid)

    async def stopping() -> None:
        services().hub.close()
        await _record(services(), "stopped")

    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
        timeout_keep_alive=75,
    )
    _Uvicorn(config, listening, stopping).run(sockets=[listener])
    settings.paths.server_file.unlink(missing_ok=True)


async def _record(services: Services, what: str) -> None:
    now = services.clock.now()
    event = events.NewEvent(kind="server", subject="server", actor="server", after=what)
    try:
        await services.store.awrite(lambda conn: events.append(conn, now, event))
    except Exception:
        log.exception("the event that the server has %s could not be written", what)


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it listens, and that wakes long-polls before it waits for them to end."""

    def __init__(self, config: uvicorn.Config, listening: Hook, stopping: Hook) -> None:
        super().__init__(config)
        self._listening = listening
        self._stopping = stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then announces."""
        await super().startup(sockets)
        if self.started:
            await self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wakes long-polls, then stops."""
        await self._stopping()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not make it rude: `overnight up` forwards what a terminal sends to everybody."""
        self.should_exit = True
