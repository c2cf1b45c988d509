"""Looking at trials: ``ls``, ``logs``, ``wait``, ``why``."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from overnight.cli.options import Output, OutputFormat, TrialRef, TrialRefs, command
from overnight.cli.session import FAILED, TIME_UP, Session, session_of

if TYPE_CHECKING:
    from overnight.core.enums import TrialState
    from overnight.core.models.api import LogChunk

Of = Annotated[str | None, typer.Option("--experiment", "-e", metavar="NAME", help="Only of this experiment.")]


@command(
    "overnight ls                            # the newest 50",
    "overnight ls -e digits --state running",
    "overnight ls --queue                    # in the order in which they would start",
    "overnight ls -o json --all | jq '.data[].name'",
)
def ls(
    ctx: typer.Context,
    experiment: Annotated[
        str | None, typer.Option("--experiment", "-e", metavar="NAME", help="Only of this one.")
    ] = None,
    sweep: Annotated[str | None, typer.Option(metavar="ID", help="Only of this sweep.")] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", metavar="STATE", help="Only in these; may come several times.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many.")] = 50,
    everything: Annotated[bool, typer.Option("--all", "-a", help="No limit.")] = False,
    queue: Annotated[bool, typer.Option("--queue", "-q", help="Queued trials, first to start first.")] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """List trials, newest first."""
    from overnight.core.enums import TrialState

    session = session_of(ctx)
    states = [_state(name, list(TrialState)) for name in state or ()]
    with session.client() as client:
        if queue:
            found, more = client.queue(limit=limit).items, False
        elif everything:
            found, more = tuple(client.all_trials(experiment=experiment, sweep=sweep, state=states)), False
        else:
            page = client.trials(experiment=experiment, sweep=sweep, state=states, limit=limit)
            found, more = page.items, page.cursor is not None
    if session.json_output:
        session.emit(found)
        return
    from overnight.cli import render

    if not found:
        session.note("no trials" if not (experiment or sweep or states or queue) else "no trials that fit")
        return
    session.console.print(render.trials(found, positions=queue))
    if more:
        session.note(f"and more: overnight ls --all, or -n {limit * 4}")


def _state(name: str, known: list[str]) -> "TrialState":
    from difflib import get_close_matches

    from overnight.core.enums import TrialState

    if name.lower() in known:
        return TrialState(name.lower())
    close = get_close_matches(name.lower(), known, n=1)
    raise typer.BadParameter(f"{name!r} is no state. {'Did you mean ' + close[0] if close else ', '.join(known)}")


@command(
    "overnight logs digits-7                 # all of the newest attempt",
    "overnight logs -f digits-7              # until the trial is over, attempt after attempt",
    "overnight logs -n 20 digits-7           # the last 20 lines",
    "overnight logs --attempt 1 digits-7",
)
def logs(
    ctx: typer.Context,
    trial: TrialRef,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the trial is over.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, metavar="N", help="The last lines only.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: the newest.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Let escape sequences through (colours, but also worse).")] = False,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Print or follow a trial's output."""
    session = session_of(ctx)
    with session.client() as client:
        offset = 0 if lines is None else -max(1, lines) * 400
        chunks: Iterable[LogChunk] = client.logs(trial, attempt=attempt, offset=offset, follow=follow)
        if session.json_output:
            text = "".join(chunk.text for chunk in chunks)
            session.emit({"trial": trial, "text": text if lines is None else _last(text, lines)})
            return
        print_log(session, chunks, raw=raw, lines=lines)


def _last(text: str, lines: int) -> str:
    kept = text.splitlines(keepends=True)
    return "".join(kept[-lines:] if lines else [])


def print_log(session: Session, chunks: "Iterable[LogChunk]", *, raw: bool = False, lines: int | None = None) -> None:
    """Prints output as it comes, made harmless line by line; new attempts and gaps are told on standard error."""
    from overnight.core.text import sanitize

    current: int | None = None
    following = None if lines is not None else 0
    rest = ""
    for chunk in chunks:
        if current is not None and chunk.attempt != current:
            session.note(f"--- attempt {chunk.attempt} ---")
            following = 0
        if following is not None and chunk.offset > following:
            session.note(f"--- {chunk.offset - following:,} bytes of a flood of output were not kept ---")
        current, following = chunk.attempt, chunk.next_offset
        text = _last(chunk.text, lines) if lines is not None else chunk.text
        lines = None
        if raw:
            sys.stdout.write(text)
        else:
            whole, newline, rest = (rest + text).rpartition("\n")
            if len(rest) > 64 * 1024:
                whole, newline, rest = whole + newline + rest, "", ""
            sys.stdout.write(sanitize(whole) + newline)
        sys.stdout.flush()
    if rest:
        sys.stdout.write(sanitize(rest) + "\n")
        sys.stdout.flush()


@command(
    "overnight wait digits-7 digits-8        # exit 1 if one of them failed",
    "overnight wait --timeout 600 digits-7   # exit 5 when the time is up",
)
def wait(
    ctx: typer.Context,
    trials: TrialRefs,
    timeout: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Give up after.")] = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Wait until trials have ended."""
    from overnight.core.enums import TrialState

    session = session_of(ctx)
    ended = []
    with session.client() as client:
        for trial in client.as_ended(trials, timeout):
            ended.append(trial)
            if not session.json_output:
                from overnight.tui import format as look

                value = "" if trial.value is None else f"  {trial.value:.6g}"
                session.console.print(look.state(trial.state).append(f"  {trial.name}{value}"))
    if session.json_output:
        session.emit(ended)
    if len(ended) < len(set(trials)):
        session.note(f"{len(set(trials)) - len(ended)} not over after {timeout:g} s")
        raise typer.Exit(TIME_UP)
    if any(trial.state in (TrialState.FAILED, TrialState.CANCELLED) for trial in ended):
        raise typer.Exit(FAILED)


@command("overnight why digits-7", "overnight why -o json digits-7")
def why(ctx: typer.Context, trial: TrialRef, output: Output = OutputFormat.TEXT) -> None:
    """Why a trial is not running, and what would change that."""
    session = session_of(ctx)
    with session.client() as client:
        answer = client.why(trial)
    if session.json_output:
        session.emit(answer)
        return
    from overnight.cli import render
    from overnight.tui import format as look

    place = f", place {answer.position} in the queue" if answer.position else ""
    session.console.print(look.state(answer.state).append(f"  {trial}{place}"))
    session.console.print(render.text(answer.reason), soft_wrap=True)
    for item in answer.waits_for:
        session.console.print(render.text(f"  waits for: {item}"), soft_wrap=True)
    for change in answer.changes:
        session.console.print(render.text(f"  would help: {change}"), soft_wrap=True)
