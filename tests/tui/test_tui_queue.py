"""The queue screen drawn from snapshots: hostile text, many rows, small terminals, a server that is away."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from textual.widgets import Static

from overnight.core.enums import DeviceState, PriorityClass, RunKind, TrialState
from overnight.core.models.api import Device, Status, Trial, TrialError
from overnight.core.models.spec import Command, TrialConfig
from overnight.tui.app import OvernightApp
from overnight.tui.screens.queue import COLUMNS, QueueScreen
from overnight.tui.snapshot import Snapshot
from overnight.tui.widgets.line_table import LineTable, fit_columns

AT = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)
HOSTILE = "[/bold]\x1b]0;owned\x07\u202eevil\n🎉"


def trial(number: int, state: TrialState, **more: Any) -> Trial:
    values: dict[str, Any] = {
        "id": f"tri-{number}",
        "name": f"digits-{number}",
        "number": number,
        "experiment": "digits",
        "sweep_id": None,
        "proposal_id": "prop-1",
        "config": TrialConfig(experiment="digits", run=Command(kind=RunKind.SCRIPT, target="x.py")),
        "params": {"lr": 0.001, "note": HOSTILE},
        "config_hash": "0" * 32,
        "replicate": 0,
        "state": state,
        "state_cause": "",
        "priority": PriorityClass.NORMAL,
        "rank": 0,
        "value": 0.91234,
        "step": 120,
        "attempts_made": 1,
        "retries_used": 0,
        "preemptions": 0,
        "mlflow_run_id": None,
        "created_at": AT,
        "started_at": AT,
        "ended_at": AT if state in (TrialState.COMPLETED, TrialState.FAILED) else None,
    }
    return Trial(**{**values, **more})


def device(index: int, **more: Any) -> Device:
    values: dict[str, Any] = {
        "id": f"node-1/{index}",
        "node_id": "node-1",
        "index": index,
        "kind": "fake",
        "type": "fake-gpu",
        "memory_bytes": 1,
        "state": DeviceState.HEALTHY,
        "cause": "",
        "until": None,
        "trial_id": None,
        "trial_name": None,
        "attempt_id": None,
        "since": None,
    }
    return Device(**{**values, **more})


STATUS = Status(
    version="0",
    home="/h",
    pid=1,
    started_at=AT,
    trials_by_state={TrialState.RUNNING: 1, TrialState.QUEUED: 2, TrialState.FAILED: 1},
    devices=(
        device(0, trial_id="tri-1", trial_name="digits-1", since=AT),
        device(1, state=DeviceState.QUARANTINED, cause="xid_79 " + HOSTILE),
    ),
    nodes=(),
    running=(),
    queued=2,
    sweeps=(),
    mlflow_uri="sqlite:///m",
    mlflow_lag_rows=0,
    store_url="sqlite:///s",
)
SNAPSHOT = Snapshot(
    status=STATUS,
    running=(trial(1, TrialState.RUNNING, devices=("node-1/0",)),),
    queued=(trial(2, TrialState.QUEUED, state_cause="device xid_79", started_at=None),),
    ended=(
        trial(3, TrialState.COMPLETED),
        trial(4, TrialState.FAILED, error=TrialError(type="ValueError", message=f"bad {HOSTILE}")),
    ),
)


class Scripted:
    """A source whose snapshots the test puts."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.queue: asyncio.Queue[Snapshot] = asyncio.Queue()
        for snapshot in snapshots:
            self.queue.put_nowait(snapshot)

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        while True:
            yield await self.queue.get()


def screen_text(app: OvernightApp) -> str:
    table = app.screen.query_one(LineTable)
    lines = [table.render_line(y).text for y in range(table.size.height)]
    statics = [str(widget.render()) for widget in app.screen.query(Static)]
    return "\n".join(statics + lines)


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 12), (20, 6)])
async def test_every_size_shows_the_trials_and_no_line_is_too_long(size: tuple[int, int]) -> None:
    app = OvernightApp(Scripted(SNAPSHOT))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        table = app.screen.query_one(LineTable)
        assert [row.id for row in table.rows] == ["tri-1", "tri-2", "tri-3", "tri-4"]
        assert all(table.render_line(y).cell_length <= size[0] for y in range(6))
        assert "digits-1" in table.render_line(1).text


async def test_hostile_text_is_shown_and_obeyed_by_nobody() -> None:
    app = OvernightApp(Scripted(SNAPSHOT))
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        shown = screen_text(app)
        assert "[/bold]" in shown
        assert "ValueError: bad [/bold]" in shown
        assert not {"\x1b", "\x07", "\u202e"} & set(shown)


async def test_a_server_that_is_away_keeps_the_last_picture_and_says_so() -> None:
    source = Scripted(SNAPSHOT)
    app = OvernightApp(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        source.queue.put_nowait(replace(SNAPSHOT, problem="no server answers"))
        await pilot.pause()
        problem = app.screen.query_one("#problem", Static)
        assert problem.display
        assert "no server answers" in str(problem.render())
        assert len(app.screen.query_one(LineTable).rows) == 4
        source.queue.put_nowait(SNAPSHOT)
        await pilot.pause()
        assert not problem.display


async def test_the_cursor_stays_on_its_trial_when_rows_move() -> None:
    source = Scripted(SNAPSHOT)
    app = OvernightApp(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("down", "down")
        table = app.screen.query_one(LineTable)
        assert table.cursor_id == "tri-3"
        source.queue.put_nowait(replace(SNAPSHOT, ended=(trial(9, TrialState.COMPLETED), *SNAPSHOT.ended)))
        await pilot.pause()
        assert (table.cursor_id, table.cursor) == ("tri-3", 3)


async def test_ten_thousand_rows_scroll_to_the_end() -> None:
    many = replace(SNAPSHOT, queued=tuple(trial(n, TrialState.QUEUED) for n in range(10, 10_010)))
    app = OvernightApp(Scripted(many))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("end")
        await pilot.pause()
        table = app.screen.query_one(LineTable)
        assert table.cursor_id == "tri-4"
        visible = [table.render_line(y).text for y in range(table.size.height)]
        assert any("digits-4 " in line for line in visible)
        assert "Trial" in visible[0]


async def test_an_empty_house_says_what_to_type() -> None:
    app = OvernightApp(Scripted(Snapshot(status=STATUS.model_copy(update={"trials_by_state": {}}))))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "overnight submit" in screen_text(app)
        assert isinstance(app.screen, QueueScreen)


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20, 5])
def test_columns_fit_and_the_trial_goes_last(width: int) -> None:
    fitted = fit_columns(COLUMNS, width)
    assert fitted[0][0].key == "trial"
    assert len(fitted) == 1 or sum(size + 1 for _, size in fitted) <= width
