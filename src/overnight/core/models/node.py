"""What a node's daemon and supervisors exchange with the server.

The supervisor runs in the user's interpreter, perhaps without pydantic: it handles these as plain dicts, and the server
validates what arrives. Everything here is level-triggered or sequenced, so that any message may be sent twice.
"""

from typing import Any, Literal

from pydantic import Field

from overnight.core.enums import ArgsStyle, DirectiveAction
from overnight.core.models.base import Wire
from overnight.core.models.spec import Command, Objective, Resume


class OrderDevice(Wire):
    """A leased device as its node needs to know it."""

    id: str
    index: int
    kind: str


class Order(Wire):
    """Everything that a node needs to execute one attempt. Written to ``order.json`` in the attempt's folder.

    Attributes:
        attempt_id: The attempt.
        number: Attempt number, from 1.
        world_size: Ranks in all; ``ranks`` are those of this node.
        ranks: Global ranks to start here.
        cwd: The folder of the code: a snapshot's copy is made from ``code`` first when that is set.
        trial_dir: Persistent folder of the trial.
        attempt_dir: Folder of this attempt: ``order.json launch.lock pids.json spool.jsonl exit.json out.log``.
        checkpoints: fsspec URL or path of the trial's checkpoint place.
        server_file: ``server.json``, re-read to find the server's address.
        token_file: Where the bearer token is.
        grace_seconds: From a yield or stop to SIGTERM.
        max_seconds: Stop the trial after this long; None is no limit.
        hang_seconds: The least silence of all ranks that is a hang; 0 is never.
        threads: Compute threads of each rank.
        mtbf_seconds: Mean time between failures of one rank, as far as is known.
        preload: Whether a warm process may be used.
    """

    attempt_id: str
    trial_id: str
    trial_name: str
    experiment: str
    number: int
    generation: int
    node_id: str
    devices: tuple[OrderDevice, ...]
    world_size: int
    ranks: tuple[int, ...]
    run: Command
    args: ArgsStyle
    params: dict[str, Any]
    python: str | None
    cwd: str
    code: str | None
    code_links: dict[str, str]
    env: dict[str, str]
    trial_dir: str
    attempt_dir: str
    checkpoints: str
    objective: Objective | None
    resume: Resume | None
    seed: int
    mlflow_run_id: str | None
    mlflow_experiment: str
    server_file: str
    token_file: str
    grace_seconds: float = 30.0
    max_seconds: float | None = None
    hang_seconds: float = 600.0
    threads: int = 1
    mtbf_seconds: float | None = None
    preload: bool = True


class DeviceReport(Wire):
    """What the pool's probe said of a device.

    Attributes:
        fatal: A cause that quarantines at once (an Xid of the fatal list, row remap failed, lost …), else None.
        soft: A cause that adds suspicion.
    """

    index: int
    kind: str
    type: str
    memory_bytes: int
    uuid: str
    fatal: str | None = None
    soft: str | None = None
    busy: bool = False
    evidence: dict[str, Any] = Field(default_factory=dict)


class NodeHello(Wire):
    """The daemon's first call, and again after every reconnect.

    Attributes:
        attempts: Ids of the attempts whose supervisors are alive here.
        dirty: Attempt ids whose processes are not yet all gone.
    """

    name: str
    pid: int
    boot_id: str
    version: str
    devices: tuple[DeviceReport, ...]
    attempts: tuple[str, ...] = ()
    dirty: tuple[str, ...] = ()


class NodeWelcome(Wire):
    """The server's answer: the node's id and how to behave."""

    node_id: str
    heartbeat_seconds: float
    probe_seconds: float


class Work(Wire):
    """The desired state of a node. Level-triggered: the daemon compares it with what it has.

    Attributes:
        version: Ask again with ``after=version``; the answer then waits for a change.
        launches: Attempts that should run and have not been confirmed as started.
        keep: Ids of all attempts that may live here; a supervisor whose attempt is not among them stops.
        kill: Ids of attempts to kill now, without grace.
    """

    version: int
    launches: tuple[Order, ...]
    keep: tuple[str, ...]
    kill: tuple[str, ...]


class NodeReport(Wire):
    """What the daemon has to say; each item may be repeated.

    Attributes:
        devices: Newest probe results, when something changed or every ``probe_seconds``.
        ended: Attempts whose supervisor is gone and whose processes are all gone: their leases become clean.
        failed: Launches that could not be made, with the error.
    """

    counter: int
    devices: tuple[DeviceReport, ...] = ()
    ended: tuple["Ended", ...] = ()
    failed: tuple["LaunchFailed", ...] = ()


class Ended(Wire):
    """An attempt of which no process is left. ``vanished``: its supervisor died without writing ``exit.json``."""

    attempt_id: str
    vanished: bool = False
    cause: str = ""


class LaunchFailed(Wire):
    """A launch that could not be made. ``user``: the trial's fault (script missing, no such interpreter)."""

    attempt_id: str
    user: bool
    type: str
    message: str


class Directive(Wire):
    """What an attempt is told. ``version`` rises with every change; 0 is the initial ``continue``.

    Attributes:
        grace_seconds: From receipt to SIGTERM, for ``yield`` and ``stop``.
        reason: For the log and for ``why``: ``preempted``, ``pruned``, ``cancelled``, ``shutdown``, ``stale`` …
    """

    version: int = 0
    action: DirectiveAction = DirectiveAction.CONTINUE
    grace_seconds: float = 30.0
    reason: str = ""


SpoolKind = Literal[
    "started", "progress", "metrics", "report", "checkpoint", "generation", "hang", "ledger", "mlflow", "exit"
]


class SpoolEvent(Wire):
    """One fact from a supervisor's spool. ``seq`` is contiguous from 1 in an attempt.

    ``data`` by kind (all times are Unix seconds of the worker's own clock):

    - ``started``: ``pids`` {rank: pid}, ``warm`` bool
    - ``progress``: ``step``, ``phase``; at most one a second
    - ``metrics``: ``rows`` [[key, step, value, time] …]; value is a number, or the text ``nan``/``inf``/``-inf``
    - ``report``: ``step``, ``values`` {name: number or text}; the objective among them
    - ``checkpoint``: ``step``, ``uri``, ``bytes``, ``generation``
    - ``generation``: ``generation``; ``cause`` and ``pids`` when its ranks start, ``fork_step`` when it is known
      and with it ``parent``: [attempt, generation] of the checkpoint, None from scratch
    - ``hang``: ``cause``, ``stacks`` (path of a file with the stacks of every rank)
    - ``ledger``: ``seconds`` {category: seconds}, ``counts`` {name: number}
    - ``mlflow``: ``params`` {}, ``tags`` {}
    - ``exit``: ``exit_codes`` [per rank; negative is a signal; None unknown], ``left`` (``yield``, ``stop``, None:
      what the ranks said when they left on a directive), ``saved``, ``killed`` (why the supervisor killed, or None),
      ``error`` {type, message, traceback, step, rank} or None, ``last_lines``, ``seconds``, ``oom`` bool,
      ``failed_rank`` (whose failure came first, or None), ``directive`` (the one in force at the end, or None),
      ``generations`` (starts of the ranks), ``restarts`` (why they started again, oldest first).
      ``killed`` is ``grace`` (did not leave in time, or listens to no directive), ``peer_failed``, ``hung``, ``killed``
      (by the node's daemon), ``stale`` or ``spool_failed``
    """

    seq: int = Field(ge=1)
    kind: SpoolKind
    generation: int
    at: float
    data: dict[str, Any] = Field(default_factory=dict)


class SpoolPost(Wire):
    """A batch of spool events; also the heartbeat when ``events`` is empty."""

    counter: int
    generation: int
    events: tuple[SpoolEvent, ...] = ()


class SpoolAnswer(Wire):
    """``acked``: highest contiguous sequence that is durable in the store."""

    acked: int
    directive: Directive


NodeReport.model_rebuild()
