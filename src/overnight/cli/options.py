"""Options and decorators that several commands share, so that they are spelled and explained alike."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer

from overnight.cli.session import Session, session_of

F = TypeVar("F", bound=Callable[..., Any])


def command(*examples: str, raw_arguments: bool = False) -> Callable[[F], typer.Typer]:
    """Makes a function a command that :mod:`overnight.cli.app` can load.

    Args:
        examples: Command lines shown below ``--help``, with a comment after ``#``.
        raw_arguments: Everything after the first argument belongs to the script, options too.
    """
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    if raw_arguments:
        settings |= {"allow_interspersed_args": False}

    def wrap(function: F) -> typer.Typer:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(epilog=epilog(*examples), context_settings=settings)(function)
        return app

    return wrap


def epilog(*examples: str) -> str:
    """Examples as they stand below ``--help``, comments aligned."""
    pairs = [line.partition("#") for line in examples]
    width = max(len(line.strip()) for line, _, _ in pairs)
    lines = [f"  {line.strip().ljust(width)}  {mark}{comment}".rstrip() for line, mark, comment in pairs]
    return "\b\nExamples:\n" + "\n".join(lines)


class OutputFormat(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


def _remember_format(ctx: typer.Context, value: OutputFormat) -> OutputFormat:
    session = ctx.find_root().obj
    if isinstance(session, Session):
        session.json_output = value is OutputFormat.JSON
    return value


Output = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", callback=_remember_format, is_eager=True, help="json gives one envelope."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and say what would happen; change nothing.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="TEXT", help="Idempotency key: the same key again gives the same answer."),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Goes on record.")]
Gpus = Annotated[str | None, typer.Option("--gpus", metavar="N", help="Devices: a number, or a range such as 2-8.")]
Priority = Annotated[str | None, typer.Option("--priority", metavar="CLASS", help="urgent, normal or exploratory.")]
Experiment = Annotated[
    str | None, typer.Option("--experiment", "-e", metavar="NAME", help="Default: the name of the script or spec.")
]


def complete_trials(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of trials for shell completion; nothing when no server answers."""
    try:
        with session_of(ctx).client() as client:
            names = [trial.name for trial in client.trials(limit=200).items]
    except Exception:  # a completion must never print
        return []
    return [name for name in names if name.startswith(incomplete)]


TrialRef = Annotated[str, typer.Argument(metavar="TRIAL", help="Name or id.", autocompletion=complete_trials)]
TrialRefs = Annotated[list[str], typer.Argument(metavar="TRIAL", help="Names or ids.", autocompletion=complete_trials)]
