"""Trials: looking, waiting, and what a person may tell one."""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from overnight.core.enums import Role, TrialState
from overnight.core.models.api import LogChunk, Page, Trial, Why
from overnight.core.states import END_STATES
from overnight.platform.server.logs import follow_log
from overnight.platform.server.services import Services
from overnight.platform.server.wake import poll
from overnight.platform.server.web import (
    MAX_PAGE,
    Caller,
    Cursor,
    House,
    Limit,
    Reason,
    Wait,
    answer,
    answer_items,
    right,
    takes,
)
from overnight.store import metrics, transitions, trials
from overnight.store.trials import TrialFilter

if TYPE_CHECKING:
    from overnight.store.engine import Connection

router = APIRouter(tags=["trials"], dependencies=[right(Role.VIEWER)])

MAX_LOG_BYTES = 1024 * 1024
States = Annotated[list[TrialState] | None, Query(description="Only these states; may come several times.")]
Refs = Annotated[list[str], Query(min_length=1, max_length=MAX_PAGE, description="Names or ids.")]


@router.get("/trials", response_model=Page)
async def list_all(
    house: House,
    experiment: str | None = None,
    sweep: str | None = None,
    state: States = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """Trials, newest first, without their attempts and checkpoints."""
    filters = TrialFilter(experiment=experiment, sweep=sweep, states=state or None)
    page = await house.read(trials.page, filters, cursor, limit)
    return answer_items(page.items, page.cursor)


@router.get("/queue", response_model=Page)
async def queue(house: House, limit: Limit = 100) -> Response:
    """Queued trials in the order in which they would start, with their position."""
    return answer_items(await house.read(trials.queue, limit))


@router.get("/wait", response_model=Page)
async def wait(house: House, trial: Refs, wait: Wait = 0.0) -> Response:
    """Those of the trials that are in an end state. Holds the answer until there is one, or `wait` is over."""
    ids = [found.id for found in await house.read(trials.find, trial)]

    def ended() -> list[Trial]:
        return [t for t in house.peek(trials.find, ids) if t.state in END_STATES]

    with house.hub.watch(*(f"trial:{id}" for id in ids)) as watch:
        return answer_items(await poll(watch, ended, bool, wait))


@router.get("/trials/{ref}", response_model=Trial)
async def show(ref: str, house: House) -> Response:
    """One trial by id or by a name such as `digits-7`, with its attempts and checkpoints."""
    return answer(await house.read(_dressed, house, ref))


@router.get("/trials/{ref}/metrics", response_model=Page)
async def show_metrics(
    ref: str, house: House, key: str | None = None, limit: Limit = MAX_PAGE, cursor: Cursor = None
) -> Response:
    """Metric values of the current lineage: steps that a resume took back are left out."""

    def read(conn: "Connection") -> Page:
        return metrics.points(conn, trials.row(conn, ref).id, key=key, after=cursor, limit=limit)

    page = await house.read(read)
    return answer_items(page.items, page.cursor)


@router.get("/trials/{ref}/logs", response_model=LogChunk)
async def logs(
    ref: str,
    house: House,
    attempt: Annotated[int | None, Query(ge=1, description="Which attempt; the newest if left out.")] = None,
    rank: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    offset: Annotated[int, Query(description="Byte to start at; `-N` is the last N bytes.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES, description="Most bytes.")] = 64 * 1024,
    wait: Wait = 0.0,
) -> Response:
    """A piece of an attempt's output, as it was written: showing it safely is the caller's part."""
    chunk = await follow_log(house, ref, attempt, rank, offset, limit, wait)
    return JSONResponse(chunk.model_dump())


@router.get("/trials/{ref}/why", response_model=Why)
async def why(ref: str, house: House) -> Response:
    """Why the trial is not running, and what would change that."""
    trial = await house.read(trials.get, ref)
    return answer(house.scheduler.explain(trial))


Verb = Callable[..., Any]


async def _tell(house: Services, request: Request, caller: Caller, ref: str, verb: Verb, **more: Any) -> Response:
    reason = (await house.bodies.read(request, Reason)).reason
    now: datetime = house.clock.now()

    def write(conn: "Connection") -> Trial:
        trial_id = trials.row(conn, ref).id
        verb(conn, trial_id=trial_id, actor=caller.name, reason=reason, now=now, **more)
        return trials.get(conn, trial_id)

    return answer(await house.store.awrite(write))


def _verb(name: str, verb: Verb, text: str, needs_grace: bool = False) -> None:
    async def tell(ref: str, request: Request, house: House, caller: Caller) -> Response:
        more = {"grace_seconds": house.settings.grace_seconds} if needs_grace else {}
        return await _tell(house, request, caller, ref, verb, **more)

    router.add_api_route(
        f"/trials/{{ref}}/{name}",
        tell,
        methods=["POST"],
        name=name,
        description=text,
        response_model=Trial,
        openapi_extra=takes(Reason),
        dependencies=[right(Role.AGENT)],
    )


_verb("cancel", transitions.cancel, "Stops the trial for good; a running one saves and leaves within the grace.", True)
_verb("hold", transitions.hold, "Keeps a queued trial from starting.")
_verb("unhold", transitions.unhold, "Lets a held trial start, at its old place.")
_verb("rerun", transitions.rerun, "Queues an ended trial again; it goes on from its newest checkpoint.")
_verb("bump", transitions.bump, "Moves a queued trial to the front of its class.")


def _dressed(conn: "Connection", house: Services, ref: str) -> Trial:
    """The trial with the folders that it and its attempts have in this home."""
    trial, home = trials.get(conn, ref), house.settings.paths
    attempts = tuple(
        attempt.model_copy(update={"dir": attempt.dir or str(home.attempt_dir(trial.id, attempt.number))})
        for attempt in trial.attempts
    )
    return trial.model_copy(update={"dir": trial.dir or str(home.trial_dir(trial.id)), "attempts": attempts})
