"""``overnight sweep``: starts the search of a spec file and shows how it goes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overnight.cli.options import DryRun, Experiment, Gpus, Key, Output, OutputFormat, Priority, command
from overnight.cli.session import FAILED, Session, session_of

if TYPE_CHECKING:
    from overnight.agents.client import Client
    from overnight.core.models.api import Sweep

REFRESH_SECONDS = 1.0
PLAIN_SECONDS = 15.0
"""Between two lines of progress where nobody has a terminal."""


@command(
    "overnight sweep sweep.yaml                # start it and watch; Ctrl-C leaves it running",
    "overnight sweep --detach sweep.yaml       # start it and come back tomorrow",
    "overnight sweep --trials 200 --parallel 8 sweep.yaml",
    "overnight sweep --stop swp-01kb8xq4m3f9   # end one: nothing new is proposed",
    "overnight sweep --list",
)
def sweep(
    ctx: typer.Context,
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC", help="A spec file with a sweep: block.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, metavar="N", help="Instead of the spec's.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, metavar="N", help="Instead of the spec's.")] = None,
    planner: Annotated[str | None, typer.Option(metavar="NAME", help="random, sobol or tpe.")] = None,
    gpus: Gpus = None,
    priority: Priority = None,
    experiment: Experiment = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the end.")] = False,
    stop: Annotated[str | None, typer.Option(metavar="SWEEP", help="End a sweep.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List sweeps.")] = False,
    dry_run: DryRun = False,
    key: Key = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Search a space: start a spec file's sweep and watch it."""
    session = session_of(ctx)
    if sum((spec is not None, stop is not None, listed)) != 1:
        raise typer.BadParameter("give one spec file, or --stop SWEEP, or --list")
    with session.client() as client:
        if listed:
            _list(session, client.sweeps())
        elif stop is not None:
            _stop(session, client, stop, dry_run)
        else:
            assert spec is not None
            options = {"trials": trials, "parallel": parallel, "planner": planner}
            started = _start(session, client, spec, options, (gpus, priority, experiment), key, dry_run)
            _after_start(session, client, started, detach=detach, dry_run=dry_run)


def _start(
    session: Session,
    client: "Client",
    path: Path,
    options: dict[str, Any],
    overrides: tuple[str | None, str | None, str | None],
    key: str | None,
    dry_run: bool,
) -> "Sweep":
    from overnight.cli import preparing
    from overnight.core import specfile
    from overnight.core.errors import InvalidSpecError
    from overnight.core.models.api import SweepIn
    from overnight.core.models.spec import SweepConfig
    from overnight.core.spectext import Document

    if not preparing.is_spec(path):
        raise InvalidSpecError(f"{path} is no spec file", hint="A sweep needs a .yaml or .toml with a 'sweep:' block.")
    gpus, priority, experiment = overrides
    prepared = preparing.prepare(
        path, (), preparing.Overrides(experiment, gpus, priority), session.settings, session.env
    )
    if prepared.spec.sweep is None:
        raise InvalidSpecError(f"{path} has no sweep", hint=f"Add a 'sweep:' block, or: overnight submit {path}")
    given = {name: value for name, value in options.items() if value is not None}
    document = Document({}, "the command line")
    search = specfile.validate(SweepConfig, {**prepared.spec.sweep.model_dump(), **given}, document)
    config = prepared.config
    if not dry_run:
        client.upload_code(prepared.snapshot.digest, prepared.snapshot.read)
    elif not client.has_code(prepared.snapshot.digest):
        config = config.model_copy(update={"code": None})
    data = {"config": config, "sweep": search, "schedule": prepared.spec.schedule, "key": key, "dry_run": dry_run}
    return client.start_sweep(specfile.validate(SweepIn, data, document))


def _after_start(session: Session, client: "Client", started: "Sweep", *, detach: bool, dry_run: bool) -> None:
    scheduled = started.schedule is not None
    if dry_run:
        if session.json_output:
            session.emit(started)
        else:
            search = started.sweep
            session.console.print(
                f"would start {search.planner} over {len(search.space)} params, {search.trials} trials"
            )
        return
    if session.json_output and (detach or scheduled):
        session.emit(started)
    elif scheduled:
        when = f"{started.next_run_at.astimezone():%a %d %b %H:%M %Z}" if started.next_run_at else "as scheduled"
        session.console.print(f"{started.id} registered; first start {when}")
    elif detach:
        session.console.print(f"{started.id} started: {started.sweep.trials} trials of {started.experiment}")
        session.note(f"next:  overnight status   overnight report {started.experiment}")
    else:
        raise typer.Exit(_watch(session, client, started))


def _watch(session: Session, client: "Client", started: "Sweep") -> int:
    """Shows progress until the sweep is over; Ctrl-C leaves it running."""
    began = time.monotonic()
    try:
        show = _live if session.console.is_terminal and not session.json_output else _lines
        final = show(session, client, started, began)
    except KeyboardInterrupt:
        session.note(f"{started.id} goes on without you; overnight sweep --stop {started.id} ends it")
        return 130
    if session.json_output:
        session.emit(final)
    else:
        from overnight.cli import render

        session.console.print(render.sweep_line(final))
        if final.cause:
            session.console.print(render.text(final.cause), soft_wrap=True)
        session.note(f"next:  overnight report {final.experiment}")
    return FAILED if final.state == "broken" else 0


def _live(session: Session, client: "Client", sweep: "Sweep", began: float) -> "Sweep":
    from rich.live import Live

    with Live(console=session.console, auto_refresh=False, transient=True) as live:
        while not is_over(sweep):
            live.update(progress(sweep, time.monotonic() - began), refresh=True)
            time.sleep(REFRESH_SECONDS)
            sweep = client.sweep(sweep.id)
    return sweep


def _lines(session: Session, client: "Client", sweep: "Sweep", began: float) -> "Sweep":
    from overnight.cli import render

    said = began - PLAIN_SECONDS
    while not is_over(sweep):
        if time.monotonic() - said >= PLAIN_SECONDS:
            session.notes.print(render.sweep_line(sweep))
            said = time.monotonic()
        time.sleep(REFRESH_SECONDS)
        sweep = client.sweep(sweep.id)
    return sweep


def num_ended(sweep: "Sweep") -> int:
    """Trials of a sweep that have reached an end state."""
    from overnight.core.states import END_STATES

    return sum(number for state, number in sweep.trials_by_state.items() if state in END_STATES)


def is_over(sweep: "Sweep") -> bool:
    """Whether nothing of a sweep is left to do: it proposes no more and all its trials have ended."""
    from overnight.core.enums import SweepState

    done = sweep.state in (SweepState.FINISHED, SweepState.STOPPED, SweepState.BROKEN)
    return done and num_ended(sweep) >= sum(sweep.trials_by_state.values())


def progress(sweep: "Sweep", seconds: float) -> Any:
    """The live page: a bar, counts, the best so far, and when it will be over at this pace."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from overnight.cli import render
    from overnight.tui import format as look

    total, done = sweep.sweep.trials, num_ended(sweep)
    head = Table.grid(padding=(0, 2, 0, 0))
    remaining = f"about {look.duration(seconds / done * (total - done))} left" if 0 < done < total else ""
    bar = ProgressBar(total=total, completed=min(done, total), width=30)
    head.add_row(look.plain(sweep.experiment, 30), bar, f"{done}/{total}", look.duration(seconds), remaining)
    lines: list[Any] = [head, render.counts(sweep.trials_by_state)]
    if sweep.best is not None and sweep.best.value is not None:
        best = Text("best ", no_wrap=True, overflow="ellipsis").append(f"{sweep.best.value:.6g}", style="bold green")
        best.append("  ").append_text(look.plain(sweep.best.name, 40)).append("  ")
        lines.append(best.append_text(look.params(sweep.best.params)))
    lines.append(Text("Ctrl-C leaves it running", style="bright_black"))
    return Group(*lines)


def _list(session: Session, found: "tuple[Sweep, ...]") -> None:
    if session.json_output:
        session.emit(found)
        return
    from overnight.cli import render

    if not found:
        session.note("no sweeps")
    for one in found:
        session.console.print(render.sweep_line(one))


def _stop(session: Session, client: "Client", sweep_id: str, dry_run: bool) -> None:
    found = client.sweep(sweep_id) if dry_run else client.stop_sweep(sweep_id)
    if session.json_output:
        session.emit(found)
    else:
        session.console.print(
            f"would stop {found.id}, which is {found.state}" if dry_run else f"{found.id} {found.state}"
        )
