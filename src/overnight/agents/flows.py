"""Conversations of several requests, without I/O: generators that yield calls and get their answers sent back.

A flow also yields :class:`Emit` for each thing that its user should see. The clients drive flows, one with ``await``.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from overnight.agents import calls
from overnight.agents.calls import Call
from overnight.core.enums import TrialState
from overnight.core.models.api import LogChunk, Trial
from overnight.core.states import END_STATES

T = TypeVar("T")
R = TypeVar("R")

POLL_SECONDS = 20.0
"""How long one long-poll is held: below the idle time-outs of common proxies."""


@dataclass(frozen=True)
class Emit(Generic[T]):
    """Something for the user of a flow."""

    value: T


Flow = Generator[Call[Any] | Emit[T], Any, R]


def wait(
    refs: str | Iterable[str], *, timeout: float | None = None, monotonic: Callable[[], float]
) -> Flow[Trial, tuple[Trial, ...]]:
    """Waits until all trials are in an end state; emits each as it gets there.

    Args:
        refs: Names or ids.
        timeout: Seconds; None waits for ever.
        monotonic: The clock.

    Returns:
        The trials that ended, in the order of ``refs``: fewer than asked for when the time ran out.
    """
    wanted = list(dict.fromkeys([refs] if isinstance(refs, str) else refs))
    pending, found = list(wanted), dict[str, Trial]()
    deadline = None if timeout is None else monotonic() + timeout
    while pending:
        left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(0.0, deadline - monotonic()))
        answer: tuple[Trial, ...] = yield calls.ended(pending, wait=round(left, 3))
        for trial in answer:
            for ref in {trial.id, trial.name} & set(pending):
                pending.remove(ref)
                found[ref] = trial
                yield Emit(trial)
        if not answer and deadline is not None and monotonic() >= deadline:
            break
    return tuple(found[ref] for ref in wanted if ref in found)


def follow_log(
    ref: str, *, attempt: int | None = None, offset: int = 0, follow: bool = False, limit: int | None = None
) -> Flow[LogChunk, None]:
    """Emits a trial's output; with ``follow`` until the trial is over, attempt after attempt.

    Args:
        ref: Name or id.
        attempt: Which attempt; the newest if None.
        offset: Where to start; negative counts bytes from the end.
        follow: Wait for more, and go on with the next attempt if there is one.
        limit: Largest piece in bytes.
    """
    if follow and attempt is None:
        attempt = yield from _first_attempt(ref)
        if attempt is None:
            return
    while True:
        wait_seconds = POLL_SECONDS if follow else 0.0
        chunk: LogChunk = yield calls.log(ref, attempt=attempt, offset=offset, limit=limit, wait=wait_seconds)
        moved = bool(chunk.text) or chunk.next_offset > chunk.offset
        if moved:
            yield Emit(chunk)
        attempt, offset = chunk.attempt, chunk.next_offset
        if chunk.end and follow:
            attempt = yield from _next_attempt(ref, attempt)
            offset = 0
            if attempt is None:
                return
        elif chunk.end or (not follow and not moved):
            return


def _first_attempt(ref: str) -> Flow[LogChunk, int | None]:
    return (yield from _next_attempt(ref, 0, newest=True))


def _next_attempt(ref: str, after: int, newest: bool = False) -> Flow[LogChunk, int | None]:
    """Number of the attempt that follows ``after``, once there is one; None when the trial ended without."""
    seen = 0
    while True:
        trial: Trial = yield calls.trial(ref)
        if trial.attempts_made > after:
            return trial.attempts_made if newest else after + 1
        if trial.state in END_STATES:
            return None
        page = yield calls.event_page(after=seen, trial=trial.id, limit=1000, wait=POLL_SECONDS if seen else 0.0)
        seen = page.items[-1].seq if page.items else seen


def all_trials(
    *, experiment: str | None = None, sweep: str | None = None, state: TrialState | Iterable[TrialState] | None = None
) -> Flow[Trial, None]:
    """Emits every trial that fits, newest first, page by page."""
    states = [state] if isinstance(state, str) else list(state or ())
    cursor: str | None = None
    while True:
        page = yield calls.trials(experiment=experiment, sweep=sweep, state=states, limit=200, cursor=cursor)
        for trial in page.items:
            yield Emit(trial)
        cursor = page.cursor
        if cursor is None:
            return


def upload_code(digest: str, read: Callable[[], bytes]) -> Flow[Any, bool]:
    """Makes sure that the server has a snapshot; returns whether it had to be sent."""
    if (yield calls.has_code(digest)):
        return False
    yield calls.put_code(digest, read())
    return True
