"""The house itself: ``up``, ``down``, ``doctor``, ``token``. What they need of the server is imported when they run."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overnight.cli.options import Output, OutputFormat, command
from overnight.cli.session import FAILED, Session, session_of

if TYPE_CHECKING:
    from overnight.platform.doctor import Finding
    from overnight.platform.up import UpEvent

REFRESH_SECONDS = 1.0


@contextmanager
def server_extra(what: str) -> Iterator[None]:
    """Turns a missing server part into the pip line that brings it.

    Raises:
        MissingExtraError: A library of the extra ``server`` is not installed.
    """
    from overnight.core.errors import MissingExtraError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "overnight":
            raise
        raise MissingExtraError(what, "server") from None


@command(
    "overnight up                       # in this terminal; Ctrl-C saves and stops everything",
    "overnight up -d                    # in the background",
    "overnight up --pool cpu:4 -d       # four CPU slots instead of the GPUs that are found",
    "OVERNIGHT_HOME=/data/on overnight up",
)
def up(
    ctx: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running in the background.")] = False,
    pool: Annotated[str | None, typer.Option(metavar="POOL", help="nvml, nvml:0-3,7, cpu:N or fake:N.")] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes a free one.")] = None,
) -> None:
    """Start the server and this machine's node.

    A second one on the same home is refused and says who holds it. Ctrl-C lets running trials save and requeues them.
    """
    session = session_of(ctx)
    session.overrides.update({k: v for k, v in (("pool", pool), ("host", host), ("port", port)) if v is not None})
    settings = session.settings
    with server_extra("overnight up"):
        from overnight.platform.up import run_up
    if detach:
        code = run_up(settings, True, lambda event: _say(session, event))
        session.note("next:  overnight status   overnight submit train.py   overnight down")
        raise typer.Exit(code)
    line = StatusLine(session)
    try:
        code = run_up(settings, False, line.event)
    finally:
        line.close()
    raise typer.Exit(code)


def _say(session: Session, event: "UpEvent") -> None:
    from overnight.core.text import sanitize

    session.console.print(sanitize(event.message), soft_wrap=True)
    session.console.file.flush()


class StatusLine:
    """What ``up`` prints: a line for everything that happens, and in a terminal one that says how things are.

    The line is refreshed by a thread that asks the server like any other client.
    """

    def __init__(self, session: Session) -> None:
        import threading

        self._session = session
        self._live: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def event(self, event: "UpEvent") -> None:
        """Prints it; the first server starts the live line, a stop ends it."""
        import threading

        if event.kind in ("stopping", "stopped"):
            self.close()
        _say(self._session, event)
        if event.kind == "server" and self._thread is None and not self._stop.is_set():
            self._session.note("Ctrl-C saves running trials and stops everything.")
            if self._session.console.is_terminal:
                self._thread = threading.Thread(target=self._refresh, name="status-line", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Takes the live line away."""
        self._stop.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        from rich.live import Live
        from rich.text import Text

        from overnight.agents.client import Client
        from overnight.agents.retrying import RetryPolicy

        with Client(self._session.settings, retry=RetryPolicy(patience_seconds=0.0)) as client:
            live = Live(Text(""), console=self._session.console, transient=True, auto_refresh=False)
            self._live = live
            live.start()
            while not self._stop.wait(REFRESH_SECONDS):
                live.update(_state_line(client), refresh=True)
            live.stop()


def _state_line(client: Any) -> Any:
    from rich.text import Text

    from overnight.cli import render
    from overnight.core.errors import OvernightError

    try:
        house = client.status()
    except OvernightError as error:
        return Text(f"{time.strftime('%H:%M:%S')}  {error.message}", no_wrap=True, overflow="ellipsis")
    busy = sum(device.attempt_id is not None for device in house.devices)
    now = time.strftime("%H:%M:%S")
    line = Text(f"{now}  {busy}/{len(house.devices)} devices busy  ", no_wrap=True, overflow="ellipsis")
    return line.append_text(render.counts(house.trials_by_state))


@command("overnight down                     # running trials save and go back to the queue")
def down(ctx: typer.Context) -> None:
    """Stop the server and the node; running trials save and go back to the queue."""
    session = session_of(ctx)
    with server_extra("overnight down"):
        from overnight.platform.up import stop
    if not stop(session.settings, lambda event: _say(session, event)):
        session.note(f"nothing runs for {session.settings.home}")


def _print_findings(session: Session, findings: "list[Finding]") -> None:
    from rich.table import Table
    from rich.text import Text

    from overnight.cli import render

    looks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "bold red")}
    page = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    page.add_column(no_wrap=True)
    page.add_column(no_wrap=True)
    page.add_column(overflow="fold")
    for finding in findings:
        sign, style = looks[finding.level]
        message = render.text(finding.message)
        if finding.hint:
            message.append("\n").append_text(render.text(finding.hint).copy())
        page.add_row(Text(sign, style=style), Text(finding.name), message)
    session.console.print(page)


@command("overnight doctor", "overnight doctor -o json | jq '.data[] | select(.level == \"problem\")'")
def doctor(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """Check this installation and say how to mend it. Exit 1 if something must be mended."""
    session = session_of(ctx)
    with server_extra("overnight doctor"):
        from overnight.platform.doctor import diagnose
    findings = diagnose(session.settings)
    if session.json_output:
        session.emit(findings)
    else:
        _print_findings(session, findings)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(FAILED)


@command(
    "overnight token                    # the path; show it to no one",
    'curl -H "Authorization: Bearer $(cat $(overnight token))" ...',
)
def token(ctx: typer.Context, output: Output = OutputFormat.TEXT) -> None:
    """Say where the access token is. The token itself is never printed."""
    from overnight.agents.connect import read_token
    from overnight.core.errors import NotFoundError

    session = session_of(ctx)
    path = session.settings.paths.token_file
    if read_token(path) is None:
        raise NotFoundError(f"there is no token file {path} yet", hint="The first 'overnight up' writes it.")
    if session.json_output:
        session.emit({"path": path})
    else:
        sys.stdout.write(f"{path}\n")
