"""Devices and nodes: ``overnight devices`` lists, drains, quarantines and releases; ``overnight nodes`` lists."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from overnight.cli.options import DryRun, Output, OutputFormat, command, epilog
from overnight.cli.session import session_of

if TYPE_CHECKING:
    from rich.table import Table

    from overnight.core.models.api import Device

HELP = {"help_option_names": ["-h", "--help"]}

devices = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings=HELP,
    epilog=epilog(
        "overnight devices                                       # list",
        "overnight devices drain node-1:3 --reason 'fan'      # what runs goes on, nothing new starts",
        "overnight devices quarantine node-1:3 --reason 'ECC' # out at once",
        "overnight devices release node-1:3 --reason 'swapped'",
    ),
)


@devices.callback()
def list_devices(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """List devices; or drain, quarantine or release one."""
    if ctx.invoked_subcommand is not None:
        return
    session = session_of(ctx)
    with session.client() as client:
        found = client.devices()
    if session.json_output:
        session.emit(found)
    elif not found:
        session.note("no devices: does a node run? See: overnight nodes")
    else:
        session.console.print(device_table(found))


def device_table(found: "Iterable[Device]") -> "Table":
    """Devices with their state and who holds them."""
    from rich.text import Text

    from overnight.cli import render
    from overnight.tui import format as look

    result = render.table("device", "kind", "state", "for", "trial", "cause")
    for device in found:
        sign, colour = look.DEVICE_LOOK[device.state]
        since = device.since
        result.add_row(
            look.plain(device.id),
            look.plain(f"{device.kind} {device.type}".strip()),
            Text(f"{sign} {device.state}", style=colour),
            look.duration((datetime.now(UTC) - since).total_seconds()) if since else "-",
            look.plain(device.trial_name or "-"),
            look.plain(device.cause),
        )
    return result


DeviceRef = Annotated[str, typer.Argument(metavar="DEVICE", help="Id, as listed.")]
Why = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Goes on record.", show_default=False)]


def _change(ctx: typer.Context, device: str, action: str, reason: str, dry_run: bool) -> None:
    from overnight.core.errors import NotFoundError

    session = session_of(ctx)
    with session.client() as client:
        if dry_run:
            found = next((known for known in client.devices() if known.id == device), None)
            if found is None:
                raise NotFoundError(f"there is no device {device!r}", hint="They are listed by: overnight devices")
        else:
            found = client.change_device(device, action, reason=reason)
    if session.json_output:
        session.emit(found)
    elif dry_run:
        session.console.print(f"would {action} {found.id}, which is {found.state}")
    else:
        session.console.print(device_table([found]))


@devices.command(context_settings=HELP, epilog=epilog("overnight devices drain node-1:3 --reason 'fan is loud'"))
def drain(
    ctx: typer.Context, device: DeviceRef, reason: Why, dry_run: DryRun = False, output: Output = OutputFormat.TEXT
) -> None:
    """Let what runs on a device go on, and start nothing new on it."""
    _change(ctx, device, "drain", reason, dry_run)


@devices.command(context_settings=HELP, epilog=epilog("overnight devices quarantine node-1:3 --reason 'ECC errors'"))
def quarantine(
    ctx: typer.Context, device: DeviceRef, reason: Why, dry_run: DryRun = False, output: Output = OutputFormat.TEXT
) -> None:
    """Take a device out at once; what runs on it starts again elsewhere."""
    _change(ctx, device, "quarantine", reason, dry_run)


@devices.command(context_settings=HELP, epilog=epilog("overnight devices release node-1:3 --reason 'swapped'"))
def release(
    ctx: typer.Context, device: DeviceRef, reason: Why, dry_run: DryRun = False, output: Output = OutputFormat.TEXT
) -> None:
    """Give a device back to the scheduler."""
    _change(ctx, device, "release", reason, dry_run)


@command("overnight nodes", "overnight nodes -o json")
def nodes(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """List machines."""
    from overnight.cli import render
    from overnight.tui import format as look

    session = session_of(ctx)
    with session.client() as client:
        found = client.nodes()
    if session.json_output:
        session.emit(found)
        return
    if not found:
        session.note("no nodes: 'overnight up' starts this machine's")
        return
    result = render.table("node", "name", "pid", "connected", "seen", "devices", right=("pid",))
    for node in found:
        result.add_row(
            look.plain(node.id),
            look.plain(node.name),
            str(node.pid),
            "yes" if node.connected else "no",
            render.ago(node.seen_at),
            str(len(node.devices)),
        )
    session.console.print(result)
