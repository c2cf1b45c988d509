"""What to run: the parts of a trial's configuration. The spec file of the README parses into these."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from overnight.core.enums import ArgsStyle, Mode, PriorityClass, RunKind
from overnight.core.models.base import Wire

Name = str
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(value: str) -> str:
    """Experiment names are path-safe by construction: letters, digits, dot, dash, underscore; no leading dot."""
    if not _NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"{value[:80]!r} is no name: use up to 100 letters, digits, '.', '_', '-'; start with a letter or digit"
        )
    return value


class Command(Wire):
    """What a trial executes.

    Attributes:
        kind: ``script`` (a Python file), ``module`` (``python -m``) or ``command`` (any program).
        target: The file relative to ``workdir``, the module's name, or the program.
        argv: Further words, before the params.
    """

    kind: RunKind
    target: str = Field(min_length=1, max_length=4096)
    argv: tuple[str, ...] = ()


class Objective(Wire):
    """What makes one trial better than another.

    Attributes:
        metric: The name under which the value is reported.
        mode: ``min`` or ``max``.
        reduce: ``best`` over the trial's life, or its ``last`` value.
        source: Where the value comes from: ``report`` (``run.report``; also any metric logged through the trainer
            or MLflow under that name), ``json`` (a JSON line on stdout) or ``pattern`` (a regular expression on
            stdout whose group 1, or group ``value``, is the number; group ``step`` is optional).
        pattern: The regular expression of ``source: pattern``.
        evaluator: A script that computes the value from a checkpoint. Not used yet.
    """

    metric: str = Field(min_length=1, max_length=250)
    mode: Mode = Mode.MIN
    reduce: Literal["best", "last"] = "best"
    source: Literal["report", "json", "pattern"] = "report"
    pattern: str | None = None
    evaluator: str | None = None

    @model_validator(mode="after")
    def _pattern_fits(self) -> "Objective":
        if (self.source == "pattern") != (self.pattern is not None):
            raise ValueError("a pattern goes with 'source: pattern', and the other way round")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"the pattern is no regular expression: {error}") from None
            if groups < 1:
                raise ValueError("the pattern needs a group around the number, e.g. 'loss=([0-9.e+-]+)'")
        return self


class Compute(Wire):
    """The devices that a trial asks for.

    Attributes:
        gpus: Devices in all: a number, or an elastic range such as ``"2-8"``. On a pool of CPU slots a slot counts.
        type: Acceptable device types, any if empty.
        nodes: Exact number of nodes; None lets the scheduler choose the fewest.
        gpus_per_node: With ``nodes``: devices on each.
        procs: Ranks in all; default one per device.
        memory: Host memory, e.g. ``"16G"``.
        max_time_seconds: The trial is stopped after this much running time; None is no limit.
        hang_seconds: A trial on the trainer whose ranks all make no progress for so long, and much longer than what
            they are at took before, hangs: its ranks start again. 0: they may take any time.
    """

    gpus: int | str = 1
    type: tuple[str, ...] = ()
    nodes: int | None = Field(default=None, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=1)
    procs: int | None = Field(default=None, ge=1)
    memory: str | None = None
    max_time_seconds: float | None = Field(default=None, gt=0)
    hang_seconds: float = Field(default=600.0, ge=0)

    @field_validator("gpus")
    @classmethod
    def _range(cls, value: int | str) -> int | str:
        low, high = _gpu_range(value)
        if not 1 <= low <= high <= 100_000:
            raise ValueError(f"gpus must be at least 1 and a range must rise, not {value!r}")
        return value

    @property
    def min_devices(self) -> int:
        """The fewest devices with which the trial can run."""
        return self.nodes * self.gpus_per_node if self.nodes and self.gpus_per_node else _gpu_range(self.gpus)[0]

    @property
    def max_devices(self) -> int:
        """The most devices that the trial can use."""
        return self.nodes * self.gpus_per_node if self.nodes and self.gpus_per_node else _gpu_range(self.gpus)[1]

    @property
    def identity(self) -> dict[str, Any]:
        """What of it changes what is computed: over how many devices and ranks. Nothing for one rank on one device.

        Which devices, on how many nodes, and the limits of memory and time do not: asking for the same work with more
        of them is no other work.
        """
        devices = [self.min_devices, self.max_devices]
        procs = None if devices == [self.procs, self.procs] else self.procs
        return {} if devices == [1, 1] and procs is None else {"devices": devices, "procs": procs}


def _gpu_range(value: int | str) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", value)
    if match is None:
        raise ValueError(f"gpus is a number or a range such as 2-8, not {value!r}")
    return int(match[1]), int(match[2] or match[1])


class Resume(Wire):
    """How a command that does not use the trainer can be pre-empted and resumed.

    Attributes:
        signal: What asks it to save and leave (``USR1`` or ``TERM``).
        exit_code: What it exits with after saving.
    """

    signal: Literal["USR1", "TERM", "INT"] = "TERM"
    exit_code: int = Field(default=75, ge=0, le=255)


class TrialConfig(Wire):
    """Everything about a trial except its params and replicate.

    Attributes:
        experiment: The experiment's name.
        run: What is executed.
        args: How params reach it.
        python: Absolute path of the interpreter for scripts and modules.
        workdir: Absolute path of the working directory, used when ``code`` is None.
        code: Hash of the code snapshot; the trial runs in a fresh copy of it.
        code_links: Absolute paths by the name under which they appear as symlinks in the snapshot's copy.
        env: Variables captured at submit.
        compute: The devices.
        objective: None if the trial has nothing to compare.
        priority: The class.
        rank: Order inside the class; higher runs first.
        resume: For commands that know nothing of the trainer but can save.
        max_retries: Infrastructure faults without progress after which the trial fails.
        seed: Base seed; None derives it from the trial's id.
        checkpoint_quota_bytes: What the whole experiment's checkpoints may have together; the newest trial's counts.
    """

    experiment: str
    run: Command
    args: ArgsStyle = ArgsStyle.FLAGS
    python: str | None = None
    workdir: str | None = None
    code: str | None = Field(default=None, pattern=r"^[0-9a-f]{32,64}$")
    code_links: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    compute: Compute = Compute()
    objective: Objective | None = None
    priority: PriorityClass = PriorityClass.NORMAL
    rank: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    resume: Resume | None = None
    max_retries: int = Field(default=3, ge=0, le=100)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    checkpoint_quota_bytes: int | None = Field(default=None, ge=1)

    _name = field_validator("experiment")(check_name)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two trials the same work: not the priority, the retries, or the environment's noise."""
        found = self.model_dump(mode="json", include={"run", "args", "code", "workdir", "objective", "seed"})
        compute = self.compute.identity
        return {**found, "compute": compute} if compute else found


class Distribution(Wire):
    """One param's search space.

    Attributes:
        kind: ``log`` and ``range`` are ``low <= x <= high`` (log-uniform, uniform), ``int`` is whole numbers, both
            ends included, ``choice`` one of ``choices``.
        step: With ``range`` and ``int``: the grid.
        when: ``"other.param == \"value\""``: the param exists only then.
    """

    kind: Literal["log", "range", "int", "choice"]
    low: float | None = None
    high: float | None = None
    step: float | None = Field(default=None, gt=0)
    choices: tuple[Any, ...] = ()
    when: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> "Distribution":
        if self.kind == "choice":
            if not self.choices:
                raise ValueError("a choice needs at least one value")
            return self
        if self.low is None or self.high is None or self.low > self.high:
            raise ValueError(f"{self.kind} needs [low, high] with low <= high, not [{self.low}, {self.high}]")
        if self.kind == "log" and self.low <= 0:
            raise ValueError(f"a log scale needs low > 0, not {self.low}")
        return self


class Prune(Wire):
    """When hopeless trials are stopped early: ``asha`` or ``median``.

    Attributes:
        min_step: First rung, in the steps that the trial reports.
        reduction: Share kept per rung is 1/reduction (asha).
    """

    kind: Literal["asha", "median"] = "asha"
    min_step: int = Field(default=1, ge=1)
    reduction: int = Field(default=3, ge=2)


class StopRules(Wire):
    """When a sweep ends by itself, beyond its number of trials."""

    consecutive_failures: int = Field(default=5, ge=1)
    gpu_hours: float | None = Field(default=None, gt=0)
    target: float | None = None


class Schedule(Wire):
    """When a sweep is started again by itself.

    Attributes:
        cron: Five fields, as crontab(5).
        tz: IANA time zone; the server's own if None.
        until: ``"HH:MM"``: no new trials after that time of day.
        overlap: What happens when the previous one still runs.
    """

    cron: str
    tz: str | None = None
    until: str | None = Field(default=None, pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    overlap: Literal["skip", "queue"] = "skip"


class SweepConfig(Wire):
    """A search inside an experiment.

    Attributes:
        planner: ``random``, ``sobol`` or ``tpe`` (later: ``grid``, ``pbt``, ``llm``, ``optuna:NAME``).
        trials: Accepted trials after which the planner stops asking.
        parallel: Trials kept queued or running at the same time.
        space: The search space by param name (dots nest).
        fixed: Params that every trial gets as they are.
    """

    planner: str = "tpe"
    trials: int = Field(default=20, ge=1, le=1_000_000)
    parallel: int = Field(default=4, ge=1, le=100_000)
    space: dict[str, Distribution] = Field(min_length=1)
    fixed: dict[str, Any] = Field(default_factory=dict)
    prune: Prune | None = None
    stop: StopRules = StopRules()
    seed: int = Field(default=0, ge=0, lt=2**63)
