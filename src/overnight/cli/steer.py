"""Telling trials what to do: ``cancel rerun hold unhold bump``. All five work alike."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from overnight.cli.options import DryRun, Output, OutputFormat, Reason, TrialRefs, command
from overnight.cli.session import Session, exit_code, session_of

if TYPE_CHECKING:
    from overnight.core.errors import OvernightError
    from overnight.core.models.api import Trial

Verb = Callable[..., "Trial"]
TEXT = OutputFormat.TEXT


def _apply(ctx: typer.Context, verb: str, refs: list[str], reason: str, dry_run: bool) -> None:
    """Applies a verb to each trial; goes on after one that refuses, and says so at the end."""
    from overnight.core.errors import OvernightError
    from overnight.core.states import END_STATES, can_transition

    session = session_of(ctx)
    done: list[Trial] = []
    failed: list[OvernightError] = []
    with session.client() as client:
        send: Verb = getattr(client, verb)
        for ref in dict.fromkeys(refs):
            try:
                if dry_run:
                    done.append(_checked(client.trial(ref), verb, can_transition, END_STATES))
                else:
                    done.append(send(ref, reason=reason))
            except OvernightError as error:
                if error.retryable or len(refs) == 1:
                    raise
                failed.append(error)
                if not session.json_output:
                    session.fail(error)
    _print(session, verb, done, failed, dry_run)
    if failed:
        raise typer.Exit(exit_code(failed[0]))


def _checked(trial: "Trial", verb: str, can_transition: Callable[..., bool], end_states: frozenset[object]) -> "Trial":
    """The trial, if the verb fits its state.

    Raises:
        IllegalTransitionError: It does not.
    """
    from overnight.core.enums import TrialState
    from overnight.core.errors import IllegalTransitionError

    fits = {
        "cancel": trial.state not in end_states or trial.state is TrialState.CANCELLED,
        "rerun": trial.state in end_states,
        "hold": can_transition(trial.state, TrialState.HELD) or trial.state is TrialState.HELD,
        "unhold": trial.state in (TrialState.QUEUED, TrialState.HELD),
        "bump": trial.state in (TrialState.QUEUED, TrialState.HELD),
    }
    if not fits[verb]:
        raise IllegalTransitionError(f"{trial.name} is {trial.state}: '{verb}' does not fit", hint="See: overnight ls")
    return trial


def _print(session: Session, verb: str, done: list["Trial"], failed: list["OvernightError"], dry_run: bool) -> None:
    if session.json_output:
        if len(done) + len(failed) == 1:
            session.emit(done[0])
        else:
            session.emit({"trials": done, "errors": [error.to_dict() for error in failed]})
        return
    from overnight.tui import format as look

    for trial in done:
        if dry_run:
            session.console.print(f"would {verb} {trial.name}, which is {trial.state}")
        else:
            session.console.print(look.state(trial.state).append(f"  {trial.name}"))


@command("overnight cancel digits-7 digits-8", "overnight cancel --reason 'diverges' digits-7")
def cancel(
    ctx: typer.Context, trials: TrialRefs, reason: Reason = "", dry_run: DryRun = False, output: Output = TEXT
) -> None:
    """Stop trials for good. A running one saves and leaves within the grace."""
    _apply(ctx, "cancel", trials, reason, dry_run)


@command("overnight rerun digits-7              # goes on from its newest checkpoint")
def rerun(
    ctx: typer.Context, trials: TrialRefs, reason: Reason = "", dry_run: DryRun = False, output: Output = TEXT
) -> None:
    """Queue ended trials again; they go on from their newest checkpoint."""
    _apply(ctx, "rerun", trials, reason, dry_run)


@command("overnight hold digits-9", "overnight unhold digits-9             # undoes it")
def hold(
    ctx: typer.Context, trials: TrialRefs, reason: Reason = "", dry_run: DryRun = False, output: Output = TEXT
) -> None:
    """Keep queued trials from starting."""
    _apply(ctx, "hold", trials, reason, dry_run)


@command("overnight unhold digits-9")
def unhold(
    ctx: typer.Context, trials: TrialRefs, reason: Reason = "", dry_run: DryRun = False, output: Output = TEXT
) -> None:
    """Let held trials start, at their old place in the queue."""
    _apply(ctx, "unhold", trials, reason, dry_run)


@command("overnight bump digits-9               # next of its class")
def bump(
    ctx: typer.Context, trials: TrialRefs, reason: Reason = "", dry_run: DryRun = False, output: Output = TEXT
) -> None:
    """Move queued trials to the front of their class."""
    _apply(ctx, "bump", trials, reason, dry_run)
