"""From an order to what is executed: the interpreter, the arguments, the environment. No shell anywhere.

Standard library only: runs in the user's interpreter too. An order is the JSON object of ``order.json``.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_HYDRA_BARE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_HYDRA_WORDS = {"true", "false", "null", "nan", "inf"}

PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "HOSTNAME")
PASSED_ON_PREFIXES = ("LC_", "LD_", "NVIDIA_", "CUDA_", "NCCL_", "GLOO_", "XDG_", "SSL_", "REQUESTS_CA")
IMPORT_TIME_PREFIXES = (
    "PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS", "MALLOC", "GLIBC", "TORCH", "PYTORCH", "LC_", "TZ", "LANG", "KMP_",
)  # fmt: skip
"""Variables that libraries read while they load: a warm process can serve only orders that agree on them."""


@dataclass(frozen=True)
class Plan:
    """What to execute.

    Attributes:
        kind: ``script``, ``module`` or ``command``.
        python: Interpreter of scripts and modules.
        target: Script path as typed, module name, or program.
        argv: Every further word, params included.
    """

    kind: str
    python: str | None
    target: str
    argv: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The command line of a cold start."""
        if self.kind == "command" or self.python is None:
            return [self.target, *self.argv]
        flag = ["-m"] if self.kind == "module" else []
        return [self.python, *flag, self.target, *self.argv]


def plan(order: Mapping[str, Any], default_python: str) -> Plan:
    """Resolves an order's command. ``python x.py …`` and ``python -m x …`` are recognised as what they are."""
    run = order["run"]
    kind, target, argv = run["kind"], run["target"], list(run["argv"])
    python = order.get("python") or default_python
    if kind == "command" and _PYTHON.fullmatch(Path(target).name):
        words = argv[1:] if argv[:1] == ["-u"] else argv
        named = _interpreter(target, order, python)
        if words and words[0].endswith(".py"):
            kind, target, argv, python = "script", words[0], words[1:], named
        elif len(words) > 1 and words[0] == "-m":
            kind, target, argv, python = "module", words[1], words[2:], named
    if same_interpreter(python, default_python):
        python = default_python
    return Plan(kind, python, target, (*argv, *param_words(order["args"], order["params"])))


def _interpreter(target: str, order: Mapping[str, Any], python: str) -> str:
    if "/" in target:
        return str(Path(order["cwd"], target))
    if order.get("python"):
        return python
    return shutil.which(target, path=order["env"].get("PATH", os.environ.get("PATH"))) or python


def same_interpreter(one: str, other: str) -> bool:
    """Whether two paths start the same Python in the same environment (``bin/python`` and ``bin/python3`` of a
    venv)."""
    return os.path.realpath(one) == os.path.realpath(other) and (
        os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other))  # noqa: PTH120
    )


def flatten(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names; an empty mapping stays a value."""
    for key, value in params.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def param_words(style: str, params: Mapping[str, Any]) -> list[str]:
    """The params as words of a command line.

    Args:
        style: ``flags`` (``--lr 0.001``, ``--amp`` for true, ``--no-amp`` for false), ``hydra`` (``lr=0.001``),
            ``json`` (one word), ``env`` or ``none`` (no word).
        params: JSON values.
    """
    if style == "json":
        return [json.dumps(params, ensure_ascii=False)]
    if style == "hydra":
        return [f"{name}={_hydra(value)}" for name, value in flatten(params)]
    if style != "flags":
        return []
    words: list[str] = []
    for name, value in flatten(params):
        if isinstance(value, bool):  # as argparse.BooleanOptionalAction, click and typer read it
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        text = as_text(value)
        # A text that starts with a dash would be taken for an option of its own.
        words += [f"--{name}={text}"] if isinstance(value, str) and text.startswith("-") else [f"--{name}", text]
    return words


def param_env(params: Mapping[str, Any]) -> dict[str, str]:
    """The params as ``OVERNIGHT_PARAM_<NAME>`` for ``args: env``: upper case, anything odd an underscore."""
    return {
        "OVERNIGHT_PARAM_" + re.sub(r"[^A-Za-z0-9]", "_", name).upper(): as_text(value).replace("\0", "")
        for name, value in flatten(params)
    }


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hydra(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if _HYDRA_BARE.fullmatch(value) and value.lower() not in _HYDRA_WORDS:
        return value
    # https://hydra.cc/docs/advanced/override_grammar/basic/#quoted-values: only quotes, and backslashes before them.
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", value)) + "'"


def base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The few variables of the node itself that a trial gets; everything else was captured at submit."""
    return {
        name: value
        for name, value in environ.items()
        if name in PASSED_ON or (name.startswith(PASSED_ON_PREFIXES) and name != "CUDA_VISIBLE_DEVICES")
    }


def import_time_env(order_env: Mapping[str, str]) -> dict[str, str]:
    """The part of a trial's environment that is read while libraries load, with a fixed hash seed."""
    chosen = {name: value for name, value in order_env.items() if name.startswith(IMPORT_TIME_PREFIXES)}
    chosen.setdefault("PYTHONHASHSEED", "0")
    chosen.pop("OMP_NUM_THREADS", None)  # set in each rank, after the fork
    return chosen


def rank_env(
    order: Mapping[str, Any], environ: Mapping[str, str], *, rank: int, local_rank: int, places: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of a rank: the node's few, the captured ones, the defaults, then what overnight says.

    Args:
        order: The order.
        environ: The supervisor's environment.
        rank: Global rank.
        local_rank: Rank on this node.
        places: ``supervisor`` (socket), ``mlflow_uri``, ``mlflow_token``, ``mlflow_run_id``, ``master_port``,
            ``imports`` (a folder for ``PYTHONPATH``, or empty).
    """
    threads = str(order["threads"])
    env = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "PYTHONHASHSEED": "0",
        **{f"{name}_NUM_THREADS": threads for name in ("OMP", "MKL", "OPENBLAS")},
        **base_env(environ),
        **order["env"],
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if places["imports"]:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [places["imports"], env.get("PYTHONPATH")]))
    if order["args"] == "env":
        env |= param_env(order["params"])
    return env | _identity_env(order) | _distributed_env(order, rank, local_rank, places) | _mlflow_env(order, places)


def rank_order(order: Mapping[str, Any], plan: Plan, env: Mapping[str, str], *, log: str, warm: bool) -> dict[str, Any]:
    """What a rank is told; see :func:`overnight.platform.node.rank.become`."""
    return {
        "attempt_id": order["attempt_id"],
        "log": log,
        "cwd": order["cwd"],
        "env": env,
        "words": plan.words,
        "warm": warm,
        "kind": plan.kind,
        "target": plan.target,
        "argv": plan.argv,
        "threads": order["threads"],
    }


def _identity_env(order: Mapping[str, Any]) -> dict[str, str]:
    def compact(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    env = {
        "OVERNIGHT_TRIAL_ID": order["trial_id"],
        "OVERNIGHT_TRIAL_NAME": order["trial_name"],
        "OVERNIGHT_EXPERIMENT": order["experiment"],
        "OVERNIGHT_ATTEMPT_ID": order["attempt_id"],
        "OVERNIGHT_ATTEMPT": str(order["number"]),
        "OVERNIGHT_GENERATION": str(order["generation"]),
        "OVERNIGHT_TRIAL_DIR": order["trial_dir"],
        "OVERNIGHT_ATTEMPT_DIR": order["attempt_dir"],
        "OVERNIGHT_CHECKPOINTS": order["checkpoints"],
        "OVERNIGHT_PARAMS": compact(order["params"]),
        "OVERNIGHT_SEED": str(order["seed"]),
    }
    if order.get("objective"):
        env["OVERNIGHT_OBJECTIVE"] = compact(order["objective"])
    if order.get("mtbf_seconds"):
        env["OVERNIGHT_MTBF_SECONDS"] = f"{order['mtbf_seconds']:.0f}"
    return env


def _distributed_env(order: Mapping[str, Any], rank: int, local_rank: int, places: Mapping[str, str]) -> dict[str, str]:
    gpus = [str(device["index"]) for device in order["devices"] if device["kind"] == "gpu"]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(order["world_size"]),
        "LOCAL_WORLD_SIZE": str(len(order["ranks"])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": places["master_port"],
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }


def _mlflow_env(order: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, str]:
    return {
        "OVERNIGHT_SUPERVISOR": places["supervisor"],
        "MLFLOW_TRACKING_URI": places["mlflow_uri"],
        "MLFLOW_TRACKING_TOKEN": places["mlflow_token"],
        "MLFLOW_RUN_ID": places["mlflow_run_id"],
        "MLFLOW_EXPERIMENT_NAME": order["mlflow_experiment"],
    }
