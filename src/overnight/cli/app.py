"""The root command: a table of commands whose modules are imported only when they are called.

``overnight --help`` needs the table alone, so it answers at once; so do shell completion and a mistyped name.
"""

import difflib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from overnight.cli.session import EXIT_CODES, Session


@dataclass(frozen=True)
class Entry:
    """Where a command lives and what ``--help`` says of it."""

    section: str
    place: str
    summary: str


RUN, LOOK, STEER, HOUSE = "Run", "Look", "Steer", "House"

COMMANDS: dict[str, Entry] = {
    "run": Entry(RUN, "overnight.cli.run:run", "Train a script here and now, in this terminal; no server needed."),
    "submit": Entry(RUN, "overnight.cli.submit:submit", "Queue a script, a spec file or a program."),
    "sweep": Entry(RUN, "overnight.cli.sweep:sweep", "Search a space: start a spec file's sweep."),
    "demo": Entry(RUN, "overnight.cli.dashboard:demo", "See what overnight is for, in two minutes."),
    "status": Entry(LOOK, "overnight.cli.status:status", "The whole house on one page."),
    "ls": Entry(LOOK, "overnight.cli.trials:ls", "List trials, newest first."),
    "show": Entry(LOOK, "overnight.cli.show:show", "Everything about one trial; a failed one says why."),
    "logs": Entry(LOOK, "overnight.cli.trials:logs", "Print or follow a trial's output."),
    "wait": Entry(LOOK, "overnight.cli.trials:wait", "Wait until trials have ended."),
    "why": Entry(LOOK, "overnight.cli.trials:why", "Why a trial is not running, and what would change that."),
    "report": Entry(LOOK, "overnight.cli.report:report", "An experiment's leaderboard, and where its results are."),
    "checkpoints": Entry(LOOK, "overnight.cli.checkpoints:app", "List, verify, compare, export or delete checkpoints."),
    "tui": Entry(LOOK, "overnight.cli.dashboard:tui", "The dashboard."),
    "cancel": Entry(STEER, "overnight.cli.steer:cancel", "Stop trials for good."),
    "rerun": Entry(STEER, "overnight.cli.steer:rerun", "Queue ended trials again."),
    "hold": Entry(STEER, "overnight.cli.steer:hold", "Keep queued trials from starting."),
    "unhold": Entry(STEER, "overnight.cli.steer:unhold", "Let held trials start."),
    "bump": Entry(STEER, "overnight.cli.steer:bump", "Move queued trials to the front of their class."),
    "up": Entry(HOUSE, "overnight.cli.server:up", "Start the server and this machine's node."),
    "down": Entry(HOUSE, "overnight.cli.server:down", "Stop them; running trials save and go back to the queue."),
    "devices": Entry(HOUSE, "overnight.cli.fleet:devices", "List, drain, quarantine or release devices."),
    "nodes": Entry(HOUSE, "overnight.cli.fleet:nodes", "List machines."),
    "doctor": Entry(HOUSE, "overnight.cli.server:doctor", "Check this installation and say how to mend it."),
    "db": Entry(HOUSE, "overnight.cli.database:app", "Upgrade, check, back up or describe the database."),
    "token": Entry(HOUSE, "overnight.cli.server:token", "Say where the access token is."),
}


class LazyGroup(TyperGroup):
    """Knows its commands by name and summary; imports the one that is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.summary, rich_markup_mode=None), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replaces the summary of the called command by the command itself."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], list(COMMANDS), n=1)
            hint = f"Did you mean '{close[0]}'?" if close else "See: overnight --help"
            ctx.fail(f"There is no command {args[0]!r}. {hint}")
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)) if name else None, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the table, a section for each purpose."""
        width = max(len(name) for name in COMMANDS)
        for section in (RUN, LOOK, STEER, HOUSE):
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(width), entry.summary) for name, entry in COMMANDS.items() if entry.section == section]
                )


def load(name: str) -> Any:
    """Imports a command."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    command = typer.main.get_command(getattr(import_module(module), attribute))
    command.name = name
    return command


EPILOG = (
    "\b\nExamples:\n"
    "  overnight run train.py --lr 3e-4      # here and now; run it again and it goes on\n"
    "  overnight up -d                       # start the server in the background\n"
    "  overnight submit train.py --lr 3e-4   # queue the same script\n"
    "  overnight sweep sweep.yaml            # search\n"
    "  overnight report digits               # what came out\n\n"
    f"\b\nExit codes:\n{EXIT_CODES}\n\n"
    "Settings come from OVERNIGHT_* variables and HOME/overnight.toml. OVERNIGHT_DEBUG=1 shows tracebacks."
)

app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from overnight import __version__

        typer.echo(f"overnight {__version__}")
        raise typer.Exit


Home = Annotated[str | None, typer.Option(metavar="FOLDER", help="Instead of OVERNIGHT_HOME or ~/.overnight.")]
Server = Annotated[str | None, typer.Option(metavar="URL", help="Instead of the home's own server.")]
Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")]


@app.callback()
def root(
    ctx: typer.Context,
    home: Home = None,
    server: Server = None,
    version: Version = False,
) -> None:
    """Runs PyTorch experiments while people sleep."""
    session: Session = ctx.obj
    session.overrides.update({name: value for name, value in (("home", home), ("server", server)) if value})


def run(argv: Sequence[str]) -> int:
    """Runs a command line; returns its exit code. Errors become one or two lines, never a traceback."""
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = io.StringIO()
    session = Session()
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name="overnight", obj=session)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        return session.fail(error)
    return 0
