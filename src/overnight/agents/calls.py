"""The HTTP API as values: every route is a function that builds a :class:`Call`, without doing any I/O.

The synchronous and the asynchronous client both send these, so that each route is written once.
"""

import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from overnight.core import errors
from overnight.core.enums import TrialState
from overnight.core.models.api import (
    CheckpointPruneIn,
    CheckpointsPruned,
    Device,
    Event,
    Experiment,
    ExperimentIn,
    Leaderboard,
    LogChunk,
    MetricPoint,
    Node,
    Proposal,
    ProposalBatchIn,
    ProposalIn,
    Status,
    StoredCheckpoints,
    Sweep,
    SweepIn,
    Trial,
    Why,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Query = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and how its answer is read.

    Attributes:
        method, path: As in docs/architecture.md.
        parse: From the decoded JSON to the result.
        query: Query parameters, in order; a name may come twice.
        body: JSON text to send.
        content: Raw bytes to send instead of ``body``.
        repeatable: Sending it twice does the same as once, so that it may be retried blindly.
        wait_seconds: How long the server may hold the answer back.
        absent: What a 404 means, where it is an answer and not an error.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    query: Query = ()
    body: str | None = None
    content: bytes | None = None
    repeatable: bool = True
    wait_seconds: float = 0.0
    absent: Callable[[], T] | None = None

    def read(self, status: int, body: bytes) -> T:
        """The result, from an answer.

        Raises:
            OvernightError: The error that the server sent, rebuilt; or one that says what is wrong with the answer.
        """
        if status == 404 and self.absent is not None:
            return self.absent()
        if status >= 400:
            raise error_of(status, body)
        if self.method == "HEAD":
            return self.parse(None)
        try:
            return self.parse(json.loads(body) if body else None)
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise errors.OvernightError(
                f"the server's answer to {self.method} {self.path} is not what this client expects: {error}",
                hint="Client and server are of different versions: install the same one on both sides.",
            ) from None


_BY_STATUS: dict[int, type[errors.OvernightError]] = {
    401: errors.UnauthorizedError,
    403: errors.ForbiddenError,
    404: errors.NotFoundError,
    409: errors.ConflictError,
    413: errors.BadInputError,
    422: errors.BadInputError,
    502: errors.UnavailableError,
    503: errors.UnavailableError,
    504: errors.UnavailableError,
}


def error_of(status: int, body: bytes) -> errors.OvernightError:
    """The error in an answer: the server's own, or one made from the status when something else answered."""
    try:
        data = json.loads(body)["error"]
        if isinstance(data, dict) and "code" in data:
            return errors.from_dict(data)
    except (ValueError, KeyError, TypeError):
        pass
    text = body[:300].decode(errors="replace").strip()
    cls = _BY_STATUS.get(status, errors.OvernightError)
    return cls(f"the server answered {status}{': ' + text if text else ''}")


@dataclass(frozen=True)
class PageOf(Generic[T]):
    """A part of a list. Ask again with ``cursor`` for the next one; None ends it."""

    items: tuple[T, ...]
    cursor: str | None = None


def random_key() -> str:
    """A fresh idempotency key: 128 random bits."""
    return secrets.token_hex(16)


def _query(**values: Any) -> Query:
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if value is None:
            continue
        many = value if isinstance(value, (list, tuple)) else [value]
        pairs.extend((name, str(item)) for item in many)
    return tuple(pairs)


_LISTED_BY = {"sweep": "overnight sweep --list", "device": "overnight devices"}


def _ref(kind: str, ref: str) -> str:
    """A name as part of a path. One that no thing can have is not sent: a server would take it for another route."""
    if not ref or ref in (".", "..") or ("/" in ref and kind != "device"):
        shows = _LISTED_BY.get(kind, "overnight ls")
        raise errors.NotFoundError(f"there is no {kind} {ref!r}", hint=f"`{shows}` shows what there is.")
    return quote(ref, safe="")


def _dump(model: BaseModel) -> str:
    return model.model_dump_json()


def _items(data: Any) -> list[Any]:
    items = data["items"] if isinstance(data, dict) else data
    if not isinstance(items, list):
        raise TypeError("not a list")
    return items


def _many(model: type[M]) -> Callable[[Any], tuple[M, ...]]:
    return lambda data: tuple(model.model_validate(item) for item in _items(data))


def _page(model: type[M]) -> Callable[[Any], PageOf[M]]:
    def parse(data: Any) -> PageOf[M]:
        items = tuple(model.model_validate(item) for item in _items(data))
        return PageOf(items, data.get("cursor") if isinstance(data, dict) else None)

    return parse


def health() -> Call[dict[str, Any]]:
    """Whether the server answers, its version, home and pid. Needs no token."""
    return Call("GET", "/v1/health", dict)


def status() -> Call[Status]:
    """The state of the whole house in one answer."""
    return Call("GET", "/v1/status", Status.model_validate)


def create_experiment(experiment: ExperimentIn) -> Call[Experiment]:
    """Creates an experiment, or returns the one of that name."""
    return Call("POST", "/v1/experiments", Experiment.model_validate, body=_dump(experiment))


def experiments() -> Call[tuple[Experiment, ...]]:
    """All experiments."""
    return Call("GET", "/v1/experiments", _many(Experiment))


def experiment(ref: str) -> Call[Experiment]:
    """One experiment by name or id."""
    return Call("GET", f"/v1/experiments/{_ref('experiment', ref)}", Experiment.model_validate)


def leaderboard(ref: str, *, limit: int | None = None) -> Call[Leaderboard]:
    """The best trials of an experiment, best first."""
    path = f"/v1/experiments/{_ref('experiment', ref)}/leaderboard"
    return Call("GET", path, Leaderboard.model_validate, _query(limit=limit))


def digest(ref: str) -> Call[dict[str, Any]]:
    """The bounded summary of an experiment that planners read."""
    return Call("GET", f"/v1/experiments/{_ref('experiment', ref)}/digest", dict)


def propose(proposal: ProposalIn) -> Call[Proposal]:
    """Submits work. Gets a fresh idempotency key if it has none, so that a retry cannot submit it twice."""
    keyed = proposal if proposal.key else proposal.model_copy(update={"key": random_key()})
    return Call("POST", "/v1/proposals", Proposal.model_validate, body=_dump(keyed))


def propose_many(proposals: Iterable[ProposalIn]) -> Call[tuple[Proposal | errors.OvernightError, ...]]:
    """Submits up to 1,000 proposals in one transaction. Each gets its own answer: a proposal, or the error."""
    keyed = [p if p.key else p.model_copy(update={"key": random_key()}) for p in proposals]
    body = _dump(ProposalBatchIn(items=tuple(keyed)))
    return Call("POST", "/v1/proposals/batch", lambda data: tuple(map(_answer, _items(data))), body=body)


def _answer(data: Any) -> Proposal | errors.OvernightError:
    if isinstance(data, dict) and isinstance(data.get("error"), dict):
        return errors.from_dict(data["error"])
    if isinstance(data, dict) and "code" in data and "message" in data:
        return errors.from_dict(data)
    return Proposal.model_validate(data)


def trials(
    *,
    experiment: str | None = None,
    sweep: str | None = None,
    state: TrialState | Iterable[TrialState] | None = None,
    limit: int | None = None,
    cursor: str | None = None,
) -> Call[PageOf[Trial]]:
    """Trials, newest first."""
    states = [state] if isinstance(state, str) else list(state or ())
    query = _query(experiment=experiment, sweep=sweep, state=states, limit=limit, cursor=cursor)
    return Call("GET", "/v1/trials", _page(Trial), query)


def queue(*, limit: int | None = None) -> Call[PageOf[Trial]]:
    """Queued trials in the order in which they would start."""
    return Call("GET", "/v1/queue", _page(Trial), _query(limit=limit))


def trial(ref: str) -> Call[Trial]:
    """One trial by name or id, with its attempts and checkpoints."""
    return Call("GET", f"/v1/trials/{_ref('trial', ref)}", Trial.model_validate)


def metrics(
    ref: str, *, key: str | None = None, limit: int | None = None, cursor: str | None = None
) -> Call[PageOf[MetricPoint]]:
    """Metric values of the current lineage."""
    path = f"/v1/trials/{_ref('trial', ref)}/metrics"
    return Call("GET", path, _page(MetricPoint), _query(key=key, limit=limit, cursor=cursor))


def log(
    ref: str, *, attempt: int | None = None, offset: int = 0, limit: int | None = None, wait: float = 0.0
) -> Call[LogChunk]:
    """A piece of a trial's output. A negative ``offset`` counts bytes from the end; ``wait`` seconds for more."""
    query = _query(attempt=attempt, offset=offset, limit=limit, wait=wait or None)
    path = f"/v1/trials/{_ref('trial', ref)}/logs"
    return Call("GET", path, LogChunk.model_validate, query, wait_seconds=wait)


def why(ref: str) -> Call[Why]:
    """Why a trial is not running, and what would change that."""
    return Call("GET", f"/v1/trials/{_ref('trial', ref)}/why", Why.model_validate)


def checkpoints(ref: str) -> Call[StoredCheckpoints]:
    """What a trial's checkpoint place holds."""
    return Call("GET", f"/v1/trials/{_ref('trial', ref)}/checkpoints", StoredCheckpoints.model_validate)


def prune_checkpoints(ref: str, body: CheckpointPruneIn) -> Call[CheckpointsPruned]:
    """Deletes checkpoints of a trial that nobody needs."""
    path = f"/v1/trials/{_ref('trial', ref)}/checkpoints/prune"
    return Call("POST", path, CheckpointsPruned.model_validate, body=body.model_dump_json(), wait_seconds=600.0)


def _act(ref: str, verb: str, reason: str, repeatable: bool = True) -> Call[Trial]:
    path = f"/v1/trials/{_ref('trial', ref)}/{verb}"
    return Call("POST", path, Trial.model_validate, body=json.dumps({"reason": reason}), repeatable=repeatable)


def cancel(ref: str, *, reason: str = "") -> Call[Trial]:
    """Stops a trial for good."""
    return _act(ref, "cancel", reason)


def hold(ref: str, *, reason: str = "") -> Call[Trial]:
    """Keeps a queued trial from starting."""
    return _act(ref, "hold", reason)


def unhold(ref: str, *, reason: str = "") -> Call[Trial]:
    """Lets a held trial start."""
    return _act(ref, "unhold", reason)


def rerun(ref: str, *, reason: str = "") -> Call[Trial]:
    """Queues an ended trial again."""
    return _act(ref, "rerun", reason, repeatable=False)


def bump(ref: str, *, reason: str = "") -> Call[Trial]:
    """Moves a queued trial to the front of its class."""
    return _act(ref, "bump", reason)


def ended(refs: Iterable[str], *, wait: float = 0.0) -> Call[tuple[Trial, ...]]:
    """Those of the trials that are in an end state; waits up to ``wait`` seconds for the first of them."""
    query = _query(trial=list(refs), wait=wait)
    return Call("GET", "/v1/wait", _many(Trial), query, wait_seconds=wait)


def start_sweep(sweep: SweepIn) -> Call[Sweep]:
    """Starts a sweep, or with a schedule registers one. Gets a fresh idempotency key if it has none."""
    keyed = sweep if sweep.key else sweep.model_copy(update={"key": random_key()})
    return Call("POST", "/v1/sweeps", Sweep.model_validate, body=_dump(keyed))


def sweeps() -> Call[tuple[Sweep, ...]]:
    """All sweeps."""
    return Call("GET", "/v1/sweeps", _many(Sweep))


def sweep(sweep_id: str) -> Call[Sweep]:
    """One sweep by id."""
    return Call("GET", f"/v1/sweeps/{_ref('sweep', sweep_id)}", Sweep.model_validate)


def stop_sweep(sweep_id: str, *, reason: str = "") -> Call[Sweep]:
    """Ends a sweep: nothing new is proposed."""
    path = f"/v1/sweeps/{_ref('sweep', sweep_id)}/stop"
    return Call("POST", path, Sweep.model_validate, body=json.dumps({"reason": reason}))


def devices() -> Call[tuple[Device, ...]]:
    """All devices."""
    return Call("GET", "/v1/devices", _many(Device))


def change_device(device_id: str, action: str, *, reason: str) -> Call[Device]:
    """``quarantine``, ``release`` or ``drain`` a device; the reason goes on record."""
    path = f"/v1/devices/{_ref('device', device_id)}/{_ref('action', action)}"
    return Call("POST", path, Device.model_validate, body=json.dumps({"reason": reason}))


def nodes() -> Call[tuple[Node, ...]]:
    """All nodes."""
    return Call("GET", "/v1/nodes", _many(Node))


def event_page(
    *, after: int = 0, trial: str | None = None, limit: int | None = None, wait: float = 0.0
) -> Call[PageOf[Event]]:
    """Events after a sequence number, oldest first; ``wait`` seconds for the first."""
    query = _query(after=after, trial=trial, limit=limit, wait=wait or None)
    return Call("GET", "/v1/events", _page(Event), query, wait_seconds=wait)


def has_code(digest: str) -> Call[bool]:
    """Whether the server has a code snapshot."""
    return Call("HEAD", f"/v1/code/{_ref('snapshot', digest)}", lambda _: True, absent=lambda: False)


def put_code(digest: str, tar: bytes) -> Call[None]:
    """Uploads a code snapshot; the server verifies the hash."""
    return Call("PUT", f"/v1/code/{_ref('snapshot', digest)}", lambda _: None, content=tar)
