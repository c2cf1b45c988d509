"""Facts from nodes become rows: hello, reports and spools, each in one write."""

import logging
import math
from concurrent.futures import Future
from typing import TYPE_CHECKING

from overnight.core.enums import DirectiveAction, LeaseState
from overnight.core.models.node import (
    Directive,
    NodeHello,
    NodeReport,
    NodeWelcome,
    SpoolAnswer,
    SpoolEvent,
    SpoolPost,
)
from overnight.platform import attempts as endings
from overnight.platform.server.services import Services
from overnight.store import attempts, nodes
from overnight.store import spool as spools

if TYPE_CHECKING:
    from overnight.store.engine import Connection

log = logging.getLogger(__name__)

STALE = "stale"
STALE_VERSION = 2**31
"""Above every version that an attempt's own directives reach."""


async def hello(house: Services, message: NodeHello) -> NodeWelcome:
    """Registers a daemon and its devices.

    An attempt that has ended and of which it has no process left gets its lease cleaned: its report may have been lost.
    One that has not ended is left alone, known to the daemon or not: the work that it is given asks for a report.
    """
    now = house.clock.now()
    here = {*message.attempts, *message.dirty}

    def write(conn: "Connection") -> str:
        node = nodes.hello(conn, ids=house.ids, now=now, hello=message)
        house.health.observe(conn, node.id, message.devices, now)
        for attempt in attempts.live(conn, node.id):
            over = attempt.ended_at is not None and attempt.lease_state is not LeaseState.CLEAN
            if over and attempt.id not in here:
                attempts.clean(conn, attempt_id=attempt.id, now=now)
        return node.id

    return NodeWelcome(
        node_id=await house.store.awrite(write),
        heartbeat_seconds=house.settings.heartbeat_seconds,
        probe_seconds=house.settings.probe_seconds,
    )


def seen(house: Services, node_id: str) -> None:
    """Records a sign of life, without making its sender wait for the commit.

    Not every one: each costs a flush to disk, for which what is written next has to wait.

    Raises:
        NotFoundError: The node is not known: its daemon must say hello again.
    """
    is_connected = house.peek(nodes.is_connected, node_id)
    now, at = house.clock.now(), house.clock.monotonic()
    is_recent = at - house.heard_at.get(node_id, -math.inf) < house.settings.heartbeat_seconds / 2
    if is_connected and is_recent:
        return
    house.heard_at[node_id] = at
    house.store.submit(lambda conn: nodes.seen(conn, node_id=node_id, now=now)).add_done_callback(_log_failure)


def _log_failure(future: "Future[None]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("a sign of life could not be written: %s", error)


async def report(house: Services, node_id: str, message: NodeReport) -> None:
    """Takes what a daemon reports, in one write."""
    now = house.clock.now()

    def write(conn: "Connection") -> None:
        nodes.seen(conn, node_id=node_id, now=now)
        house.health.observe(conn, node_id, message.devices, now)
        for failed in message.failed:
            endings.conclude_unlaunched(conn, failed=failed, now=now, actor=node_id)
        for ended in message.ended:
            endings.conclude_ended(conn, ended=ended, now=now, actor=node_id)

    await house.store.awrite(write)


async def spool(house: Services, attempt_id: str, post: SpoolPost) -> SpoolAnswer:
    """Ingests a supervisor's events, ends the attempt when its exit is among them, and repeats the directive.

    Raises:
        NotFoundError: No such attempt.
        StaleAttemptError: The attempt has ended, or another is current, and something in the post is new.
    """
    now = house.clock.now()

    def write(conn: "Connection") -> SpoolAnswer:
        acked = spools.ingest(conn, attempt_id, post.generation, post.events, now)
        attempts.beat(conn, attempt_id, post.counter)
        if any(event.kind == "exit" for event in post.events):
            endings.conclude(conn, attempt_id=attempt_id, now=now)
        return SpoolAnswer(acked=acked, directive=current_directive(conn, attempt_id))

    answer = await house.store.awrite(write)
    await _tell_pruners(house, attempt_id, post.events)
    return answer


def current_directive(conn: "Connection", attempt_id: str) -> Directive:
    """What the attempt is told; one that has ended is told to stop.

    Raises:
        NotFoundError: No such attempt.
    """
    directive = attempts.standing_directive(conn, attempt_id)
    return directive or Directive(version=STALE_VERSION, action=DirectiveAction.STOP, reason=STALE)


async def _tell_pruners(house: Services, attempt_id: str, events: tuple[SpoolEvent, ...]) -> None:
    reports = [event.data for event in events if event.kind == "report"]
    if reports:
        await house.sweeps.on_report(attempt_id, reports)
