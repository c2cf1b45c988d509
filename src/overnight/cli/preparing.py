"""From what lies on this machine to what the server takes: script checked, code snapshotted, environment captured."""

import difflib
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overnight.agents import snapshot
from overnight.agents.snapshot import Snapshot
from overnight.cli import flags
from overnight.core import specfile
from overnight.core.enums import ArgsStyle, PriorityClass, RunKind
from overnight.core.errors import InvalidSpecError, ScriptError
from overnight.core.inherited import inherited
from overnight.core.models.spec import Command, Compute, Objective, TrialConfig
from overnight.core.settings import Settings
from overnight.core.specfile import Spec
from overnight.core.spectext import Document

SPEC_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True)
class Overrides:
    """What the command line says beyond the script or spec."""

    experiment: str | None = None
    gpus: str | None = None
    priority: str | None = None
    python: str | None = None
    args: ArgsStyle | None = None
    objective: str | None = None
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Prepared:
    """Ready to be sent."""

    spec: Spec
    config: TrialConfig
    params: dict[str, Any]
    snapshot: Snapshot


def is_spec(target: Path) -> bool:
    """Whether a file is a spec and no script, by its suffix."""
    return target.suffix.lower() in SPEC_SUFFIXES


def read_spec(path: Path) -> Spec:
    """Reads a spec file and what it extends.

    Raises:
        InvalidSpecError: It is missing or wrong.
    """

    def load(name: str, referrer: str) -> tuple[str, str]:
        base = Path(referrer).parent / name
        return _text(base), str(base)

    return specfile.parse(_text(path), name=str(path), load=load, experiment=_experiment_name(path))


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise InvalidSpecError(f"{path} is no regular file", hint="Name a spec file.")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidSpecError(f"there is no file {path}", hint=_similar(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpecError(
            f"{path} cannot be read: {error}", hint="A spec is UTF-8 text that you may read."
        ) from None


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f"There is no folder {path.parent}."
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {path.parent / close[0]}?" if close else "Check the path."


def _experiment_name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.")[:100].replace("..", ".")
    return name or "experiment"


def script_spec(path: Path) -> Spec:
    """The spec that a bare script stands for."""
    return _bare_spec(_experiment_name(path), Command(kind=RunKind.SCRIPT, target=path.name))


def program_spec(target: Path, words: Sequence[str]) -> tuple[Spec, Path]:
    """The spec that any other command line stands for, and the folder in which it runs.

    Args:
        target: An executable file, or the name of a program on the PATH, which runs in the working directory.
        words: Its arguments, which are passed on as they are.

    Raises:
        ScriptError: There is no such program, or it is not executable.
    """
    if target.is_file():
        if not os.access(target, os.X_OK):
            raise ScriptError(
                f"{target} is neither a Python script (.py) nor a spec ({' '.join(SPEC_SUFFIXES)}) nor executable",
                hint=f"If it is a program: chmod +x {target}",
            )
        run, root = specfile.command_of((f"./{target.name}", *words)), target.absolute().parent
    elif target.exists():
        raise ScriptError(f"{target} is no file", hint="Name a script, a spec or a program.")
    elif "/" in str(target) or shutil.which(target) is None:
        raise ScriptError(f"there is no file {target}", hint=_similar(target))
    else:
        run, root = specfile.command_of((str(target), *words)), Path.cwd()
    return _bare_spec(_experiment_name(Path(run.target)), run), root


def _bare_spec(experiment: str, run: Command) -> Spec:
    return Spec(
        experiment=experiment,
        run=run,
        args=ArgsStyle.FLAGS,
        python=None,
        include=(),
        links=(),
        compute=Compute(),
        objective=None,
        priority=PriorityClass.NORMAL,
        rank=0,
        resume=None,
        max_retries=3,
        seed=None,
        replicates=1,
        env={},
        inherit_env=(),
        params={},
        sweep=None,
        schedule=None,
        note="",
    )


def prepare(
    target: Path,
    words: Sequence[str],
    overrides: Overrides,
    settings: Settings,
    env: Mapping[str, str],
    reserved: Sequence[str] = (),
) -> Prepared:
    """Everything of a submit up to the first byte sent.

    Args:
        target: A script, a spec file or a program.
        words: What stands behind it on the command line.
        overrides: Options of the command line.
        settings: For the cache of snapshots.
        env: The submitting shell's variables.
        reserved: Options of the command, which must not stand behind the target.

    Raises:
        BadInputError: Something is wrong with script, spec, params or code; nothing was sent.
    """
    spec, root, parsed = _read(target, words, overrides, reserved)
    run = spec.run.model_copy(update={"argv": (*spec.run.argv, *parsed.argv)})
    spec = replace(spec, run=run)
    python = find_python(overrides.python or spec.python, Path.cwd() if overrides.python else root)
    required = _check_run(run, root, python)
    taken = snapshot.take(
        root,
        include=spec.include,
        links=spec.links,
        required=required,
        without=settings.home,
        cache=settings.home / "cache" / "snapshots",
    )
    config = spec.config(
        python=python, workdir=str(root), code=taken.digest, code_links=taken.links, env=_captured(spec, env, taken)
    )
    return Prepared(spec, config, {**spec.params, **(overrides.params or {}), **parsed.params}, taken)


def checked_suffix(path: Path) -> Path:
    """The path of a script.

    Raises:
        ScriptError: It does not exist or is no Python file.
    """
    if not path.exists():
        raise ScriptError(f"there is no file {path}", hint=_similar(path))
    if path.suffix != ".py":
        raise ScriptError(f"{path} is no Python script (.py)", hint=f"Queue it: overnight submit {path}")
    return path


def _read(
    target: Path, words: Sequence[str], overrides: Overrides, reserved: Sequence[str]
) -> tuple[Spec, Path, flags.Words]:
    """The spec that the target is or stands for, the folder in which it runs, and what the words behind it mean."""
    if not is_spec(target) and target.suffix != ".py":
        spec, root = program_spec(target, words)
        return _overridden(spec, overrides), root, flags.Words((), {})
    spec = _overridden(read_spec(target) if is_spec(target) else script_spec(checked_suffix(target)), overrides)
    return spec, target.absolute().parent, flags.parse_words(words, spec.args, reserved)


def _objective(text: str | None, known: Objective | None) -> dict[str, Any] | None:
    """``val_loss`` or ``val_accuracy:max``; the rest of what a spec says about it stays."""
    if text is None:
        return None
    metric, mode = re.fullmatch(r"(.*?)(?::(min|max))?", text, re.DOTALL).groups()  # type: ignore[union-attr]  # fits all
    return (known.model_dump() if known else {}) | {"metric": metric} | ({"mode": mode} if mode else {})


def _overridden(spec: Spec, overrides: Overrides) -> Spec:
    changes = {
        "experiment": overrides.experiment,
        "priority": overrides.priority,
        "args": overrides.args,
        "objective": _objective(overrides.objective, spec.objective),
    }
    data = {key: value for key, value in changes.items() if value is not None}
    document = Document({}, "the command line")
    checked = specfile.validate(TrialConfig, {"experiment": spec.experiment, "run": spec.run, **data}, document)
    spec = replace(spec, **{key: getattr(checked, key) for key in data})
    if overrides.gpus is None:
        return spec
    gpus = int(overrides.gpus) if overrides.gpus.strip().isdigit() else overrides.gpus
    compute = spec.compute.model_dump() | {"gpus": gpus, "nodes": None, "gpus_per_node": None}
    return replace(spec, compute=specfile.validate(Compute, compute, document))


def find_python(written: str | None, root: Path) -> str:
    """The interpreter of the trial: a path, a virtual environment's folder, or this one.

    Raises:
        InvalidSpecError: There is no interpreter.
    """
    if written is None:
        return sys.executable
    path = root / Path(written).expanduser()
    found = path / "bin" / "python" if path.is_dir() else path
    if not found.is_file() or not os.access(found, os.X_OK):
        raise InvalidSpecError(
            f"python: there is no interpreter at {found}",
            hint="Name a virtual environment's folder, or an interpreter.",
        )
    return str(found.absolute())


def _check_run(run: Command, root: Path, python: str) -> tuple[str, ...]:
    """Files that must be in the snapshot."""
    if run.kind is RunKind.SCRIPT:
        check_script(root / run.target, python)
        return (run.target,)
    if run.kind is RunKind.COMMAND and "/" in run.target and not run.target.startswith("/"):
        if not (root / run.target).is_file():
            raise ScriptError(f"run: there is no file {root / run.target}", hint=_similar(root / run.target))
        return (run.target.removeprefix("./"),)
    return ()


def check_script(path: Path, python: str | None = None) -> None:
    """Compiles a script without running it.

    Args:
        path: The script.
        python: The interpreter that will run it, which may know another syntax.

    Raises:
        ScriptError: It is missing, cannot be read, or does not parse; the message shows the line.
    """
    if not path.is_file():
        raise ScriptError(f"there is no file {path}", hint=_similar(path))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{path} cannot be read: {error.strerror}", hint="Check its owner and mode.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        if python and not Path(python).samefile(sys.executable) and _compiles_elsewhere(path, python):
            return
        raise ScriptError(_syntax_message(path, error), hint="Correct it and submit again.") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(f"{path} does not parse: {error}", hint="Correct it and submit again.") from None


def _compiles_elsewhere(path: Path, python: str) -> bool:
    code = "import sys; compile(open(sys.argv[1], 'rb').read(), sys.argv[1], 'exec')"
    try:
        return subprocess.run([python, "-I", "-c", code, str(path)], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _syntax_message(path: Path, error: SyntaxError) -> str:
    place = f"{path}:{error.lineno}" if error.lineno else str(path)
    message = f"{place}: {error.msg}"
    if error.text and error.text.strip():
        text = error.text.rstrip("\n")[:200]
        caret = " " * (max(1, error.offset or 1) - 1) + "^"
        message += f"\n    {text}\n    {caret}"
    return message


def _captured(spec: Spec, env: Mapping[str, str], taken: Snapshot) -> dict[str, str]:
    captured = inherited(env)
    for name in spec.inherit_env:
        if name not in env:
            raise InvalidSpecError(
                f"env.{name} is to be inherited, but this shell has no {name}", hint=f"export {name}="
            )
        captured[name] = env[name]
    if taken.git is not None:
        captured["OVERNIGHT_GIT_COMMIT"] = taken.git.commit + ("+dirty" if taken.git.dirty else "")
    return captured
