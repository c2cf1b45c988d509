"""Starts what runs beside the routes, and stops it in the opposite order."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from overnight.core.clock import SystemClock
from overnight.core.ids import new_id
from overnight.core.settings import Settings
from overnight.platform.code import CodeStore
from overnight.platform.engines.failures import FailureRates
from overnight.platform.engines.local import LocalEngine
from overnight.platform.health.ward import Health
from overnight.platform.janitor import Janitor
from overnight.platform.scheduler.loop import SchedulerLoop
from overnight.platform.server.body import Bodies
from overnight.platform.server.outbox_child import OutboxChild
from overnight.platform.server.services import Services
from overnight.platform.server.submit import Submissions
from overnight.platform.server.wake import Hub
from overnight.platform.sweeps import SweepService
from overnight.store.engine import Store

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_services(settings: Settings, store: Store) -> AsyncIterator[Services]:
    """The services of a server, running."""
    clock = SystemClock()
    hub = Hub(asyncio.get_running_loop())
    unsubscribe = store.subscribe(hub.publish)
    scheduler = SchedulerLoop(store, lambda node_id: hub.notify(f"node:{node_id}"), clock, settings)
    code = CodeStore(settings.paths)
    submissions = Submissions(store, clock, new_id, code, scheduler)
    sweeps = SweepService(store, settings, clock, submissions.many)
    janitor = Janitor(store, settings, clock)
    rates = FailureRates(store, clock)
    services = Services(
        settings=settings,
        store=store,
        clock=clock,
        ids=new_id,
        hub=hub,
        code=code,
        bodies=Bodies(),
        engine=LocalEngine(settings, kills=scheduler.kills, mtbf_seconds=rates.mtbf_seconds),
        scheduler=scheduler,
        submissions=submissions,
        health=Health(),
        sweeps=sweeps,
        janitor=janitor,
        started_at=clock.now(),
    )
    outbox = OutboxChild(settings)
    services.scheduling = _background(scheduler.run(), "scheduler")
    counting = _background(rates.run(), "count of failures")
    await sweeps.open()
    await janitor.open()
    outbox.start()
    try:
        yield services
    finally:
        services.scheduling.cancel()
        counting.cancel()
        await asyncio.gather(outbox.stop(), sweeps.close(), janitor.close())
        with suppress(asyncio.CancelledError):
            await services.scheduling
        unsubscribe()
        services.readers.shutdown(wait=False, cancel_futures=True)


def _background(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_complain)
    return task


def _complain(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the %s has ended", task.get_name(), exc_info=error)
