"""``overnight report``: what came out of an experiment, and where the rest of it is."""

import shlex
from typing import Annotated, Any

import typer

from overnight.cli.options import Output, OutputFormat, command
from overnight.cli.session import session_of


@command(
    "overnight report digits",
    "overnight report -n 50 digits",
    "overnight report -o json digits | jq '.data.leaderboard.rows[0]'",
)
def report(
    ctx: typer.Context,
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Name or id.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Rows of the leaderboard.")] = 10,
    output: Output = OutputFormat.TEXT,
) -> None:
    """An experiment's leaderboard, and where its results are."""
    session = session_of(ctx)
    with session.client() as client:
        found = client.experiment(experiment)
        board = client.leaderboard(experiment, limit=limit)
        house = client.status()
        best = client.trial(board.rows[0].trial_id) if board.rows else None
    opener = open_command(house.mlflow_uri)
    pointers: dict[str, Any] = {
        "mlflow_uri": house.mlflow_uri,
        "mlflow_experiment_id": found.mlflow_experiment_id,
        "mlflow_open": opener,
        "best_folder": best.dir if best else None,
        "trials_folder": f"{house.home}/trials",
        "server_logs": f"{house.home}/logs",
    }
    if session.json_output:
        session.emit({"experiment": found, "leaderboard": board, "pointers": pointers})
        return
    from overnight.cli import render
    from overnight.tui import format as look

    console = session.console
    goal = f"  {board.mode} {board.metric}" if board.metric else ""
    console.print(look.plain(f"{found.name}{goal}"), style="bold")
    console.print(render.counts(found.trials_by_state))
    console.print()
    if board.rows:
        console.print(render.leaderboard(board.rows, board.metric))
    else:
        console.print("no trial has a result yet")
    console.print()
    lag = f"  ({house.mlflow_lag_rows} rows still on their way)" if house.mlflow_lag_rows else ""
    rows: list[tuple[str, Any]] = [("mlflow", f"{house.mlflow_uri}{lag}"), ("open it", opener)]
    if best is not None:
        rows.append(("best", f"overnight show {best.name}"))
        rows.append(("its log", f"overnight logs {best.name}"))
        if best.dir:
            rows.append(("its folder", best.dir))
    rows.append(("server logs", f"{house.home}/logs"))
    console.print(render.pairs(rows))


def open_command(mlflow_uri: str) -> str:
    """What to type to look at the results in MLflow."""
    if mlflow_uri.startswith(("http://", "https://")):
        return f"open {shlex.quote(mlflow_uri)}"
    return f"mlflow ui --backend-store-uri {shlex.quote(mlflow_uri)}"
