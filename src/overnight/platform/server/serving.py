"""The server at work: the store, the application, uvicorn, and an orderly end."""

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from overnight import __version__
from overnight.core.clock import SystemClock
from overnight.core.settings import Settings
from overnight.platform.code import CodeStore
from overnight.platform.identity import LockFile
from overnight.platform.server.app import create_app
from overnight.platform.server.listen import announce, url_of
from overnight.platform.server.parts import running_services
from overnight.platform.server.services import Services
from overnight.platform.server.tokens import TokenBook
from overnight.store import events
from overnight.store.engine import Store

log = logging.getLogger(__name__)

GRACEFUL_SECONDS = 1
Hook = Callable[[], Awaitable[None]]


def answer(settings: Settings, lock: LockFile, tokens: TokenBook, listener: socket.socket) -> None:
    """Opens the store, and answers until SIGTERM or SIGINT.

    Raises:
        NetworkFilesystemError, StoreFullError, StoreBusyError, SetupError: The store cannot be used.
    """
    with Store.open(settings.effective_store_url, SystemClock()) as store:
        CodeStore(settings.paths).clean()
        _run(settings, store, tokens, listener, lock)


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
