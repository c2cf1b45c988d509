"""The closed vocabularies: states, classes, outcomes, roles. Values are what is stored and sent."""

from enum import StrEnum


class TrialState(StrEnum):
    """Where a trial is on its way. The edges are in :data:`overnight.core.states.TRIAL_EDGES`."""

    HELD = "held"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    YIELDING = "yielding"
    STOPPING = "stopping"
    COMPLETED = "completed"
    PRUNED = "pruned"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    PRUNED = "pruned"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    INFRA_FAULT = "infra_fault"
    VANISHED = "vanished"


class LeaseState(StrEnum):
    """An attempt's right to its devices; independent of the trial's state."""

    ACTIVE = "active"
    RELEASING = "releasing"
    CLEAN = "clean"


class DeviceState(StrEnum):
    """What the platform thinks of a device."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    PROBATION = "probation"
    DRAINING = "draining"
    BUSY = "busy"
    LOST = "lost"


class PriorityClass(StrEnum):
    """Pre-emption happens only across classes, from left to right in :data:`CLASS_ORDER`."""

    URGENT = "urgent"
    NORMAL = "normal"
    EXPLORATORY = "exploratory"


CLASS_ORDER: tuple[PriorityClass, ...] = (PriorityClass.URGENT, PriorityClass.NORMAL, PriorityClass.EXPLORATORY)


class Mode(StrEnum):
    """Whether a smaller or a larger objective is better."""

    MIN = "min"
    MAX = "max"


class ArgsStyle(StrEnum):
    """How params reach a command."""

    FLAGS = "flags"
    HYDRA = "hydra"
    JSON = "json"
    ENV = "env"
    NONE = "none"


class RunKind(StrEnum):
    """What a trial executes."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


class DirectiveAction(StrEnum):
    """What a supervisor, and through it the ranks, are told to do."""

    CONTINUE = "continue"
    CHECKPOINT = "checkpoint"
    YIELD = "yield"
    STOP = "stop"


class ProposalStatus(StrEnum):
    """What became of a proposal."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


class SweepState(StrEnum):
    """Where a sweep is."""

    ACTIVE = "active"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    BROKEN = "broken"


class Role(StrEnum):
    """What a token may do."""

    VIEWER = "viewer"
    AGENT = "agent"
    OPERATOR = "operator"
    NODE = "node"
