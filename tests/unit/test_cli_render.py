"""How the command line shows things on narrow terminals, in pipes, and when output has a gap."""

import io
from datetime import UTC, datetime

from rich.console import Console

from overnight.cli import render, trials
from overnight.cli.session import Session
from overnight.core.enums import PriorityClass, RunKind, TrialState
from overnight.core.models.api import LeaderboardRow, LogChunk, Trial
from overnight.core.models.spec import Command, TrialConfig

NOW = datetime(2026, 11, 29, tzinfo=UTC)


def a_trial(name, **params):
    return Trial(
        id=f"tri-{name}", name=name, number=1, experiment="digits", sweep_id=None, proposal_id="prop-1",
        config=TrialConfig(experiment="digits", run=Command(kind=RunKind.SCRIPT, target="x.py")), params=params,
        config_hash="h", replicate=0, state=TrialState.COMPLETED, state_cause="", priority=PriorityClass.NORMAL, rank=0,
        value=0.9, step=352, attempts_made=1, retries_used=0, preemptions=0, mlflow_run_id=None, created_at=NOW,
        started_at=NOW, ended_at=NOW,
    )  # fmt: skip


def shown(renderable, width):
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(renderable)
    return console.file.getvalue()


def test_long_params_do_not_push_the_other_columns_away():
    page = shown(render.trials([a_trial("digits-1", c="A" * 10_000), a_trial("digits-2", lr=0.1)]), 80)
    lines = page.splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["trial", "state", "class", "value", "step", "time", "where", "params"]
    assert all(words in lines[1] for words in ("digits-1", "completed", "normal", "0.9", "352", "c=AAA", "…"))
    assert lines[2].rstrip().endswith("lr=0.1")
    assert all(len(line) <= 80 for line in lines)


def test_a_leaderboard_keeps_its_columns_too():
    row = LeaderboardRow(
        place=1, trial_id="tri-1", trial="digits-1", state=TrialState.COMPLETED, value=0.9917, step=352, seconds=3.0,
        params={"c": "A" * 10_000},
    )  # fmt: skip
    page = shown(render.leaderboard([row], "val_accuracy"), 80)
    assert all(words in page for words in ("digits-1", "val_accuracy", "0.9917", "completed", "352", "c=A"))


def test_lines_in_a_pipe_do_not_end_in_blanks(capsys):
    Session({}).console.print(render.trials([a_trial("digits-1", c="A" * 100), a_trial("digits-2", lr=0.1)]))
    out = capsys.readouterr().out
    assert "A" * 100 in out
    assert not any(line.endswith(" ") for line in out.splitlines())


def chunk(offset, text, attempt=1):
    return LogChunk(attempt=attempt, offset=offset, next_offset=offset + len(text), text=text, end=False)


def test_a_gap_in_the_output_is_told(capsys):
    chunks = [chunk(0, "head\n"), chunk(1_000_005, "tail\n"), chunk(7, "second\n", attempt=2)]
    trials.print_log(Session({}), chunks)
    out, err = capsys.readouterr()
    assert out == "head\ntail\nsecond\n"
    assert err.splitlines() == [
        "--- 1,000,000 bytes of a flood of output were not kept ---",
        "--- attempt 2 ---",
        "--- 7 bytes of a flood of output were not kept ---",
    ]


def test_the_last_lines_alone_have_no_gap(capsys):
    trials.print_log(Session({}), [chunk(500, "a\nb\n"), chunk(504, "c\n")], lines=1)
    out, err = capsys.readouterr()
    assert (out, err) == ("b\nc\n", "")
