"""What a training of a soak left behind, and how it differs from an undisturbed one."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_plan import Config

from overnight.trainer.data.audit import audit, lineage, read_forks
from overnight.trainer.data.entries import Token, read_attempts


@dataclass(frozen=True)
class Outcome:
    """What a finished training left: everything that must be equal to that of an undisturbed one."""

    final: dict[str, Any]
    notes: dict[int, dict[int, list[Any]]]
    every_note: dict[int, dict[int, set[tuple[Any, ...]]]]
    order: list[tuple[Any, ...]]
    metrics: dict[tuple[str, int], Any]
    audit: dict[str, int]


Heard = dict[Token, list[tuple[str, dict[str, Any]]]]
"""What each start told its supervisor: routes and bodies."""


def read_outcome(folder: Path, heard: Heard, max_ranks: int) -> Outcome:
    """Reads it from the trial's folder, and from what the supervisors were told."""
    newest = max((folder / "attempts").glob("*/final.json"))
    forks = read_forks(folder / "checkpoints")
    limits = lineage(forks, set(forks))
    notes: dict[int, dict[int, list[Any]]] = {}
    every_note: dict[int, dict[int, set[tuple[Any, ...]]]] = {}
    for rank in range(max_ranks):
        notes[rank], every_note[rank] = {}, {}
        for token, line in read_notes(folder, rank):
            step, *values = json.loads(line)
            if step <= limits.get(token, 0):
                notes[rank].setdefault(step, []).append(values)
            every_note[rank].setdefault(step, set()).add(tuple(values))
    entries = [
        (entry.loader, entry.step, entry.epoch, entry.first, tuple(entry.indices.tolist()))
        for record in read_attempts(folder)
        for entry in record.entries
        if entry.step < limits.get((entry.attempt, entry.generation), 0)
    ]
    counted = dataclasses.asdict(audit(folder))
    return Outcome(
        json.loads(newest.read_text()), notes, every_note, sorted(entries), metrics_of(heard, limits), counted
    )


def metrics_of(heard: Heard, limits: dict[Token, float]) -> dict[tuple[str, int], Any]:
    """The metrics of the surviving lineage: of each token's up to the step at which the next one forked."""
    kept: dict[tuple[str, int], Any] = {}
    for token in sorted(limits):
        for route, body in heard.get(token, []):
            rows = body.get("metrics", []) if route == "/v1/push" else []
            kept |= {(key, step): value for key, step, value, _ in rows if step <= limits[token]}
            if route == "/v1/report" and body["step"] <= limits[token]:
                kept |= {(f"report:{key}", body["step"]): value for key, value in body["values"].items()}
    return kept


def read_notes(folder: Path, rank: int) -> Iterator[tuple[Token, bytes]]:
    """What a rank wrote down, start by start."""
    paths = {tuple(map(int, path.name.split("-")[1].split("."))): path for path in folder.glob(f"notes-*-{rank}.jsonl")}
    for token in sorted(paths):
        for line in paths[token].read_bytes().splitlines():
            yield (token[0], token[1]), line


def differences(outcome: Outcome, reference: Outcome, config: Config) -> list[str]:
    """In words; empty if the disturbed training equals the undisturbed one."""
    found = []
    if outcome.order != reference.order:
        odd = sorted(set(outcome.order) ^ set(reference.order))[:3]
        found.append(f"the order of samples differs: {len(outcome.order)}, not {len(reference.order)}: {odd}")
    if outcome.audit["repeated"] or outcome.audit["skipped"] or outcome.audit != reference.audit:
        found.append(f"the audit differs: {outcome.audit}, not {reference.audit}")
    if outcome.final["step"] != reference.final["step"]:
        found.append(f"it ended at step {outcome.final['step']}, not {reference.final['step']}")
    return found if config.elastic else found + differing_numbers(outcome, reference)


def differing_numbers(outcome: Outcome, reference: Outcome) -> list[str]:
    """What must be equal to the last bit where the number of ranks stays."""
    found = [] if outcome.final == reference.final else ["the weights differ"]
    for rank, notes in reference.notes.items():
        steps = differing(outcome.notes[rank], notes)
        if steps:
            found.append(f"the losses of rank {rank} differ at steps {steps}")
        known = reference.every_note[rank]
        strange = [step for step, values in outcome.every_note[rank].items() if values - known.get(step, set())]
        if strange:
            found.append(f"rank {rank} computed something else at steps {sorted(strange)[:5]}, kept or lost")
    if names := differing(outcome.metrics, reference.metrics):
        found.append(f"the metrics differ: {names}")
    return found


def differing(one: dict[Any, Any], other: dict[Any, Any]) -> list[Any]:
    """The first few keys at which two dicts differ."""
    return [key for key in sorted({**one, **other}) if one.get(key) != other.get(key)][:5]
