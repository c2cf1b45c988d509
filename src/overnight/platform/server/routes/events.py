"""Events: every durable change, as pages, as a long-poll, or as a stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse

from overnight.core.enums import Role
from overnight.core.errors import InvalidSpecError
from overnight.core.models.api import Page
from overnight.platform.server.services import Services
from overnight.platform.server.wake import poll
from overnight.platform.server.web import House, Limit, Wait, answer_items, is_streaming, right
from overnight.store import events, trials

router = APIRouter(prefix="/events", tags=["events"], dependencies=[right(Role.VIEWER)])

HEARTBEAT_SECONDS = 15.0
STREAM_PAGE = 500
After = Annotated[int | None, Query(ge=0, le=2**62, description="Events after this sequence number.")]
LastId = Annotated[str | None, Header(alias="Last-Event-ID", description="Where a stream was when it broke.")]


@router.get("", response_model=Page, responses={200: {"content": {"text/event-stream": {}}}})
async def list_events(
    request: Request,
    house: House,
    after: After = None,
    trial: str | None = None,
    limit: Limit = 1_000,
    wait: Wait = 0.0,
    last_event_id: LastId = None,
) -> Response:
    """Events with a higher sequence number than `after`, oldest first; `wait` holds the answer until there is one.

    With `Accept: text/event-stream` they arrive as server-sent events for as long as the connection lasts: `id` is the
    sequence number, `data` the event. `Last-Event-ID` wins over `after`; a stream without either starts at the
    beginning. A comment comes every 15 seconds when nothing else does.
    """
    trial_id = await house.read(lambda conn: trials.row(conn, trial).id) if trial else None
    if is_streaming(request.scope):
        start = _sequence(last_event_id) if last_event_id else after or 0
        stream = _stream(house, start, trial_id)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    def read() -> Page:
        return house.peek(lambda conn: events.page(conn, after or 0, trial_id=trial_id, limit=limit))

    with house.hub.watch("events") as watch:
        page = await poll(watch, read, lambda found: bool(found.items), wait)
    return answer_items(page.items, page.cursor)


def _sequence(text: str) -> int:
    if not text.isdecimal() or int(text) > 2**62:
        raise InvalidSpecError(f"Last-Event-ID: not a sequence number, got {text[:80]!r}")
    return int(text)


async def _stream(house: Services, after: int, trial_id: str | None) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    yield "retry: 500\n\n"
    spoke_at = loop.time()
    with house.hub.watch("events") as watch:
        while not house.hub.closing:
            page = await house.read(events.page, after, trial_id=trial_id, limit=STREAM_PAGE)
            if page.items:
                after = page.items[-1].seq
                spoke_at = loop.time()
                yield "".join(f"id: {event.seq}\ndata: {event.model_dump_json()}\n\n" for event in page.items)
            elif not await watch.wait(spoke_at + HEARTBEAT_SECONDS - loop.time()):
                spoke_at = loop.time()
                yield ": still here\n\n"
