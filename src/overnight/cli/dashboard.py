"""The two commands with a screen of their own: ``tui`` and ``demo``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from overnight.cli.options import Output, OutputFormat, command
from overnight.cli.server import server_extra
from overnight.cli.session import session_of
from overnight.core.errors import SetupError


@command("overnight tui", "overnight --home /data/on tui")
def tui(ctx: typer.Context) -> None:
    """The dashboard: queue, devices and results, live. Quit with q."""
    session = session_of(ctx)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # without one Textual spins on the end of its input
        raise SetupError("the dashboard needs a terminal", hint="In a pipe or a job, use: overnight status")
    with server_extra("overnight tui"):
        from overnight.tui.app import run_tui
    run_tui(session.settings)


@command(
    "overnight demo                     # about two minutes, in a home of its own",
    "overnight demo -o json             # the facts, for programs",
    "overnight demo --plain             # lines instead of a live screen",
)
def demo(
    ctx: typer.Context,
    trials: Annotated[int, typer.Option(min=12, max=200, metavar="N", help="Trials of the sweep.")] = 12,
    keep: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Make the home here and keep it.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live screen.")] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """See what overnight is for: a search on four fake devices, through a fault, a pre-emption and a server kill."""
    session = session_of(ctx)
    with server_extra("overnight demo"):
        from overnight.cli.demo.command import demo_command
    raise typer.Exit(demo_command(json_output=session.json_output, home=keep, trials=trials, plain=plain))
