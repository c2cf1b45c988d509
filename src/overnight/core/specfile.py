"""The spec file: what a person writes, turned into what the API takes. Text in, models out; no I/O.

The classes :class:`SpecFile`, :class:`CodeBlock`, :class:`ComputeBlock` and :class:`SweepBlock` are the file's surface:
they validate it, name what is wrong, and publish its JSON schema. :func:`parse` gives a :class:`Spec`, whose parts are
those of :mod:`overnight.core.models.spec`. The guide is docs/guides/spec.md.
"""

import difflib
import re
import shlex
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from overnight.core import spectext
from overnight.core.canonical import canonical
from overnight.core.enums import ArgsStyle, PriorityClass, RunKind
from overnight.core.errors import InvalidParamsError, InvalidSpecError
from overnight.core.models.spec import (
    Command,
    Compute,
    Objective,
    Resume,
    Schedule,
    StopRules,
    SweepConfig,
    TrialConfig,
    check_name,
)
from overnight.core.searchspace import parse_prune, parse_space
from overnight.core.sizes import parse_bytes
from overnight.core.spectext import Document, Misplaced, Path

MAX_EXTENDS = 10

M = TypeVar("M", bound=BaseModel)
Load = Callable[[str, str], tuple[str, str]]
"""Reads a file named in ``extends``: (what is written there, name of the file it stands in) -> (text, name)."""


def parse_duration(value: Any) -> Any:
    """Seconds from ``90``, ``"90s"``, ``"30m"``, ``"6h"``, ``"1d12h"``.

    Raises:
        ValueError: Anything else.
    """
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", str(value).replace(" ", ""))
    if match is None or not any(match.groups()):
        raise ValueError(f"{value!r} is no duration: write 90s, 30m, 6h or 1d12h")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _words(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    lexer = shlex.shlex(value, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"{value!r} cannot be split into words: {error}") from None
    if shell := next((word for word in words if re.fullmatch(r"[|&;<>()]+", word)), None):
        raise ValueError(f"{shell!r} needs a shell, and none is used: write [bash, -c, {value!r}]")
    return words


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Words = Annotated[tuple[str, ...], BeforeValidator(_words), WithJsonSchema(_TEXT_OR_LIST)]
Listed = Annotated[tuple[str, ...], BeforeValidator(_listed), WithJsonSchema(_TEXT_OR_LIST)]
Duration = Annotated[
    float | None,
    BeforeValidator(parse_duration),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "examples": ["90s", "30m", "6h", "1d12h"]}]}),
]


def _bytes(value: Any) -> Any:
    return parse_bytes(str(value)) if isinstance(value, str | bool) else value


Bytes = Annotated[
    int | None,
    BeforeValidator(_bytes),
    Field(ge=1),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "examples": ["50GB", "1.5TiB", "200MB"]}]}),
]


def _variables(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item if item is None else _variable(key, item) for key, item in value.items()}


def _variable(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not key or "=" in key or "\0" in key:
        raise ValueError(f"{key}: {value!r} cannot be a variable: write text in quotes, or null to inherit it")
    return str(value)


Variables = Annotated[
    dict[str, str | None],
    BeforeValidator(_variables),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}}),
]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CodeBlock(_Block):
    """What is snapshotted at submit.

    Attributes:
        include: Patterns below the spec's folder: ``*.py`` fits at any depth, ``conf/`` a whole folder.
        link: Files and folders that are not copied but linked into each run's copy, such as data.
    """

    include: Listed = ()
    link: Listed = ()


class ComputeBlock(_Block):
    """The devices that a trial asks for; see :class:`overnight.core.models.spec.Compute`."""

    gpus: int | str = 1
    type: Listed = ()
    nodes: int | None = None
    gpus_per_node: int | None = None
    procs: int | None = None
    memory: str | None = None
    max_time: Duration = None
    hang: Duration = None


class CheckpointsBlock(_Block):
    """Bounds for checkpoints.

    Attributes:
        quota: What those of the whole experiment may have together: ``50GB``.
    """

    quota: Bytes = None


class SweepBlock(_Block):
    """A search. ``params`` are in the notation of :mod:`overnight.core.searchspace`."""

    planner: str = "tpe"
    trials: int = 20
    parallel: int = 4
    params: dict[str, Any] = Field(min_length=1)
    prune: Any = None
    stop: StopRules = StopRules()
    seed: int = 0


class SpecFile(_Block):
    """The keys of a spec file.

    Attributes:
        extends: Another spec that this one completes: mappings are merged, everything else is replaced.
        run, script, module: What is executed; exactly one of them.
        python: The interpreter or a virtual environment's folder; default: the one that submits.
        env: Variables of the trial; a null takes the value of the submitting shell.
    """

    extends: str | None = None
    experiment: Annotated[str, AfterValidator(check_name)]
    note: str = Field(default="", max_length=10_000)
    run: Words = ()
    script: Words = ()
    module: Words = ()
    args: ArgsStyle = ArgsStyle.FLAGS
    python: str | None = None
    code: CodeBlock = CodeBlock()
    compute: ComputeBlock = ComputeBlock()
    checkpoints: CheckpointsBlock = CheckpointsBlock()
    objective: Objective | None = None
    priority: PriorityClass = PriorityClass.NORMAL
    rank: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    resume: Resume | None = None
    max_retries: int = Field(default=3, ge=0, le=100)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    replicates: int = Field(default=1, ge=1, le=1_000)
    env: Variables = Field(default_factory=dict)
    params: dict[str, Any] = Field(default_factory=dict)
    sweep: SweepBlock | None = None
    schedule: Schedule | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("run", "script", "module") if getattr(self, name)]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ValueError(f"write exactly one of run, script, module (got {got}), e.g. 'run: python train.py'")
        if self.schedule is not None and self.sweep is None:
            raise ValueError("a schedule starts a sweep again and again: add a 'sweep:' block")
        return self


@dataclass(frozen=True)
class Spec:
    """A parsed spec file: the parts of a trial's configuration that do not depend on the machine.

    Attributes:
        python: As written: a path, relative to the spec's folder, or None.
        include, links: Of the code snapshot; empty means the default.
        inherit_env: Names of variables to take from the submitting shell.
        sweep: None if the spec is of single trials.
    """

    experiment: str
    run: Command
    args: ArgsStyle
    python: str | None
    include: tuple[str, ...]
    links: tuple[str, ...]
    compute: Compute
    objective: Objective | None
    priority: PriorityClass
    rank: int
    resume: Resume | None
    max_retries: int
    seed: int | None
    replicates: int
    env: dict[str, str]
    inherit_env: tuple[str, ...]
    params: dict[str, Any]
    sweep: SweepConfig | None
    schedule: Schedule | None
    note: str
    checkpoint_quota_bytes: int | None = None

    def config(
        self,
        *,
        python: str | None = None,
        workdir: str | None = None,
        code: str | None = None,
        code_links: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
    ) -> TrialConfig:
        """The trial's configuration with what only the submitting machine knows.

        Raises:
            InvalidSpecError: A part does not validate.
        """
        own = ("experiment", "run", "args", "compute", "objective", "priority", "rank", "resume", "max_retries", "seed",
               "checkpoint_quota_bytes")  # fmt: skip
        data = {name: getattr(self, name) for name in own}
        rest = {"python": python, "workdir": workdir, "code": code, "code_links": code_links or {}}
        return validate(TrialConfig, data | rest | {"env": (env or {}) | self.env}, Document({}, "the spec"))


def parse(text: str, *, name: str = "spec.yaml", load: Load | None = None, experiment: str | None = None) -> Spec:
    """Reads a spec.

    Args:
        text: The file's text.
        name: The file's name, for messages; ``.toml`` is read as TOML, all else as YAML.
        load: Reads a file that ``extends`` names; without it ``extends`` is refused.
        experiment: The experiment's name when the file has none.

    Raises:
        InvalidSpecError: Something is wrong; the message says ``file:line`` (TOML: the key), the hint what to write.
    """
    document = _extended(spectext.parse(text, name), load, ())
    if experiment is not None:
        document.data.setdefault("experiment", experiment)
    surface = validate(SpecFile, document.data, document)
    try:
        params = _canonical(surface.params, ("params",))
        sweep = _sweep_config(surface.sweep, params, document) if surface.sweep else None
    except Misplaced as error:
        raise _error(document, error.path, error.message, error.hint) from None
    return Spec(
        experiment=surface.experiment,
        run=_command(surface),
        args=surface.args,
        python=surface.python,
        include=surface.code.include,
        links=surface.code.link,
        compute=_compute(surface.compute, document),
        checkpoint_quota_bytes=surface.checkpoints.quota,
        objective=surface.objective,
        priority=surface.priority,
        rank=surface.rank,
        resume=surface.resume,
        max_retries=surface.max_retries,
        seed=surface.seed,
        replicates=surface.replicates,
        env={key: value for key, value in surface.env.items() if value is not None},
        inherit_env=tuple(key for key, value in surface.env.items() if value is None),
        params=params,
        sweep=sweep,
        schedule=surface.schedule,
        note=surface.note,
    )


def json_schema() -> dict[str, Any]:
    """The JSON schema of a spec file, for editors (``yaml-language-server``) and programs."""
    schema = SpecFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "overnight spec"}


def _extended(document: Document, load: Load | None, seen: tuple[str, ...]) -> Document:
    base_name = document.data.get("extends")
    if base_name is None:
        return document
    path: Path = ("extends",)
    if not isinstance(base_name, str) or load is None:
        raise _error(document, path, f"extends names one file, not {base_name!r}", "Write: extends: base.yaml")
    text, name = load(base_name, document.name)
    if name in seen or name == document.name or len(seen) >= MAX_EXTENDS:
        raise _error(document, path, f"{base_name} extends itself, or too many files", "Break the circle.")
    base = _extended(spectext.parse(text, name), load, (*seen, document.name))
    own = {key: value for key, value in document.data.items() if key != "extends"}
    if {"run", "script", "module"} & own.keys():
        inherited = {key: value for key, value in base.data.items() if key not in ("run", "script", "module")}
    else:
        inherited = base.data
    return Document(_merged(inherited, own), document.name, base.places | document.places)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _canonical(params: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        result = canonical(params)
    except InvalidParamsError as error:
        raise Misplaced(path, error.message, error.hint) from None
    assert isinstance(result, dict)
    return result


def _sweep_config(block: SweepBlock, params: dict[str, Any], document: Document) -> SweepConfig:
    space, fixed = parse_space(block.params, ("sweep", "params"))
    own = {name: getattr(block, name) for name in ("planner", "trials", "parallel", "stop", "seed")}
    kept = {key: value for key, value in params.items() if key not in space}
    prune = parse_prune(block.prune, ("sweep", "prune"))
    data = own | {"space": space, "fixed": kept | _canonical(fixed, ("sweep", "params")), "prune": prune}
    return validate(SweepConfig, data, document, ("sweep",))


def _compute(block: ComputeBlock, document: Document) -> Compute:
    data = block.model_dump(exclude={"max_time", "hang"}) | {"max_time_seconds": block.max_time}
    if block.hang is not None:
        data["hang_seconds"] = block.hang
    if (block.nodes is None) != (block.gpus_per_node is None):
        raise _error(document, ("compute",), "nodes and gpus_per_node go together", "Write both, or gpus alone.")
    return validate(Compute, data, document, ("compute",))


_PYTHON = re.compile(r"python[0-9.]*")


def _command(surface: SpecFile) -> Command:
    if surface.script:
        return Command(kind=RunKind.SCRIPT, target=surface.script[0], argv=surface.script[1:])
    if surface.module:
        return Command(kind=RunKind.MODULE, target=surface.module[0], argv=surface.module[1:])
    return command_of(surface.run)


def command_of(words: Sequence[str]) -> Command:
    """What the words of a command line run: ``python x.py`` a script, ``python -m x`` a module, all else a program."""
    program, *rest = words
    if _PYTHON.fullmatch(PurePosixPath(program).name) and "/" not in program and rest:
        if rest[0] == "-m" and len(rest) > 1:
            return Command(kind=RunKind.MODULE, target=rest[1], argv=tuple(rest[2:]))
        if rest[0].endswith(".py"):
            return Command(kind=RunKind.SCRIPT, target=rest[0], argv=tuple(rest[1:]))
    return Command(kind=RunKind.COMMAND, target=program, argv=tuple(rest))


def validate(model: type[M], data: dict[str, Any], document: Document, prefix: Path = ()) -> M:
    """Builds a model; what does not fit is named by place, key and remedy.

    Raises:
        InvalidSpecError: The first error of pydantic, translated.
    """
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        first = min(errors.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
        loc = tuple(part for part in first["loc"] if part in ("params",) or not str(part).startswith("function-"))
        path = (*prefix, *loc)
        if first["type"] == "extra_forbidden":
            known = _keys_at(model, loc[:-1])
            message = f"there is no key {str(loc[-1])!r}{' in ' + _dotted(path[:-1]) if path[:-1] else ''}"
            raise _error(document, path, message, _nearest(str(loc[-1]), known)) from None
        raise _error(document, path, _explain(first, path), _expected(first)) from None


def _error(document: Document, path: Path, message: str, hint: str = "") -> InvalidSpecError:
    place, dotted = document.place(path), _dotted(path)
    shown = (
        message if not dotted or dotted in message or message.startswith("there is no key") else f"{dotted}: {message}"
    )
    return InvalidSpecError(f"{place}: {shown}", hint=hint, key=dotted)


def _dotted(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")[:200]


_PLAIN = {
    "tuple_type": "should be text or a list",
    "dict_type": "should be a mapping",
    "model_type": "should be a mapping",
    "model_attributes_type": "should be a mapping",
    "too_short": "should not be empty",
}


def _explain(error: Any, path: Path) -> str:
    if error["type"] == "missing":
        return f"{_dotted(path)} is missing"
    message = _PLAIN.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    plain = given is None or isinstance(given, (str, int, float, bool))
    return f"{message} (got {str(given)[:60]!r})" if plain and error["type"] != "value_error" else message


def _expected(error: Any) -> str:
    if error["type"] == "enum":
        choices = [word.strip(" '") for word in re.split(r", | or ", str(error["ctx"]["expected"]))]
        return _nearest(str(error["input"]), choices)
    if error["type"] == "missing":
        return f"Add a line '{error['loc'][-1]}: ...'."
    return ""


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(sorted(known))}."


def _keys_at(model: type[BaseModel], loc: Path) -> list[str]:
    current: type[BaseModel] | None = model
    for part in loc:
        field = current.model_fields.get(str(part)) if current is not None else None
        current = _model_in(field.annotation) if field is not None else None
    return list(current.model_fields) if current is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return next((found for arg in typing.get_args(annotation) if (found := _model_in(arg))), None)
    return None
