"""``overnight db``: the database, looked after from outside the server."""

from pathlib import Path
from typing import Annotated

import typer

from overnight.cli.options import Output, OutputFormat, epilog
from overnight.cli.server import server_extra
from overnight.cli.session import FAILED, session_of

HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings=HELP,
    help="Upgrade, check, back up or describe the database.",
    epilog=epilog(
        "overnight db info",
        "overnight db check                # exit 1 if something is wrong",
        "overnight db backup before.db     # also while the server runs",
    ),
)


@app.command(context_settings=HELP, epilog=epilog("overnight db backup before.db && overnight db upgrade"))
def upgrade(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """Bring the schema to this version's. The server does it by itself when it starts."""
    session = session_of(ctx)
    with server_extra("overnight db"):
        from overnight.store import maintenance
    before, after = maintenance.upgrade(session.settings.effective_store_url)
    if session.json_output:
        session.emit({"before": before, "after": after})
    else:
        session.console.print(
            f"schema {after}, as before" if before == after else f"schema {before or 'none'} -> {after}"
        )


@app.command(context_settings=HELP, epilog=epilog("overnight db check", "overnight db check -o json"))
def check(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """Look for damage. Exit 1 if there is any."""
    session = session_of(ctx)
    with server_extra("overnight db"):
        from overnight.store import maintenance
    problems = maintenance.check(session.settings.effective_store_url)
    if session.json_output:
        session.emit({"problems": problems})
    else:
        for problem in problems:
            session.note(f"problem: {problem}")
        session.console.print(f"{len(problems)} problems" if problems else "no problems")
    if problems:
        raise typer.Exit(FAILED)


@app.command(context_settings=HELP, epilog=epilog("overnight db backup ~/overnight-$(date +%F).db"))
def backup(
    ctx: typer.Context,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    output: Output = OutputFormat.TEXT,
) -> None:
    """Copy the database, also while the server runs."""
    session = session_of(ctx)
    with server_extra("overnight db"):
        from overnight.store import maintenance
    size = maintenance.backup(session.settings.effective_store_url, target)
    if session.json_output:
        session.emit({"path": target.absolute(), "bytes": size})
    else:
        session.console.print(f"{target}  {size:,} bytes")


@app.command(context_settings=HELP, epilog=epilog("overnight db info", "overnight db info -o json"))
def info(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """Where it is, how large, and how many rows it has."""
    from overnight.cli import render

    session = session_of(ctx)
    with server_extra("overnight db"):
        from overnight.store import maintenance
    facts = maintenance.info(session.settings.effective_store_url)
    if session.json_output:
        session.emit(facts)
        return
    rows = [("url", str(facts["url"])), ("schema", f"{facts['schema'] or 'none'} (needed {facts['schema_needed']})")]
    if facts["bytes"] is not None:
        rows.append(("size", f"{facts['bytes']:,} bytes"))
    rows += [(name, f"{number:,} rows") for name, number in facts["rows"].items() if number]
    session.console.print(render.pairs(rows))
