"""How the command line shows things: calm tables and pairs, foreign text sanitised and never read as markup."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from overnight.core.enums import TrialState
from overnight.core.states import END_STATES
from overnight.core.text import sanitize
from overnight.tui import format as look

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType

    from overnight.core.models.api import LeaderboardRow, Sweep, Trial

STATE_ORDER = (
    TrialState.RUNNING,
    TrialState.STARTING,
    TrialState.YIELDING,
    TrialState.STOPPING,
    TrialState.QUEUED,
    TrialState.HELD,
    TrialState.COMPLETED,
    TrialState.PRUNED,
    TrialState.FAILED,
    TrialState.CANCELLED,
)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines. The last column gives way when the terminal is narrow: its text ends in an ellipsis."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for place, column in enumerate(columns, 1):
        justify: JustifyMethod = "right" if column in right else "left"
        # Rich narrows columns that may wrap before any other; the cells themselves never wrap.
        result.add_column(
            Text(column, no_wrap=True), justify=justify, no_wrap=place < len(columns), overflow="ellipsis"
        )
    return result


def pairs(rows: Iterable[tuple[str, "RenderableType | str"]]) -> Table:
    """Names and values, one a line."""
    result = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column(style="bright_black", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(name, text(value) if isinstance(value, str) else value)
    return result


def text(value: object, *, limit: int = 2000) -> Text:
    """Foreign text, perhaps of several lines, harmless."""
    return Text(sanitize(str(value), limit=limit))


def ago(at: datetime | None) -> Text:
    """How long ago."""
    if at is None:
        return Text("-")
    return Text(f"{look.duration((datetime.now(UTC) - at).total_seconds())} ago", no_wrap=True)


def counts(by_state: dict[TrialState, int]) -> Text:
    """``3 running  2 queued  5 completed``."""
    words = Text()
    for state in STATE_ORDER:
        if number := by_state.get(state, 0):
            sign, colour = look.STATE_LOOK[state]
            words.append(f"{sign} {number} {state}", style=colour).append("  ")
    words.rstrip()
    return words if words else Text("no trials")


def trials(items: Iterable["Trial"], *, positions: bool = False) -> Table:
    """The table of ``ls`` and ``status``."""
    found = list(items)
    first = ("place",) if positions else ()
    result = table(
        *first, "trial", "state", "class", "value", "step", "time", "where", "params", right=("value", "step")
    )
    now = datetime.now(UTC)
    for trial in found:
        ended = trial.ended_at if trial.state in END_STATES else None
        row: list[Any] = [
            look.plain(trial.name, 40),
            look.state(trial.state),
            look.priority(trial.priority),
            look.number(trial.value),
            str(trial.step) if trial.step else "-",
            look.elapsed(trial.started_at, ended, now),
            look.plain(" ".join(trial.devices) or "-", 30),
            look.params(trial.params),
        ]
        result.add_row(*([str(trial.position or "-")] if positions else []), *row)
    return result


def leaderboard(rows: Iterable["LeaderboardRow"], metric: str | None) -> Table:
    """The best trials, best first."""
    name = sanitize(metric or "value", limit=30, one_line=True)
    result = table("", "trial", name, "state", "step", "time", "params", right=("", name, "step"))
    for row in rows:
        result.add_row(
            str(row.place),
            look.plain(row.trial, 40),
            Text("-" if row.value is None else f"{row.value:.6g}", style="bold" if row.place == 1 else ""),
            look.state(row.state),
            str(row.step),
            look.duration(row.seconds),
            look.params(row.params),
        )
    return result


def sweep_line(sweep: "Sweep") -> Text:
    """One line about a sweep."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(sweep.id, style="bold").append("  ").append_text(look.plain(sweep.experiment, 40))
    line.append(f"  {sweep.state}  {sweep.sweep.planner}  {sweep.proposed}/{sweep.sweep.trials}  ")
    line.append_text(counts(sweep.trials_by_state))
    if sweep.best is not None and sweep.best.value is not None:
        line.append("  best ").append(f"{sweep.best.value:.6g}", style="bold")
    if sweep.next_run_at is not None:
        line.append(f"  next {sweep.next_run_at.astimezone():%a %H:%M}")
    return line
