"""``overnight submit``: queue a script or a spec file; what runs is the code as it is now."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overnight.cli.options import DryRun, Experiment, Gpus, Key, Output, OutputFormat, Priority, command
from overnight.cli.session import FAILED, Session, session_of

if TYPE_CHECKING:
    from overnight.agents.client import Client
    from overnight.cli.preparing import Prepared
    from overnight.core.models.api import Proposal, ProposalIn

RESERVED = (
    "--gpus", "--priority", "--objective", "--experiment", "--params", "--param", "--python", "--args", "--replicates",
    "--note", "--hold", "--wait", "--follow", "--key", "--dry-run", "--output", "--schema",
)  # fmt: skip
"""Own options, which must not be taken for params when somebody puts them behind the script."""


def _print_schema(value: bool) -> None:
    if value:
        import json

        from overnight.core.specfile import json_schema

        typer.echo(json.dumps(json_schema(), indent=2))
        raise typer.Exit


@command(
    "overnight submit train.py --lr 3e-4 --depth 12          # words behind the script are its params",
    "overnight submit --gpus 2 --priority urgent train.py    # options stand before the script",
    "overnight submit --objective val_acc:max train.py       # what it reports, and which way is better",
    "overnight submit -p opt.lr=3e-4 --follow spec.yaml      # a spec file; then watch its output",
    "overnight submit train.py --lr 3e-4 -- --verbose        # words behind -- are passed on as they are",
    "overnight submit -- ./anything --flag                   # any program, with its words as they are",
    "overnight submit --schema > spec.schema.json            # the JSON schema of spec files",
    raw_arguments=True,
)
def submit(
    ctx: typer.Context,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A .py script, a .yaml or .toml spec, or a program.")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="--NAME VALUE", help="Params of the script.")] = None,
    gpus: Gpus = None,
    priority: Priority = None,
    objective: Annotated[
        str | None, typer.Option(metavar="METRIC[:MODE]", help="What to compare by; MODE is min or max.")
    ] = None,
    experiment: Experiment = None,
    param: Annotated[list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="One param.")] = None,
    params: Annotated[str | None, typer.Option(metavar="JSON", help="Many params, as a JSON object.")] = None,
    python: Annotated[str | None, typer.Option(metavar="PATH", help="Interpreter or virtual environment.")] = None,
    args: Annotated[str | None, typer.Option(metavar="STYLE", help="flags, hydra, json, env or none.")] = None,
    replicates: Annotated[int | None, typer.Option(metavar="N", help="Trials that differ in their seed only.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Why, for people.")] = "",
    hold: Annotated[bool, typer.Option("--hold", help="Do not start it yet; see 'unhold'.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit 1 if it fails.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print its output until the end.")] = False,
    dry_run: DryRun = False,
    key: Key = None,
    output: Output = OutputFormat.TEXT,
    schema: Annotated[
        bool, typer.Option("--schema", callback=_print_schema, is_eager=True, help="Print the JSON schema of specs.")
    ] = False,
) -> None:
    """Queue a script, a spec file or a program.

    The code is copied now: what runs is what was submitted, whatever changes afterwards. Without a script's own
    --name value words, everything comes from the spec.
    """
    from overnight.cli import flags, preparing
    from overnight.core import specfile
    from overnight.core.models.api import ProposalIn
    from overnight.core.spectext import Document

    session = session_of(ctx)
    given = {**flags.parse_object(params), **flags.parse_pairs(param or ())}
    overrides = preparing.Overrides(experiment, gpus, priority, python, _style(args), objective, given)
    prepared = preparing.prepare(target, words or (), overrides, session.settings, session.env, RESERVED)
    if prepared.spec.sweep is not None:
        session.note(f"note: {target} has a sweep; this queues one trial of it. To search: overnight sweep {target}")
    data = {
        "config": prepared.config,
        "params": _canonical(prepared.params),
        "replicates": prepared.spec.replicates if replicates is None else replicates,
        "key": key,
        "note": note or prepared.spec.note,
        "hold": hold,
        "dry_run": dry_run,
    }
    proposal = specfile.validate(ProposalIn, data, Document({}, "the command line"))
    with session.client() as client:
        answer = send(client, prepared, proposal)
        _print_answer(session, answer, prepared, dry_run, hold)
        if (wait or follow) and not dry_run:
            raise typer.Exit(watch(session, client, [trial.name for trial in answer.trials], follow=follow))


def _style(text: str | None) -> Any:
    from overnight.core.enums import ArgsStyle
    from overnight.core.errors import InvalidSpecError

    if text is not None and text not in list(ArgsStyle):
        raise InvalidSpecError(f"--args {text!r} is no style", hint=f"Use one of {', '.join(ArgsStyle)}.")
    return ArgsStyle(text) if text else None


def _canonical(params: dict[str, Any]) -> dict[str, Any]:
    from overnight.core.canonical import canonical

    result = canonical(params)
    assert isinstance(result, dict)
    return result


def send(client: "Client", prepared: "Prepared", proposal: "ProposalIn") -> "Proposal":
    """Sends code and proposal. A dry run sends no code: without it the server checks all but duplicates."""
    if not proposal.dry_run:
        client.upload_code(prepared.snapshot.digest, prepared.snapshot.read)
    elif not client.has_code(prepared.snapshot.digest):
        bare = proposal.config.model_copy(update={"code": None})
        proposal = proposal.model_copy(update={"config": bare})
    return client.propose(proposal)


def _print_answer(session: Session, answer: "Proposal", prepared: "Prepared", dry_run: bool, hold: bool) -> None:
    from overnight.core.enums import ProposalStatus
    from overnight.core.errors import RefusedError

    if session.json_output:
        session.emit(answer)
    if answer.status is ProposalStatus.REFUSED:
        raise RefusedError(f"refused: {answer.hint}")
    if session.json_output:
        return
    names = [trial.name for trial in answer.trials]
    if dry_run:
        manifest = prepared.snapshot.manifest
        session.console.print(f"would be {answer.status}: {prepared.config.experiment}, {len(names) or 1} trial(s)")
        session.console.print(f"code: {manifest['files']} files, {manifest['bytes']:,} bytes")
        return
    if answer.status is ProposalStatus.DUPLICATE:
        session.console.print(f"{' '.join(names)}: the same work was submitted before; nothing new was queued")
        session.note(f"hint:  overnight show {names[0]}, or overnight rerun {names[0]}" if names else "")
        return
    state = "held" if hold else "queued"
    session.console.print(f"{' '.join(names)} {state}" + (f": {answer.hint}" if answer.hint else ""))
    if sys.stdout.isatty():
        session.note(f"next:  overnight logs -f {names[0]}   overnight why {names[0]}")


def watch(session: Session, client: "Client", names: list[str], *, follow: bool) -> int:
    """Waits for the end of trials, with ``follow`` printing the output of the first; returns the exit code."""
    from overnight.cli.trials import print_log
    from overnight.core.enums import TrialState

    if follow and names:
        print_log(session, client.logs(names[0], follow=True))
    ended = client.wait(names)
    if not session.json_output:
        from overnight.tui import format as look

        for trial in ended:
            line = look.state(trial.state).append(f"  {trial.name}")
            if trial.value is not None:
                line.append(f"  {trial.value:.6g}")
            session.notes.print(line)
            if trial.state is TrialState.FAILED:
                session.note(f"hint:  overnight show {trial.name}")
    good = (TrialState.COMPLETED, TrialState.PRUNED)
    return 0 if all(trial.state in good for trial in ended) else FAILED
