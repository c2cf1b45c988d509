"""``overnight status``: the whole house on one page."""

import typer

from overnight.cli.options import Output, OutputFormat, command
from overnight.cli.session import session_of


@command("overnight status", "overnight status -o json | jq .data.queued", "watch -n 5 overnight status")
def status(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """The whole house on one page."""
    session = session_of(ctx)
    with session.client() as client:
        house = client.status()
    if session.json_output:
        session.emit(house)
        return
    from overnight.cli import render
    from overnight.cli.fleet import device_table

    console = session.console
    lag = f", {house.mlflow_lag_rows} rows behind" if house.mlflow_lag_rows else ""
    console.print(
        render.pairs(
            [
                ("server", render.text(f"{client.address.url}  pid {house.pid}  version {house.version}")),
                ("home", house.home),
                ("up since", render.ago(house.started_at)),
                ("trials", render.counts(house.trials_by_state)),
                ("mlflow", f"{house.mlflow_uri}{lag}"),
            ]
        )
    )
    if house.devices:
        console.print()
        console.print(device_table(house.devices))
    if house.running:
        console.print()
        console.print(render.trials(house.running))
    for index, sweep in enumerate(house.sweeps):
        if index == 0:
            console.print()
        console.print(render.sweep_line(sweep))
    silent = [node.name for node in house.nodes if not node.connected]
    if silent:
        session.note(f"note: no word from {', '.join(silent)}")
