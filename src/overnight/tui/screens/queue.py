"""The queue screen: what runs where, what waits, what has ended. Read-only and live."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Static

from overnight.core.enums import TrialState
from overnight.core.models.api import Device, Trial
from overnight.tui import format as look
from overnight.tui.snapshot import Snapshot
from overnight.tui.widgets.line_table import Column, LineTable, Row

COLUMNS = (
    Column("trial", "Trial", 16),
    Column("state", "State", 11),
    Column("class", "Class", 11, priority=4),
    Column("value", "Objective", 9, align="right", priority=1),
    Column("step", "Step", 7, align="right", priority=2),
    Column("time", "Time", 7, align="right", priority=3),
    Column("attempt", "Att", 3, align="right", priority=5),
    Column("device", "Device", 10, priority=3),
    Column("detail", "Params", 16, grow=True, priority=1),
)

EMPTY = "Nothing here yet. Submit a trial: overnight submit train.py --lr 0.001"


def summary(snapshot: Snapshot) -> Text:
    """The line of counts on top."""
    if snapshot.status is None:
        return Text(f" {look.plain(snapshot.problem or 'Asking the server …')}")
    s = TrialState
    busy = sum(device.trial_id is not None for device in snapshot.devices)
    parts = [
        ("devices busy", f"{busy}/{len(snapshot.devices)}", "cyan"),
        ("running", str(snapshot.count(s.STARTING, s.RUNNING, s.YIELDING, s.STOPPING)), "green"),
        ("queued", str(snapshot.count(s.QUEUED)), ""),
        ("completed", str(snapshot.count(s.COMPLETED)), "green"),
        ("pruned", str(snapshot.count(s.PRUNED)), ""),
        ("failed", str(snapshot.count(s.FAILED)), "red" if snapshot.count(s.FAILED) else ""),
    ]
    text = Text(" ", no_wrap=True, overflow="ellipsis")
    for name, value, style in parts:
        text.append(f"{value} ", style=f"bold {style}".strip()).append(f"{name}   ", style="bright_black")
    for sweep in snapshot.sweeps[:1]:
        if sweep.best is not None and sweep.best.value is not None:
            text.append(f"best {sweep.best.value:.4g} ", style="bold").append(look.plain(sweep.best.name, 40))
    return text


def device_line(device: Device) -> Text:
    """One device: its sign, its name, and what it does or why it does nothing."""
    sign, colour = look.DEVICE_LOOK[device.state]
    text = Text(" ", no_wrap=True, overflow="ellipsis")
    text.append(f"{sign} ", style=colour).append(f"{device.kind}:{device.index:<3}")
    if device.state != "healthy":
        text.append(f"{device.state}", style=colour)
        if device.cause:
            text.append(": ").append(look.plain(device.cause, 80))
        text.append("  ")
    if device.trial_name is not None:
        text.append(look.plain(device.trial_name, 40))
    elif device.state == "healthy":
        text.append("idle", style="bright_black")
    return text


def trial_row(trial: Trial, now: datetime, labels: Mapping[str, str]) -> Row:
    """One trial as a row of the table; ``labels`` are the short names of devices by id."""
    ended = trial.ended_at is not None
    detail = look.params(trial.params)
    if trial.state is TrialState.FAILED and trial.error is not None:
        detail = look.plain(f"{trial.error.type}: {trial.error.message}", 200)
        detail.stylize("red")
    elif trial.state in (TrialState.QUEUED, TrialState.HELD) and trial.attempts_made and trial.state_cause:
        detail = look.plain(trial.state_cause, 200)
        detail.stylize("yellow")
    return Row(
        id=trial.id,
        dim=ended and trial.state is not TrialState.COMPLETED,
        cells={
            "trial": look.plain(trial.name, 60),
            "state": look.state(trial.state),
            "class": look.priority(trial.priority),
            "value": look.number(trial.value),
            "step": Text(str(trial.step) if trial.step else "-"),
            "time": look.elapsed(trial.started_at, trial.ended_at, now),
            "attempt": Text(str(trial.attempts_made) if trial.attempts_made else "-"),
            "device": look.plain(" ".join(labels.get(device_id, device_id) for device_id in trial.devices), 30),
            "detail": detail,
        },
    )


class QueueScreen(Screen[None]):
    """Counts, devices, and one table of trials."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "app.quit", "Quit")]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    CSS = """
    #summary { height: 1; background: $panel; }
    #devices { height: auto; max-height: 10; padding: 0; }
    #problem { height: auto; color: $text-error; display: none; padding: 0 1; }
    #problem.shown { display: block; }
    """

    def compose(self) -> ComposeResult:
        """Lays the parts out."""
        yield Static(id="summary", markup=False)
        yield Static(id="problem", markup=False)
        yield Static(id="devices", markup=False)
        yield LineTable(
            COLUMNS, empty="Nothing here yet. Submit a trial: overnight submit train.py --lr 0.001", id="trials"
        )
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """The table has the keys."""
        self.query_one(LineTable).focus()

    def draw(self, snapshot: Snapshot) -> None:
        """Shows a snapshot."""
        now = datetime.now(UTC)
        self.query_one("#summary", Static).update(summary(snapshot))
        problem = self.query_one("#problem", Static)
        problem.set_class(bool(snapshot.problem), "shown")
        problem.update(look.plain(f"{snapshot.problem} Showing what was last heard.") if snapshot.problem else "")
        self.query_one("#devices", Static).update(self._devices(snapshot))
        labels = {device.id: f"{device.kind}:{device.index}" for device in snapshot.devices}
        self.query_one(LineTable).show([trial_row(trial, now, labels) for trial in snapshot.trials])

    def _devices(self, snapshot: Snapshot) -> Text:
        lines = [device_line(device) for device in snapshot.devices[:9]]
        if len(snapshot.devices) > 9:
            lines.append(Text(f" … and {len(snapshot.devices) - 9} more", style="bright_black"))
        return Text("\n").join(lines)
