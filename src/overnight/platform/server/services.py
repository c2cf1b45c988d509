"""The server's parts, made once at start and handed to every route."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from overnight.core.clock import Clock
from overnight.core.ids import IdFactory
from overnight.core.settings import Settings
from overnight.platform.code import CodeStore
from overnight.platform.engines.local import LocalEngine
from overnight.platform.health.ward import Health
from overnight.platform.janitor import Janitor
from overnight.platform.scheduler.loop import SchedulerLoop
from overnight.platform.server.body import Bodies
from overnight.platform.server.submit import Submissions
from overnight.platform.server.wake import Hub
from overnight.platform.sweeps import SweepService
from overnight.store.engine import Store

if TYPE_CHECKING:
    from overnight.store.engine import Connection

P = ParamSpec("P")
T = TypeVar("T")

NUM_READERS = 4


@dataclass
class Services:
    """What handlers work with.

    Attributes:
        hub: Wakes long-polls after commits.
        readers: Threads for reads that take more than a moment, so that the event loop stays free.
        started_at: When this server began.
        heard_at: When, on the monotonic clock, a node's sign of life was last written, by node id.
        scheduling: The scheduler's task.
    """

    settings: Settings
    store: Store
    clock: Clock
    ids: IdFactory
    hub: Hub
    code: CodeStore
    bodies: Bodies
    engine: LocalEngine
    scheduler: SchedulerLoop
    submissions: Submissions
    health: Health
    sweeps: SweepService
    janitor: Janitor
    started_at: datetime
    scheduling: "asyncio.Task[None] | None" = None
    heard_at: dict[str, float] = field(default_factory=dict)
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(NUM_READERS, "reader"))

    async def read(self, fn: "Callable[Concatenate[Connection, P], T]", *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a read, ``fn(conn, ...)``, in a thread."""
        return await self.work(lambda: self.peek(fn, *args, **kwargs))

    def peek(self, fn: "Callable[Concatenate[Connection, P], T]", *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a short read here and now."""
        with self.store.read() as conn:
            return fn(conn, *args, **kwargs)

    async def work(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs anything that blocks in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, partial(fn, *args, **kwargs))

    def stop_scheduling(self) -> None:
        """Nothing is started from now on, until the next server."""
        if self.scheduling is not None:
            self.scheduling.cancel()
