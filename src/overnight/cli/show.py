"""``overnight show``: everything about one trial. A failed one says why, with its last lines of output."""

from typing import TYPE_CHECKING, Any

import typer

from overnight.cli.options import Output, OutputFormat, TrialRef, command
from overnight.cli.session import Session, session_of

if TYPE_CHECKING:
    from overnight.core.models.api import Attempt, Trial, TrialError

SHOWN_LINES = 20


@command("overnight show digits-7", "overnight show -o json digits-7 | jq .data.attempts")
def show(ctx: typer.Context, trial: TrialRef, output: Output = OutputFormat.TEXT) -> None:
    """Everything about one trial; a failed one says why."""
    session = session_of(ctx)
    with session.client() as client:
        found = client.trial(trial)
    if session.json_output:
        session.emit(found)
        return
    _print_facts(session, found)
    _print_attempts(session, found)
    if found.error is not None:
        _print_error(session, found.error)
    _print_next(session, found)


def _print_facts(session: Session, trial: "Trial") -> None:
    from overnight.cli import render
    from overnight.tui import format as look

    run = trial.config.run
    command_line = " ".join([run.target, *run.argv])
    state = look.state(trial.state)
    if trial.state_cause:
        state.append("  ").append_text(render.text(trial.state_cause, limit=300))
    rows: list[tuple[str, Any]] = [
        ("trial", render.text(f"{trial.name}  ({trial.id})")),
        ("state", state),
        ("runs", f"{run.kind} {command_line}"),
        ("params", look.params(trial.params, 2000)),
    ]
    objective = trial.config.objective
    if trial.value is not None or objective is not None:
        name = objective.metric if objective else "value"
        rows.append((name, "none reported" if trial.value is None else f"{trial.value:.6g}  at step {trial.step}"))
    rows += [
        ("asks for", _compute(trial)),
        ("priority", f"{trial.priority}" + (f", rank {trial.rank}" if trial.rank else "")),
        ("submitted", render.ago(trial.created_at)),
    ]
    if trial.sweep_id:
        rows.append(("sweep", trial.sweep_id))
    restarts = sum(attempt.generation - 1 for attempt in trial.attempts)
    if trial.preemptions or trial.retries_used or restarts:
        yields, retries = _count(trial.preemptions, "yield"), _count(trial.retries_used, "retry", "retries")
        inside = f", {_count(restarts, 'restart')} inside an attempt" if restarts else ""
        rows.append(("disturbed", f"{yields}, {retries} used{inside}"))
    if trial.config.python:
        rows.append(("python", trial.config.python))
    if trial.config.code:
        commit, _, dirty = trial.config.env.get("OVERNIGHT_GIT_COMMIT", "").partition("+")
        git = f"  git {commit[:10]}{'+' + dirty if dirty else ''}" if commit else ""
        rows.append(("code", f"{trial.config.code[:12]}{git}"))
    if trial.mlflow_run_id:
        rows.append(("mlflow run", trial.mlflow_run_id))
    if trial.dir:
        rows.append(("folder", trial.dir))
    session.console.print(render.pairs(rows))


def _count(number: int | str, one: str, many: str = "") -> str:
    """``1 device``, ``2-8 devices``."""
    return f"{number} {one if str(number) == '1' else many or one + 's'}"


def _compute(trial: "Trial") -> str:
    compute = trial.config.compute
    text = _count(compute.gpus, "device")
    if compute.type:
        text += f" of {' or '.join(compute.type)}"
    if compute.max_time_seconds:
        from overnight.tui import format as look

        text += f", at most {look.duration(compute.max_time_seconds)}"
    return text


def _print_attempts(session: Session, trial: "Trial") -> None:
    from overnight.cli import render
    from overnight.tui import format as look

    if trial.attempts:
        table = render.table("attempt", "outcome", "began", "took", "where", "cause", right=("attempt",))
        for attempt in trial.attempts:
            table.add_row(
                str(attempt.number),
                str(attempt.outcome or "running"),
                render.ago(attempt.started_at or attempt.created_at),
                look.duration(_seconds(attempt)),
                look.plain(" ".join(attempt.devices) or "-"),
                look.plain(attempt.cause),
            )
        session.console.print()
        session.console.print(table)
    if trial.checkpoints:
        newest = max(trial.checkpoints, key=lambda saved: (saved.attempt, saved.generation, saved.step))
        line = f"{_count(len(trial.checkpoints), 'checkpoint')}, newest at step {newest.step}: {newest.uri}"
        session.console.print()
        session.console.print(render.text(line), soft_wrap=True)


def _seconds(attempt: "Attempt") -> float:
    from datetime import UTC, datetime

    start = attempt.started_at or attempt.created_at
    return ((attempt.ended_at or datetime.now(UTC)) - start).total_seconds()


def _print_error(session: Session, error: "TrialError") -> None:
    from overnight.cli import render

    console = session.console
    console.print()
    where = f" at step {error.step}" if error.step else ""
    console.print(render.text(f"{error.type}{where}: {error.message}", limit=4000), style="bold red", soft_wrap=True)
    if error.traceback:
        console.print(render.text(error.traceback.rstrip(), limit=20_000), soft_wrap=True)
    if lines := _before_traceback(error):
        console.print()
        console.print("last lines of output", style="bold")
        for line in lines[-SHOWN_LINES:]:
            console.print(render.text(f"  {line}", limit=500), soft_wrap=True)


def _before_traceback(error: "TrialError") -> list[str]:
    """The last lines without the traceback, where that is shown already."""
    lines = list(error.last_lines)
    if error.traceback and "Traceback (most recent call last):" in lines:
        start = len(lines) - 1 - lines[::-1].index("Traceback (most recent call last):")
        return lines[:start]
    return lines


def _print_next(session: Session, trial: "Trial") -> None:
    from overnight.core.enums import TrialState

    match trial.state:
        case TrialState.FAILED | TrialState.CANCELLED:
            words = f"overnight logs {trial.name}   overnight rerun {trial.name}"
        case TrialState.QUEUED | TrialState.HELD:
            words = f"overnight why {trial.name}"
        case TrialState.COMPLETED | TrialState.PRUNED:
            words = f"overnight logs {trial.name}   overnight report {trial.experiment}"
        case _:
            words = f"overnight logs -f {trial.name}"
    session.note(f"next:  {words}")
