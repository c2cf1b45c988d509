"""``overnight.Client`` and ``overnight.AsyncClient``: the HTTP API as typed methods.

```python
with overnight.Client() as client:
    answer = client.propose(ProposalIn(config=config, params={"lr": 3e-4}))
    for trial in client.wait([t.id for t in answer.trials]):
        print(trial.name, trial.value)
```

Routes are described once, in :mod:`overnight.agents.calls`, conversations in :mod:`overnight.agents.flows`; here they
meet httpx. Both clients find the server by themselves, follow it to a new address when it restarts, retry what may be
retried, and raise the errors of :mod:`overnight.core.errors`.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast
from urllib.parse import urlsplit

import httpx

from overnight.agents import calls, connect, flows
from overnight.agents.calls import Call
from overnight.agents.connect import Address
from overnight.agents.flows import Emit, Flow
from overnight.agents.retrying import Patience, RetryPolicy, may_resend
from overnight.agents.sse import SseParser
from overnight.core.enums import TrialState
from overnight.core.errors import OvernightError, ServerAwayError
from overnight.core.models.api import Event, LogChunk, Trial
from overnight.core.settings import Settings, build_settings

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_SECONDS = 15.0
STREAM_SILENCE_SECONDS = 60.0
"""An event stream that sends nothing, not even a keep-alive comment, for this long is taken for dead."""

_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def settings_from_environment() -> Settings:
    """Settings from ``OVERNIGHT_*`` and ``<home>/overnight.toml``, for programs that have none at hand."""
    settings = build_settings(os.environ)
    if settings.paths.settings_file.is_file():
        return build_settings(os.environ, Path(settings.paths.settings_file).read_text())
    return settings


class _Base:
    """What both clients share: where the server is, and what a failed try means."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        server: str | None = None,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        base = settings or settings_from_environment()
        given = {name: value for name, value in (("server", server), ("token", token)) if value is not None}
        self.settings = base.model_copy(update=given)
        self._retry = retry or RetryPolicy()
        self._monotonic = monotonic
        self._address: Address | None = None
        self._answered = False

    @property
    def address(self) -> Address:
        """Where the server is. Looked up when first needed, and again after it was away."""
        if self._address is None:
            self._address = connect.find_server(self.settings)
        return self._address

    def _request(self, call: Call[Any]) -> dict[str, Any]:
        """Arguments of ``httpx.Client.request``."""
        content = call.content if call.content is not None else call.body
        headers = self._headers()
        if content is not None:
            headers["Content-Type"] = "application/x-tar" if call.content is not None else "application/json"
        return {
            "method": call.method,
            "url": self.address.url + call.path,
            "params": list(call.query),
            "content": content,
            "headers": headers,
            "timeout": httpx.Timeout(TIMEOUT_SECONDS, read=TIMEOUT_SECONDS + call.wait_seconds, write=120.0),
        }

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.address.token}"} if self.address.token else {}

    def _answer(self, call: Call[T], status: int, body: bytes) -> T:
        self._answered = True
        return call.read(status, body)

    def _away(self, error: httpx.HTTPError) -> ServerAwayError:
        """What a failed connection is to the caller. The address is looked up again: a restart may change it."""
        url = self._address.url if self._address else "the server"
        self._address = None
        detail = str(error) or type(error).__name__
        hint = connect.ELSEWHERE_HINT if self.settings.server else connect.START_HINT
        return ServerAwayError(f"no answer from {url}: {detail}", hint=hint)

    def _pause(self, patience: Patience, call: Call[Any], error: OvernightError, unsent: bool) -> float:
        known = self._answered or connect.is_supervised(self.settings)
        resend = may_resend(call, unsent=unsent, answered=not isinstance(error, ServerAwayError))
        return patience.pause_after(error, resend=resend, known=known, now=self._monotonic())

    def _stream(self, after: int, trial: str | None) -> dict[str, Any]:
        """Arguments of ``httpx.Client.stream`` for the event stream."""
        request = self._request(calls.event_page(after=after, trial=trial))
        request["headers"] |= {"Accept": "text/event-stream", "Last-Event-ID": str(after), "Cache-Control": "no-store"}
        request["timeout"] = httpx.Timeout(TIMEOUT_SECONDS, read=STREAM_SILENCE_SECONDS)
        return request

    def _options(self, transport: object) -> dict[str, Any]:
        """A proxy from the environment must not catch what is meant for this machine, which shows no certificate.

        Reading all authorities' certificates for nothing would be a tenth of the time that a command takes.
        """
        url = urlsplit(self.settings.server or "http://127.0.0.1")
        host = url.hostname or ""
        local = host == "localhost" or host.startswith("127.") or host == "::1"
        verify = not local or url.scheme != "http"
        return {"transport": transport, "trust_env": not local, "verify": verify, "follow_redirects": False}


_STREAM_CALL = calls.event_page()


def _events_of(parser: SseParser, data: bytes) -> list[Event]:
    return [Event.model_validate_json(m.data) for m in parser.feed(data) if m.event in ("message", "event")]


def _route(build: Callable[P, Call[T]]) -> "Callable[Concatenate[Client, P], T]":
    """A method of :class:`Client` that sends what ``build`` describes."""

    @functools.wraps(build)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(build(*args, **kwargs))

    return method


def _aroute(build: Callable[P, Call[T]]) -> "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]":
    """A method of :class:`AsyncClient` that sends what ``build`` describes."""

    @functools.wraps(build)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(build(*args, **kwargs))

    return method


class Client(_Base):
    """A synchronous client. Safe to share between threads.

    Args:
        settings: Where the home is; from the environment if None.
        server, token: Instead of what the settings and the home say.
        retry: How patient to be while the server restarts.
        monotonic: The clock of waiting.
        sleep: Waits between two tries.
        transport: For tests and special networks.

    Raises:
        ServerAwayError: From any method, when no server answers; its hint says how to start one.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        server: str | None = None,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(settings, server=server, token=token, retry=retry, monotonic=monotonic)
        self._sleep = sleep
        self._http = httpx.Client(**self._options(transport))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def send(self, call: Call[T]) -> T:
        """Sends one call, again if need be, and returns its result."""
        patience = Patience(self._retry, self._monotonic())
        while True:
            unsent = False
            try:
                response = self._http.request(**self._request(call))
                return self._answer(call, response.status_code, response.content)
            except httpx.HTTPError as error:
                unsent = isinstance(error, _UNSENT)
                failure: OvernightError = self._away(error)
            except OvernightError as error:
                unsent = isinstance(error, ServerAwayError)
                failure = error
            self._sleep(self._pause(patience, call, failure, unsent))

    def _drive(self, flow: Flow[T, Any]) -> Iterator[T]:
        """What a flow emits, as it comes."""
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration:
                return
            if isinstance(step, Emit):
                yield step.value
                answer = None
            else:
                answer = self.send(step)

    def _finish(self, flow: Flow[Any, R]) -> R:
        """What a flow returns, whatever it emits."""
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return cast(R, done.value)
            answer = self.send(step) if isinstance(step, Call) else None

    def wait(self, trials: str | Iterable[str], timeout: float | None = None) -> tuple[Trial, ...]:
        """Waits until all the trials (names or ids) have ended; returns those that have when the time is up."""
        return self._finish(flows.wait(trials, timeout=timeout, monotonic=self._monotonic))

    def as_ended(self, trials: str | Iterable[str], timeout: float | None = None) -> Iterator[Trial]:
        """Yields each of the trials when it ends."""
        return self._drive(flows.wait(trials, timeout=timeout, monotonic=self._monotonic))

    def logs(
        self,
        trial: str,
        *,
        attempt: int | None = None,
        offset: int = 0,
        follow: bool = False,
        limit: int | None = None,
    ) -> Iterator[LogChunk]:
        """Yields a trial's output; see :func:`overnight.agents.flows.follow_log`."""
        return self._drive(flows.follow_log(trial, attempt=attempt, offset=offset, follow=follow, limit=limit))

    def all_trials(
        self,
        *,
        experiment: str | None = None,
        sweep: str | None = None,
        state: TrialState | Iterable[TrialState] | None = None,
    ) -> Iterator[Trial]:
        """Yields every trial that fits, newest first."""
        return self._drive(flows.all_trials(experiment=experiment, sweep=sweep, state=state))

    def upload_code(self, digest: str, read: Callable[[], bytes]) -> None:
        """Sends a code snapshot unless the server has it. ``read`` is called only when it is needed."""
        self._finish(flows.upload_code(digest, read))

    def events(self, after: int = 0, trial: str | None = None) -> Iterator[Event]:
        """Yields events as they are committed, for ever; goes on where it was after a lost connection."""
        patience = Patience(self._retry, self._monotonic())
        while True:
            unsent, failure = False, cast(OvernightError, ServerAwayError("the event stream ended"))
            try:
                parser = SseParser()
                with self._http.stream(**self._stream(after, trial)) as response:
                    if response.status_code != 200:
                        raise calls.error_of(response.status_code, response.read())
                    self._answered = True
                    for data in response.iter_bytes():
                        for event in _events_of(parser, data):
                            patience = Patience(self._retry, self._monotonic())
                            after = event.seq
                            yield event
                self._address = None
            except httpx.HTTPError as error:
                unsent, failure = isinstance(error, _UNSENT), self._away(error)
            except OvernightError as error:
                failure = error
            self._sleep(self._pause(patience, _STREAM_CALL, failure, unsent))

    health = _route(calls.health)
    status = _route(calls.status)
    create_experiment = _route(calls.create_experiment)
    experiments = _route(calls.experiments)
    experiment = _route(calls.experiment)
    leaderboard = _route(calls.leaderboard)
    digest = _route(calls.digest)
    propose = _route(calls.propose)
    propose_many = _route(calls.propose_many)
    trials = _route(calls.trials)
    queue = _route(calls.queue)
    trial = _route(calls.trial)
    metrics = _route(calls.metrics)
    log = _route(calls.log)
    why = _route(calls.why)
    checkpoints = _route(calls.checkpoints)
    prune_checkpoints = _route(calls.prune_checkpoints)
    cancel = _route(calls.cancel)
    hold = _route(calls.hold)
    unhold = _route(calls.unhold)
    rerun = _route(calls.rerun)
    bump = _route(calls.bump)
    ended = _route(calls.ended)
    start_sweep = _route(calls.start_sweep)
    sweeps = _route(calls.sweeps)
    sweep = _route(calls.sweep)
    stop_sweep = _route(calls.stop_sweep)
    devices = _route(calls.devices)
    change_device = _route(calls.change_device)
    nodes = _route(calls.nodes)
    event_page = _route(calls.event_page)
    has_code = _route(calls.has_code)
    put_code = _route(calls.put_code)


class AsyncClient(_Base):
    """The same for asyncio: every method of :class:`Client`, awaited; the iterators are asynchronous."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        server: str | None = None,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(settings, server=server, token=token, retry=retry, monotonic=monotonic)
        self._sleep = sleep
        self._http = httpx.AsyncClient(**self._options(transport))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Sends one call, again if need be, and returns its result."""
        patience = Patience(self._retry, self._monotonic())
        while True:
            unsent = False
            try:
                response = await self._http.request(**self._request(call))
                return self._answer(call, response.status_code, response.content)
            except httpx.HTTPError as error:
                unsent = isinstance(error, _UNSENT)
                failure: OvernightError = self._away(error)
            except OvernightError as error:
                unsent = isinstance(error, ServerAwayError)
                failure = error
            await self._sleep(self._pause(patience, call, failure, unsent))

    async def _drive(self, flow: Flow[T, Any]) -> AsyncIterator[T]:
        """What a flow emits, as it comes."""
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration:
                return
            if isinstance(step, Emit):
                yield step.value
                answer = None
            else:
                answer = await self.send(step)

    async def _finish(self, flow: Flow[Any, R]) -> R:
        """What a flow returns, whatever it emits."""
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return cast(R, done.value)
            answer = await self.send(step) if isinstance(step, Call) else None

    async def wait(self, trials: str | Iterable[str], timeout: float | None = None) -> tuple[Trial, ...]:
        """Waits until all the trials (names or ids) have ended; returns those that have when the time is up."""
        return await self._finish(flows.wait(trials, timeout=timeout, monotonic=self._monotonic))

    def as_ended(self, trials: str | Iterable[str], timeout: float | None = None) -> AsyncIterator[Trial]:
        """Yields each of the trials when it ends."""
        return self._drive(flows.wait(trials, timeout=timeout, monotonic=self._monotonic))

    def logs(
        self,
        trial: str,
        *,
        attempt: int | None = None,
        offset: int = 0,
        follow: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[LogChunk]:
        """Yields a trial's output; see :func:`overnight.agents.flows.follow_log`."""
        return self._drive(flows.follow_log(trial, attempt=attempt, offset=offset, follow=follow, limit=limit))

    def all_trials(
        self,
        *,
        experiment: str | None = None,
        sweep: str | None = None,
        state: TrialState | Iterable[TrialState] | None = None,
    ) -> AsyncIterator[Trial]:
        """Yields every trial that fits, newest first."""
        return self._drive(flows.all_trials(experiment=experiment, sweep=sweep, state=state))

    async def upload_code(self, digest: str, read: Callable[[], bytes]) -> None:
        """Sends a code snapshot unless the server has it. ``read`` is called only when it is needed."""
        await self._finish(flows.upload_code(digest, read))

    async def events(self, after: int = 0, trial: str | None = None) -> AsyncIterator[Event]:
        """Yields events as they are committed, for ever; goes on where it was after a lost connection."""
        patience = Patience(self._retry, self._monotonic())
        while True:
            unsent, failure = False, cast(OvernightError, ServerAwayError("the event stream ended"))
            try:
                parser = SseParser()
                async with self._http.stream(**self._stream(after, trial)) as response:
                    if response.status_code != 200:
                        raise calls.error_of(response.status_code, await response.aread())
                    self._answered = True
                    async for data in response.aiter_bytes():
                        for event in _events_of(parser, data):
                            patience = Patience(self._retry, self._monotonic())
                            after = event.seq
                            yield event
                self._address = None
            except httpx.HTTPError as error:
                unsent, failure = isinstance(error, _UNSENT), self._away(error)
            except OvernightError as error:
                failure = error
            await self._sleep(self._pause(patience, _STREAM_CALL, failure, unsent))

    health = _aroute(calls.health)
    status = _aroute(calls.status)
    create_experiment = _aroute(calls.create_experiment)
    experiments = _aroute(calls.experiments)
    experiment = _aroute(calls.experiment)
    leaderboard = _aroute(calls.leaderboard)
    digest = _aroute(calls.digest)
    propose = _aroute(calls.propose)
    propose_many = _aroute(calls.propose_many)
    trials = _aroute(calls.trials)
    queue = _aroute(calls.queue)
    trial = _aroute(calls.trial)
    metrics = _aroute(calls.metrics)
    log = _aroute(calls.log)
    why = _aroute(calls.why)
    checkpoints = _aroute(calls.checkpoints)
    prune_checkpoints = _aroute(calls.prune_checkpoints)
    cancel = _aroute(calls.cancel)
    hold = _aroute(calls.hold)
    unhold = _aroute(calls.unhold)
    rerun = _aroute(calls.rerun)
    bump = _aroute(calls.bump)
    ended = _aroute(calls.ended)
    start_sweep = _aroute(calls.start_sweep)
    sweeps = _aroute(calls.sweeps)
    sweep = _aroute(calls.sweep)
    stop_sweep = _aroute(calls.stop_sweep)
    devices = _aroute(calls.devices)
    change_device = _aroute(calls.change_device)
    nodes = _aroute(calls.nodes)
    event_page = _aroute(calls.event_page)
    has_code = _aroute(calls.has_code)
    put_code = _aroute(calls.put_code)
