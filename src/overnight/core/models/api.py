"""What the HTTP API takes and gives. Times are aware UTC, durations seconds, sizes bytes."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from overnight.core.addresses import discreet, discreet_json
from overnight.core.enums import (
    DeviceState,
    LeaseState,
    Mode,
    Outcome,
    PriorityClass,
    ProposalStatus,
    SweepState,
    TrialState,
)
from overnight.core.models.base import Wire
from overnight.core.models.spec import Objective, Schedule, SweepConfig, TrialConfig, check_name

Discreet = Annotated[str, AfterValidator(discreet)]
"""A text in which something foreign may have told a password; older versions have stored some as they came."""


class ExperimentIn(Wire):
    """Creates an experiment, or returns the one of that name."""

    name: str
    objective: Objective | None = None
    description: str = Field(default="", max_length=10_000)

    _name = field_validator("name")(check_name)


class Experiment(Wire):
    """A research goal."""

    id: str
    name: str
    objective: Objective | None
    description: str
    mlflow_experiment_id: str | None
    created_at: datetime
    trials_by_state: dict[TrialState, int] = Field(default_factory=dict)
    best: "TrialBrief | None" = None


class TrialBrief(Wire):
    """A line of a leaderboard."""

    id: str
    name: str
    params: dict[str, Any]
    value: float | None


class ProposalIn(Wire):
    """What a person or planner asks for.

    Attributes:
        config: What to run.
        params: The configuration; canonicalised by the server.
        replicates: How many trials with this configuration; they differ in ``replicate`` and so in the seed.
        key: Idempotency key: the same key with the same body returns the same answer.
        sweep_id: Set by a sweep's planner.
        note: Why, for people.
        dry_run: Validate and answer, store nothing.
    """

    config: TrialConfig
    params: dict[str, Any] = Field(default_factory=dict)
    replicates: int = Field(default=1, ge=1, le=1_000)
    key: str | None = Field(default=None, min_length=1, max_length=200)
    sweep_id: str | None = None
    note: str = Field(default="", max_length=10_000)
    hold: bool = False
    dry_run: bool = False


class Proposal(Wire):
    """The answer to a proposal. ``trials`` holds the new ones, or the existing ones of a duplicate."""

    id: str
    status: ProposalStatus
    hint: str = ""
    trials: tuple["Trial", ...] = ()


class ProposalBatchIn(Wire):
    """Up to 1,000 proposals in one transaction; each gets its own answer."""

    items: tuple[ProposalIn, ...] = Field(min_length=1, max_length=1_000)


class TrialError(Wire):
    """Why a trial failed."""

    type: str
    message: Discreet
    traceback: Discreet = ""
    last_lines: tuple[Discreet, ...] = ()
    step: int | None = None


class Attempt(Wire):
    """One execution of a trial."""

    id: str
    trial_id: str
    number: int
    generation: int
    node_id: str | None
    devices: tuple[str, ...]
    lease_state: LeaseState | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    outcome: Outcome | None
    cause: Discreet = ""
    exit_codes: tuple[int | None, ...] = ()
    error: TrialError | None = None
    dir: str | None = None
    ledger: dict[str, float] = Field(default_factory=dict)


class Checkpoint(Wire):
    """A committed checkpoint whose files are there, as far as the server knows."""

    trial_id: str
    attempt: int
    generation: int
    step: int
    uri: Discreet
    bytes: int
    committed_at: datetime


class StoredCheckpoint(Wire):
    """A checkpoint as it lies in its place.

    Attributes:
        name: Of its folder.
        bytes: In its own folder; frozen tensors, which several share, are apart.
        role: To the next start of the trial: ``newest``, ``lineage`` (further back), or ``hidden`` by a later start.
        kept_as: Why it stays by the run's rules; empty if it does not.
        best: It is among the best by the metric that the run's rules name.
        pinned_by: Who reads it just now.
        readable: Its manifest can be read. Nothing else is looked at: see ``overnight checkpoints verify``.
        problem: Why not, where that is known.
    """

    name: str
    step: int
    attempt: int
    generation: int
    bytes: int
    role: Literal["newest", "lineage", "hidden"]
    kept_as: str = ""
    best: bool = False
    pinned_by: str = ""
    readable: bool = True
    problem: str = ""
    created_at: str = ""
    kind: str = ""
    world_size: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)


class StoredCheckpoints(Wire):
    """A checkpoint place; ``bytes`` counts frozen tensors too."""

    place: str
    bytes: int
    items: tuple[StoredCheckpoint, ...]


class CheckpointPruneIn(Wire):
    """Asks for a trial's place to be tidied.

    Attributes:
        entries: These checkpoints only; empty: all that nobody needs.
        keep: How many of the newest stay, instead of what the run's own rules say.
        dry_run: Only say what would go.
        reason: Goes on record.
    """

    entries: tuple[str, ...] = Field(default=(), max_length=10_000)
    keep: int | None = Field(default=None, ge=1)
    dry_run: bool = False
    reason: str = Field(default="", max_length=10_000)


class CheckpointDeletion(Wire):
    """Something in a place that has gone, or would."""

    entry: str
    bytes: int
    cause: str


class CheckpointsPruned(Wire):
    """What has become of a place."""

    place: str
    dry_run: bool
    deleted: tuple[CheckpointDeletion, ...]


class Trial(Wire):
    """One configuration and replicate.

    Attributes:
        name: ``<experiment>-<number>``, what people type.
        position: Place in the queue from 1, when queued.
        value: The objective so far.
        step: The newest step heard of.
        attempts_made: Number of the newest attempt.
        retries_used: Infrastructure faults since the last progress.
    """

    id: str
    name: str
    number: int
    experiment: str
    sweep_id: str | None
    proposal_id: str
    config: TrialConfig
    params: dict[str, Any]
    config_hash: str
    replicate: int
    state: TrialState
    state_cause: Discreet
    priority: PriorityClass
    rank: int
    value: float | None
    step: int
    attempts_made: int
    retries_used: int
    preemptions: int
    mlflow_run_id: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    devices: tuple[str, ...] = ()
    position: int | None = None
    error: TrialError | None = None
    attempts: tuple[Attempt, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    dir: str | None = None


class MetricPoint(Wire):
    """One value of one metric; ``value`` is None for NaN and infinities (``text`` says which)."""

    key: str
    step: int
    value: float | None
    text: str | None = None
    time: float
    attempt: int
    generation: int


class SweepIn(Wire):
    """Starts a sweep, or with a schedule registers one."""

    config: TrialConfig
    sweep: SweepConfig
    schedule: Schedule | None = None
    key: str | None = Field(default=None, min_length=1, max_length=200)
    dry_run: bool = False


class Sweep(Wire):
    """A search and how far it is.

    Attributes:
        parent_id: The registration whose schedule started it.
        schedule: Set on a registration only: it makes no trials, its runs do.
        proposed: Accepted trials.
        next_run_at: When the schedule starts the next run.
    """

    id: str
    parent_id: str | None = None
    experiment: str
    sweep: SweepConfig
    config: TrialConfig
    schedule: Schedule | None
    state: SweepState
    cause: str
    proposed: int
    trials_by_state: dict[TrialState, int]
    best: TrialBrief | None
    created_at: datetime
    next_run_at: datetime | None = None


class Device(Wire):
    """A GPU, CPU slot or fake GPU."""

    id: str
    node_id: str
    index: int
    kind: str
    type: str
    memory_bytes: int
    state: DeviceState
    cause: str
    until: datetime | None
    trial_id: str | None
    trial_name: str | None
    attempt_id: str | None
    since: datetime | None


class Node(Wire):
    """A machine and the daemon on it."""

    id: str
    name: str
    pid: int
    boot_id: str
    connected: bool
    seen_at: datetime | None
    devices: tuple[str, ...] = ()


class Event(Wire):
    """One durable state change."""

    seq: int
    at: datetime
    actor: str
    kind: str
    subject: str
    trial_id: str | None
    attempt_id: str | None
    before: str | None
    after: str | None
    cause: Discreet
    data: Annotated[dict[str, Any], AfterValidator(discreet_json)] = Field(default_factory=dict)


class Page(Wire):
    """The envelope of every list: ask again with ``cursor`` for the next page, None ends it."""

    items: tuple[Any, ...]
    cursor: str | None = None


class Why(Wire):
    """Why a trial is not running, and what would change that."""

    trial_id: str
    state: TrialState
    reason: str
    changes: tuple[str, ...]
    position: int | None = None
    waits_for: tuple[str, ...] = ()


class Status(Wire):
    """The state of the whole house in one answer."""

    version: str
    home: str
    pid: int
    started_at: datetime
    trials_by_state: dict[TrialState, int]
    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    running: tuple[Trial, ...]
    queued: int
    sweeps: tuple[Sweep, ...]
    mlflow_uri: str
    mlflow_lag_rows: int
    store_url: str


class LeaderboardRow(Wire):
    """A finished or running trial, best first."""

    place: int
    trial: str
    trial_id: str
    state: TrialState
    value: float | None
    step: int
    params: dict[str, Any]
    seconds: float


class Leaderboard(Wire):
    """The best trials of an experiment."""

    experiment: str
    metric: str | None
    mode: Mode | None
    rows: tuple[LeaderboardRow, ...]


class LogChunk(Wire):
    """A piece of an attempt's output.

    Attributes:
        attempt: Number of the attempt.
        offset: Byte at which ``text`` begins.
        next_offset: Byte at which to go on.
        text: Decoded; bytes that are no UTF-8 become U+FFFD.
        end: Nothing will follow: the attempt is over and this was all of it.
    """

    attempt: int
    offset: int
    next_offset: int
    text: str
    end: bool


for _model in (Experiment, Proposal):
    _model.model_rebuild()
