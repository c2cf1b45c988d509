"""``overnight checkpoints``: list, verify, compare, export and delete, of a trial or of a folder without a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overnight.cli.options import DryRun, Output, OutputFormat, Reason, epilog
from overnight.cli.session import FAILED, Session, session_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress
    from rich.table import Table

    from overnight.cli.places import Target
    from overnight.core.models.api import CheckpointDeletion, StoredCheckpoint
    from overnight.trainer.checkpoint.comparison import Comparison
    from overnight.trainer.checkpoint.place import CheckpointName, Place
    from overnight.trainer.checkpoint.survey import Row

HELP = {"help_option_names": ["-h", "--help"]}
TEXT = OutputFormat.TEXT
SHOWN_CHANGES = 40

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings=HELP,
    help="List, verify, compare, export or delete checkpoints.",
    epilog=epilog(
        "overnight checkpoints list digits-7",
        "overnight checkpoints verify digits-7                    # hash every file; exit 1 if one is damaged",
        "overnight checkpoints diff digits-7@1000 digits-7@2000   # which tensors changed, by how much",
        "overnight checkpoints export digits-7 model.safetensors",
        "overnight checkpoints prune digits-7 --dry-run",
        "overnight checkpoints list .overnight/train/3f2a9c       # a run of 'overnight run', no server",
    ),
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A trial, TRIAL@STEP, a checkpoint place or one checkpoint in it (path or URL)."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command(
    "list",
    context_settings=HELP,
    epilog=epilog(
        "overnight checkpoints list digits-7",
        "overnight checkpoints list -o json digits-7 | jq '.data.items[-1].name'",
        "overnight checkpoints list s3://bucket/digits-7",
    ),
)
def list_(ctx: typer.Context, target: Where, output: Output = TEXT) -> None:
    """List what a place holds, oldest first."""
    from overnight.cli.places import find
    from overnight.core.models.api import StoredCheckpoints
    from overnight.core.sizes import show_bytes

    session = session_of(ctx)
    found = find(session, target)
    if found.trial is not None:
        with session.client() as client:
            held = client.checkpoints(found.trial)
    else:
        from overnight.trainer.checkpoint.survey import survey

        looked = found.ask(survey)
        if not looked.rows:
            _require_place(found)
        rows = [row.to_json() | {"problem": _problem(found.place, row)} for row in looked.rows]
        held = StoredCheckpoints.model_validate({"place": found.where, "bytes": looked.num_bytes, "items": rows})
    if found.picks:
        wanted = tuple(
            item for item in held.items if found.entry in ("", item.name) and found.step in (None, item.step)
        )
        _require([item.name for item in wanted], found)
        held = held.model_copy(update={"items": wanted})
    if session.json_output:
        session.emit(held)
    elif not held.items:
        session.note(f"no checkpoints in {held.place}")
    else:
        session.console.print(_table(held.items))
        session.note(f"{show_bytes(held.bytes)} in {held.place}")


def _require_place(found: "Target") -> None:
    """Tells a place that holds no checkpoints yet from a folder that is none.

    Raises:
        NotFoundError: There are other things in it, and no run has ever claimed it.
    """
    from overnight.core.errors import NotFoundError

    if found.ask(lambda place: place.foreign() and not place.tokens()):
        raise NotFoundError(
            f"{found.text}: {found.where} is neither a trial nor a checkpoint place",
            hint="Give a trial, the folder of a run (.overnight/SCRIPT/ID), or its checkpoints folder.",
        )


def _problem(place: "Place", row: "Row") -> str:
    """Why a checkpoint's manifest cannot be read, empty if it can."""
    from overnight.core.errors import CheckpointError, UnavailableError
    from overnight.trainer.checkpoint.reading.source import open_source
    from overnight.trainer.checkpoint.reading.verification import manifest_of

    if row.summary.readable:
        return ""
    try:
        manifest_of(open_source(place, row.name), row.name)
    except (CheckpointError, UnavailableError) as error:
        return error.message
    return ""


def _table(items: "Sequence[StoredCheckpoint]") -> "Table":
    from datetime import datetime

    from overnight.cli import render
    from overnight.core.sizes import show_bytes
    from overnight.tui import format as look

    result = render.table("checkpoint", "saved", "size", "ranks", "why", "role", "stays", right=("size", "ranks"))
    for item in items:
        stays = f"read by {item.pinned_by}" if item.pinned_by else item.kept_as
        result.add_row(
            look.plain(item.name),
            render.ago(datetime.fromisoformat(item.created_at)) if item.created_at else "-",
            show_bytes(item.bytes),
            str(item.world_size or "-"),
            look.plain(item.kind or "-"),
            item.role if item.readable else "damaged",
            look.plain(stays or "-") if item.readable else look.plain(item.problem or "no manifest", 200),
        )
    return result


@app.command(
    context_settings=HELP,
    epilog=epilog(
        "overnight checkpoints verify digits-7",
        "overnight checkpoints verify digits-7@2000",
        "overnight checkpoints verify -o json ./checkpoints | jq '.data[] | select(.good | not)'",
    ),
)
def verify(ctx: typer.Context, target: Where, output: Output = TEXT) -> None:
    """Hash every file and name what is damaged. Exit 1 if anything is."""
    from overnight.cli import render
    from overnight.cli.places import here
    from overnight.core.sizes import show_bytes
    from overnight.tui import format as look

    session = session_of(ctx)
    found = here(session, target)
    place, names = found.place, found.names()
    with _progress(session) as progress:
        results = [_verify(session, place, name, progress) for name in names]
    if session.json_output:
        session.emit(results)
    else:
        table = render.table("checkpoint", "size", "result", right=("size",))
        for result in results:
            words = "good" if result["good"] else "; ".join(result["problems"])
            table.add_row(look.plain(result["name"]), show_bytes(result["bytes"]), look.plain(words, 2000))
        session.console.print(table)
    if not all(result["good"] for result in results):
        raise typer.Exit(FAILED)


def _verify(session: Session, place: "Place", name: "CheckpointName", progress: "Progress | None") -> dict[str, Any]:
    from overnight.core.errors import CorruptCheckpointError
    from overnight.trainer.checkpoint.reading.source import open_source
    from overnight.trainer.checkpoint.reading.verification import foreign_files, manifest_of, problems

    source = open_source(place, name)
    try:
        manifest = manifest_of(source, name)
    except CorruptCheckpointError as error:
        return {"name": str(name), "good": False, "bytes": 0, "problems": [error.message]}
    found: list[str] = []
    with _pinned(session, place, name, "overnight checkpoints verify"):
        try:
            foreign_files(source, manifest)
        except CorruptCheckpointError as error:
            found.append(error.message)
        task = progress.add_task(str(name), total=manifest.num_bytes) if progress else None
        for file, entry in manifest.files.items():
            found += problems(source, {file: entry})
            if progress is not None and task is not None:
                progress.advance(task, entry.size)
    return {"name": str(name), "good": not found, "bytes": manifest.num_bytes, "problems": found}


@contextmanager
def _pinned(session: Session, place: "Place", name: "CheckpointName", holder: str) -> Iterator[None]:
    """Pins while it is read; where that is not possible (a read-only place), says so and goes on."""
    from contextlib import ExitStack

    from overnight.core.errors import CheckpointError
    from overnight.trainer.checkpoint.pins import pin

    with ExitStack() as stack:
        try:
            stack.enter_context(pin(place, name, holder))
        except CheckpointError as error:
            session.note(f"note: {error.message}")
        yield


@contextmanager
def _progress(session: Session) -> "Iterator[Progress | None]":
    """A bar per checkpoint on standard error, if somebody is watching."""
    if session.json_output or not session.notes.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=session.notes, transient=True) as progress:
        yield progress


@app.command(
    context_settings=HELP,
    epilog=epilog(
        "overnight checkpoints diff digits-7@1000 digits-7@2000",
        "overnight checkpoints diff digits-7 digits-8               # the newest good one of each",
        "overnight checkpoints diff -o json A B | jq .data.equal",
    ),
)
def diff(ctx: typer.Context, first: Where, second: Where, output: Output = TEXT) -> None:
    """Say which tensors and values of two checkpoints differ, and by how much."""
    from overnight.cli.places import here

    session = session_of(ctx)
    sides = [here(session, text).one() for text in (first, second)]
    with _torch():
        from overnight.trainer.checkpoint.comparison import compare
    comparison = compare(sides[0], sides[1])
    if session.json_output:
        session.emit(comparison.to_json())
    else:
        _print_comparison(session, comparison)


@contextmanager
def _torch() -> Iterator[None]:
    """Turns a missing torch into what to do about it.

    Raises:
        MissingTorchError: torch is not installed here.
    """
    from overnight.core.errors import MissingTorchError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingTorchError("this command reads tensors, and torch is not installed here") from None


def _print_comparison(session: Session, found: "Comparison") -> None:
    from overnight.cli import render
    from overnight.tui import format as look

    console = session.console
    if found.is_equal:
        console.print(render.text(f"{found.first} and {found.second} hold the same state"))
        return
    if found.tensors:
        table = render.table("tensor", "max change", "relative", "elements", "type", right=("max change", "relative"))
        for change in found.tensors[:SHOWN_CHANGES]:
            same = change.before == change.after
            table.add_row(
                look.plain(change.key),
                "-" if change.max_change is None else f"{change.max_change:.3g}",
                "-" if change.relative_change is None else f"{change.relative_change:.3g}",
                f"{change.num_changed}/{change.num_elements}" if same else "-",
                look.plain(change.before if same else f"{change.before} -> {change.after}"),
            )
        console.print(table)
    lines = [f"only in {found.first}: {key}" for key in found.only_first]
    lines += [f"only in {found.second}: {key}" for key in found.only_second]
    lines += [f"{value.path}: {value.before} -> {value.after}" for value in found.values]
    for line in lines[:SHOWN_CHANGES]:
        console.print(render.text(line, limit=500), soft_wrap=True)
    hidden = max(0, len(found.tensors) - SHOWN_CHANGES) + max(0, len(lines) - SHOWN_CHANGES)
    more = f", {hidden} more with -o json" if hidden else ""
    session.note(f"{len(found.tensors)} tensors changed, {found.num_equal} are equal{more}")


@app.command(
    context_settings=HELP,
    epilog=epilog(
        "overnight checkpoints export digits-7 model.safetensors        # the newest good one",
        "overnight checkpoints export digits-7@2000 --name ema ema.safetensors",
        "overnight checkpoints export digits-7 everything.pt            # for torch.load",
    ),
)
def export(
    ctx: typer.Context,
    target: Where,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new .safetensors or .pt file.")],
    name: Annotated[
        str | None, typer.Option(metavar="OBJECT", help="Which tracked object; default: the model, or all for .pt.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    output: Output = TEXT,
) -> None:
    """Write the tensors of a checkpoint to one file that other tools read."""
    from overnight.cli import render
    from overnight.cli.places import here
    from overnight.core.sizes import show_bytes

    session = session_of(ctx)
    source = here(session, target).one()
    with _torch():
        from overnight.trainer.checkpoint.export import export as write
    facts = write(source, file, name=name, overwrite=overwrite)
    if session.json_output:
        session.emit(facts)
        return
    what = f"{facts['tensors']} tensors of {', '.join(facts['objects'])} in {facts['checkpoint']}"
    session.console.print(render.text(f"{facts['target']}  {show_bytes(facts['bytes'])}  ({what})"), soft_wrap=True)


@app.command(
    context_settings=HELP,
    epilog=epilog(
        "overnight checkpoints prune digits-7 --dry-run",
        "overnight checkpoints prune digits-7 --keep 1 --yes   # of all attempts together",
        "overnight checkpoints prune digits-7@2000             # this one",
        "overnight checkpoints prune .overnight/train/3f2a9c   # no server",
    ),
)
def prune(
    ctx: typer.Context,
    target: Where,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The newest N stay, instead of what the run says.")
    ] = None,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = TEXT,
) -> None:
    """Delete what no start can need. Never the last good checkpoint, nor what somebody reads."""
    from overnight.cli.places import find

    session = session_of(ctx)
    found = find(session, target)
    doomed = _delete(session, found, keep, reason, dry_run=True)
    if not dry_run and doomed:
        _ask(session, found, doomed, yes)
        doomed = _delete(session, found, keep, reason, dry_run=False)
    if session.json_output:
        session.emit({"place": found.where, "dry_run": dry_run, "deleted": doomed})
    elif not doomed:
        session.console.print("nothing to delete")
    else:
        _print_deletions(session, doomed, "would delete" if dry_run else "deleted")


def _delete(
    session: Session, found: "Target", keep: int | None, reason: str, *, dry_run: bool
) -> "Sequence[CheckpointDeletion]":
    from overnight.core.models.api import CheckpointDeletion, CheckpointPruneIn

    entries: tuple[str, ...] = ()
    if found.trial is not None:
        with session.client() as client:
            if found.picks:
                held = client.checkpoints(found.trial).items
                entries = _require([item.name for item in held if item.step == found.step], found)
            body = CheckpointPruneIn(entries=entries, keep=keep, dry_run=dry_run, reason=reason)
            return client.prune_checkpoints(found.trial, body).deleted
    from overnight.trainer.checkpoint.pins import PinWatch
    from overnight.trainer.checkpoint.survey import survey
    from overnight.trainer.checkpoint.sweep import choose, mark, sweep

    watch = PinWatch()
    looked = found.ask(lambda place: survey(place, watch, keep))
    if found.picks:
        entries = tuple(str(name) for name in found.names())
        doomed = found.ask(lambda place: choose(looked, entries, reason or "asked for"))
    else:
        doomed = found.ask(lambda place: mark(looked, at_rest=False))
    if not dry_run:
        doomed = found.ask(lambda place: sweep(looked, doomed, watch))
    return [CheckpointDeletion.model_validate(deletion.to_json()) for deletion in doomed]


def _require(names: list[str], found: "Target") -> tuple[str, ...]:
    from overnight.core.errors import NotFoundError

    if not names:
        raise NotFoundError(f"{found.text}: there is no such checkpoint", hint="See: overnight checkpoints list")
    return tuple(names)


def _ask(session: Session, found: "Target", doomed: "Sequence[CheckpointDeletion]", yes: bool) -> None:
    """Shows what would go and asks.

    Raises:
        BadInputError: Nobody is there to answer.
        Exit: The answer is no.
    """
    import sys

    if yes:
        return
    from overnight.core.errors import BadInputError

    if session.json_output or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadInputError(
            f"{len(doomed)} deletions in {found.where} need a yes", hint="Look with --dry-run, then say --yes."
        )
    _print_deletions(session, doomed, "would delete")
    if not typer.confirm("Delete them?", err=True):
        raise typer.Exit(FAILED)


def _print_deletions(session: Session, doomed: "Sequence[CheckpointDeletion]", verb: str) -> None:
    from overnight.cli import render
    from overnight.core.sizes import show_bytes
    from overnight.tui import format as look

    table = render.table(verb, "size", "cause", right=("size",))
    for deletion in doomed:
        table.add_row(look.plain(deletion.entry), show_bytes(deletion.bytes), look.plain(deletion.cause, 500))
    session.console.print(table)
    session.note(f"{show_bytes(sum(deletion.bytes for deletion in doomed))} in all")
