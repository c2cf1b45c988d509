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


def _steering(verb: str, summary: str, *examples: str) -> typer.Typer:
    """The command of a verb. All take the same words; only what the server does differs."""

    def steer(
        ctx: typer.Context, trials: TrialRefs, reason: Reason = "", dry_run: DryRun = False, output: Output = TEXT
    ) -> None:
        _apply(ctx, verb, trials, reason, dry_run)

    steer.__name__, steer.__doc__ = verb, summary
    return command(*examples)(steer)


cancel = _steering(
    "cancel",
    "Stop trials for good. A running one saves and leaves within the grace.",
    "overnight cancel digits-7 digits-8",
    "overnight cancel --reason 'diverges' digits-7",
)
rerun = _steering(
    "rerun",
    "Queue ended trials again; they go on from their newest checkpoint.",
    "overnight rerun digits-7              # goes on from its newest checkpoint",
)
hold = _steering(
    "hold",
    "Keep queued trials from starting.",
    "overnight hold digits-9",
    "overnight unhold digits-9             # undoes it",
)
unhold = _steering(
    "unhold",
    "Let held trials start, at their old place in the queue.",
    "overnight unhold digits-9",
)
bump = _steering(
    "bump",
    "Move queued trials to the front of their class.",
    "overnight bump digits-9               # next of its class",
)
