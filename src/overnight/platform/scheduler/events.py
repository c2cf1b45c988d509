"""The words of the scheduler's core: what it is told (events), what it answers (actions), and the values in both.

Times are seconds of the scheduler's own monotonic clock.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from overnight.core.enums import CLASS_ORDER, DeviceState, PriorityClass
from overnight.core.models.spec import Compute

LEASABLE = frozenset({DeviceState.HEALTHY, DeviceState.SUSPECT, DeviceState.PROBATION})
EXPLORATORY = CLASS_ORDER.index(PriorityClass.EXPLORATORY)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device as the scheduler sees it."""

    id: str
    node_id: str
    index: int
    type: str
    state: DeviceState

    @property
    def is_leasable(self) -> bool:
        """Whether its state allows a lease at all."""
        return self.state in LEASABLE


@dataclass(frozen=True, slots=True)
class Demand:
    """What a trial asks for.

    Attributes:
        min_devices: Fewest devices with which it can run.
        max_devices: Most devices that it can use.
        types: Acceptable device types in lower case, sorted; any if empty.
        nodes: Exact number of nodes, each giving the same number; None is any.
        per_node: Exact number of devices per node; None is any.
    """

    min_devices: int
    max_devices: int
    types: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None

    @classmethod
    def of(cls, compute: Compute) -> "Demand":
        """The demand in a trial's configuration."""
        types = tuple(sorted({name.lower() for name in compute.type}))
        return cls(compute.min_devices, compute.max_devices, types, compute.nodes, compute.gpus_per_node)

    def sizes(self, available: int) -> Iterator["Size"]:
        """Ways to satisfy it with at most ``available`` devices, largest first."""
        for total in range(min(self.max_devices, available), self.min_devices - 1, -1):
            if self.nodes is None and self.per_node is None:
                yield Size(total, None, total)
                continue
            nodes = self.nodes or total // (self.per_node or 1)
            if nodes and total % nodes == 0 and self.per_node in (None, total // nodes):
                yield Size(total, nodes, total // nodes)

    @property
    def smallest(self) -> "Size | None":
        """The least that it can run with; None if the numbers contradict each other (5 devices on 2 nodes)."""
        return min(self.sizes(self.max_devices), key=lambda size: size.total, default=None)


@dataclass(frozen=True, slots=True)
class Size:
    """One way to satisfy a demand: ``per_node`` devices on each of ``nodes`` nodes, or ``total`` anywhere (None)."""

    total: int
    nodes: int | None
    per_node: int


QueueKey = tuple[int, int, int, str]
"""Class, then higher rank, then place in the queue. The id only makes the order total."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued trial.

    Attributes:
        priority: Index in CLASS_ORDER.
        rank: Higher runs first inside the class.
        place: Position in the order of arrival; kept after a pre-emption.
        avoid: Devices on which it met an infrastructure fault.
        not_before: Backoff: not started earlier.
    """

    trial_id: str
    priority: int
    rank: int
    place: int
    demand: Demand
    avoid: frozenset[str] = frozenset()
    not_before: float = -math.inf

    @property
    def key(self) -> QueueKey:
        """Sorts in the order of the queue."""
        return (self.priority, -self.rank, self.place, self.trial_id)


class Phase(StrEnum):
    """How far an attempt is on its way to giving its devices back."""

    RUNNING = "running"
    YIELDING = "yielding"
    STOPPING = "stopping"
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class Live:
    """An attempt whose devices are not clean yet.

    Attributes:
        is_resumable: It can be pre-empted without losing more than what it did since its last commit.
        since: Its last commit, or its start.
        for_trial_id: The pre-emptor that its devices are bound to.
        bound_until: When that binding ends.
    """

    attempt_id: str
    trial_id: str
    device_ids: tuple[str, ...]
    priority: int
    is_resumable: bool
    since: float
    phase: Phase = Phase.RUNNING
    for_trial_id: str | None = None
    bound_until: float = -math.inf

    def loss(self, now: float) -> float:
        """Device-seconds that a pre-emption would throw away."""
        return len(self.device_ids) * max(0.0, now - self.since)


@dataclass(frozen=True, slots=True)
class DeviceChanged:
    """A device appeared, or its state changed."""

    device: DeviceView


@dataclass(frozen=True, slots=True)
class DeviceGone:
    """A device no longer exists."""

    device_id: str


@dataclass(frozen=True, slots=True)
class TrialQueued:
    """A trial waits, or what it asks for changed."""

    trial: Waiting


@dataclass(frozen=True, slots=True)
class TrialGone:
    """A trial no longer waits: held, cancelled, ended."""

    trial_id: str


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """An attempt was begun; its trial no longer waits."""

    attempt_id: str
    trial_id: str
    device_ids: tuple[str, ...]
    priority: int
    is_resumable: bool
    at: float


@dataclass(frozen=True, slots=True)
class TrialYielding:
    """An attempt was told to yield.

    Attributes:
        for_trial_id: Who gets the devices; None binds them to nobody.
        bound_until: When the binding ends.
    """

    attempt_id: str
    for_trial_id: str | None
    bound_until: float


@dataclass(frozen=True, slots=True)
class TrialStopping:
    """An attempt was told to stop for good."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class ResumableChanged:
    """A running trial turned out to be resumable (or not)."""

    attempt_id: str
    is_resumable: bool


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A running trial would now lose less."""

    attempt_id: str
    at: float


@dataclass(frozen=True, slots=True)
class LeaseReleasing:
    """An attempt ended; its devices are not clean yet."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class LeaseClean:
    """No process of the attempt is left: its devices can be leased."""

    attempt_id: str


Event = (
    DeviceChanged
    | DeviceGone
    | TrialQueued
    | TrialGone
    | TrialStarted
    | TrialYielding
    | TrialStopping
    | ResumableChanged
    | CheckpointCommitted
    | LeaseReleasing
    | LeaseClean
)


@dataclass(frozen=True, slots=True)
class Start:
    """Begin an attempt of the trial on these devices, ordered by node and index."""

    trial_id: str
    device_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preempt:
    """Tell the attempt to yield, for the sake of another trial."""

    attempt_id: str
    trial_id: str
    for_trial_id: str


Action = Start | Preempt
