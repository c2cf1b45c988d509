"""``overnight run``: a script in this terminal, without a server, by the interpreter itself: ``breakpoint()`` works."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from overnight.cli.options import command
from overnight.cli.session import session_of

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRIAL_VARIABLES = (
    "TRIAL_ID", "TRIAL_NAME", "EXPERIMENT", "ATTEMPT_ID", "ATTEMPT", "GENERATION", "TRIAL_DIR", "ATTEMPT_DIR",
    "CHECKPOINTS", "PARAMS", "OBJECTIVE", "SUPERVISOR",
)  # fmt: skip
"""``OVERNIGHT_`` variables of a scheduled trial: a run started inside one must not take itself for it."""


@command(
    "overnight run train.py --lr 3e-4             # trains here; Ctrl-C saves",
    "overnight run train.py --lr 3e-4             # again: goes on where it stopped",
    "overnight run --fresh train.py --lr 3e-4     # starts over",
    "overnight run --procs 2 train.py             # two ranks on this machine",
    raw_arguments=True,
)
def run(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A .py script.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="--NAME VALUE", help="Passed to the script.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on.")] = False,
    procs: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks, as torchrun starts them.")] = 1,
    python: Annotated[str | None, typer.Option(metavar="PATH", help="Interpreter or virtual environment.")] = None,
) -> None:
    """Train a script here and now, in this terminal; no server needed.

    Checkpoints are in ./.overnight; the same command again goes on from the newest. The script runs as it is, so
    breakpoint() and print() work as ever.
    """
    from overnight.cli import preparing

    session = session_of(ctx)
    found = find_interpreter(python)
    preparing.check_script(preparing.checked_suffix(script), found)
    line = command_line(found, script, list(words or ()), fresh=fresh, procs=procs)
    env = {name: value for name, value in session.env.items() if name not in RANK_VARIABLES}
    for name in TRIAL_VARIABLES:
        env.pop(f"OVERNIGHT_{name}", None)
    sys.stdout.flush()
    os.execve(line[0], line, env)


def find_interpreter(python: str | None) -> str:
    """The interpreter that runs the script.

    Raises:
        MissingTorchError: It is this one, and it has no torch.
    """
    from importlib.util import find_spec

    from overnight.cli import preparing
    from overnight.core.errors import MissingTorchError

    if python is None and find_spec("torch") is None:
        raise MissingTorchError(f"{sys.executable} has no torch", hint="pip install torch, or name another: --python")
    return preparing.find_python(python, Path.cwd())


def command_line(python: str, script: Path, words: list[str], *, fresh: bool, procs: int) -> list[str]:
    """The words to execute."""
    # Without the --, torchrun takes a script's --n or --r for an abbreviation of its own options.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={procs}", "--"]
    launcher = [] if procs == 1 else torchrun
    return [python, *launcher, str(script), *(["--fresh"] if fresh else []), *words]
