"""Proposals become trials, a duplicate's trials, or a refusal; a key makes asking twice safe.

Many proposals are one set of statements, not a loop of them: a thousand at once cost about as much as thirty singly.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from overnight.core.canonical import canonical, digest
from overnight.core.enums import CLASS_ORDER, ProposalStatus, TrialState
from overnight.core.errors import ConflictError, NotFoundError, OvernightError, UnsatisfiableError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Proposal, ProposalIn, Trial
from overnight.store import events, experiments, models, outbox, trials
from overnight.store.events import NewEvent
from overnight.store.experiments import ExperimentRow
from overnight.store.idempotency import fingerprint, key_reused
from overnight.store.models import storable
from overnight.store.sweeps import no_sweep
from overnight.store.writer import touch

_TABLE = models.proposals
_TRIALS = models.trials
_INSERT_PROPOSALS = sa.insert(_TABLE)
_INSERT_TRIALS = sa.insert(_TRIALS)
# Built once: building them anew for each request costs a third of its time.
_BY_KEY = sa.select(_TABLE).where(
    _TABLE.c.actor == sa.bindparam("who"), _TABLE.c.key.in_(sa.bindparam("keys", expanding=True))
)
_SAME_WORK = (
    sa.select(_TRIALS.c.id, _TRIALS.c.config_hash)
    .where(_TRIALS.c.experiment_id == sa.bindparam("experiment"))
    .where(_TRIALS.c.config_hash.in_(sa.bindparam("hashes", expanding=True)))
    .where(_TRIALS.c.state.not_in((TrialState.FAILED.value, TrialState.CANCELLED.value)))
    .order_by(_TRIALS.c.seq)
)
"""Trials that failed or were cancelled are no duplicates: proposing them again is asking for another try."""
_CHUNK = 500

_Hash = tuple[str, str]
"""Experiment id and config hash: what makes two trials the same work."""


@dataclass(slots=True)
class _Draft:
    """A proposal on its way. ``answer`` is set as soon as it is known, and then nothing more is written for it."""

    proposal: ProposalIn
    params: dict[str, Any]
    hashes: list[str]
    body_hash: str | None
    experiment: ExperimentRow | None = None
    id: str = ""
    status: ProposalStatus = ProposalStatus.ACCEPTED
    hint: str = ""
    new: dict[int, str] = field(default_factory=dict)  # trial ids by replicate, of those that no trial has yet
    trial_ids: list[str] = field(default_factory=list)
    same_as: "_Draft | None" = None
    answer: Proposal | OvernightError | None = None

    @property
    def keys(self) -> list[_Hash]:
        """One per replicate."""
        assert self.experiment is not None
        return [(self.experiment.id, config_hash) for config_hash in self.hashes]


def config_hash(proposal: ProposalIn, params: Any, replicate: int) -> str:
    """What makes two trials the same work: what is run, the canonical params, the objective and the replicate.

    Raises:
        InvalidParamsError: No canonical form.
    """
    return digest({"config": proposal.config.identity, "params": params, "replicate": replicate})


def accept(
    conn: sa.Connection,
    *,
    ids: IdFactory,
    now: datetime,
    actor: str,
    proposal: ProposalIn,
    max_devices: int | None = None,
) -> Proposal:
    """Canonicalises, finds duplicates, and writes proposal, trials, events and outbox rows in one go.

    The answer's status is ``accepted`` (``trials`` holds the new ones, QUEUED or HELD), ``duplicate`` (the existing
    ones of the same experiment; FAILED and CANCELLED ones do not count) or ``refused`` (another objective than the
    experiment's).

    Args:
        conn: Of a store write. A ``dry_run`` leaves nothing in it.
        ids: Makes the ids of proposal, trials and experiment.
        now: Wall time, for the record.
        actor: Who asks; keys are their own.
        proposal: What is asked.
        max_devices: What the pool could ever give; None skips the check.

    Raises:
        InvalidParamsError: The params have no canonical form.
        UnsatisfiableError: More devices than ``max_devices``.
        KeyReusedError: The key came with another body.
        NotFoundError: No such sweep.
    """
    [answer] = accept_many(conn, ids=ids, now=now, actor=actor, proposals=[proposal], max_devices=max_devices)
    if isinstance(answer, OvernightError):
        raise answer
    return answer


def accept_many(
    conn: sa.Connection,
    *,
    ids: IdFactory,
    now: datetime,
    actor: str,
    proposals: Sequence[ProposalIn],
    max_devices: int | None = None,
) -> list[Proposal | OvernightError]:
    """:func:`accept` for many; each gets its own answer, and a bad one does not hurt the others.

    Of two that are the same in one call the second is a duplicate of the first.
    """
    answers: dict[int, Proposal | OvernightError] = {}
    real: list[tuple[int, _Draft]] = []
    for index, proposal in enumerate(proposals):
        try:
            draft = _draft(proposal, max_devices)
        except OvernightError as error:
            answers[index] = error
            continue
        if proposal.dry_run:
            with conn.begin_nested() as savepoint:
                [answers[index]] = _accept(conn, ids, now, actor, [draft])
                savepoint.rollback()
        else:
            real.append((index, draft))
    found = _accept(conn, ids, now, actor, [draft for _, draft in real])
    answers |= {index: answer for (index, _), answer in zip(real, found, strict=True)}
    return [answers[index] for index in range(len(proposals))]


def _draft(proposal: ProposalIn, max_devices: int | None) -> _Draft:
    asked = proposal.config.compute.min_devices
    if max_devices is not None and asked > max_devices:
        raise UnsatisfiableError(
            f"{asked} devices were asked for, the pool has at most {max_devices}",
            hint="Ask for less; `overnight devices` shows what there is.",
        )
    params: Any = canonical(proposal.params)
    return _Draft(
        proposal=proposal,
        params=params,
        hashes=[config_hash(proposal, params, replicate) for replicate in range(proposal.replicates)],
        body_hash=None if proposal.key is None else fingerprint(proposal),
    )


def _accept(
    conn: sa.Connection, ids: IdFactory, now: datetime, actor: str, drafts: Sequence[_Draft]
) -> list[Proposal | OvernightError]:
    _answer_known_keys(conn, actor, drafts)
    _attach_experiments(conn, ids, now, actor, drafts)
    _require_sweeps(conn, drafts)
    _plan(conn, ids, drafts)
    _write(conn, now, actor, [draft for draft in drafts if draft.answer is None and draft.same_as is None])
    answers = [(draft.same_as or draft).answer for draft in drafts]
    return [answer for answer in answers if answer is not None]


def _answer_known_keys(conn: sa.Connection, actor: str, drafts: Sequence[_Draft]) -> None:
    """The same key again: the first answer, with its trials as they are now."""
    keyed = {draft.proposal.key: draft for draft in drafts if draft.proposal.key is not None}
    known: dict[str, sa.Row[Any]] = {}
    for chunk in _chunks(list(keyed)):
        known |= {row.key: row for row in conn.execute(_BY_KEY, {"who": storable(actor, 200), "keys": chunk})}
    for draft in drafts:
        row = known.get(draft.proposal.key or "")
        if row is not None and draft.proposal.key is not None:
            same = row.body_hash == draft.body_hash
            draft.answer = _stored(conn, row) if same else key_reused(draft.proposal.key)


def _attach_experiments(
    conn: sa.Connection, ids: IdFactory, now: datetime, actor: str, drafts: Sequence[_Draft]
) -> None:
    """Locks or makes the experiments, in one order for everybody, and refuses another objective than theirs."""
    pending = [draft for draft in drafts if draft.answer is None]
    found: dict[str, ExperimentRow] = {}
    for draft in sorted(pending, key=lambda draft: draft.proposal.config.experiment):
        config = draft.proposal.config
        known = found.get(config.experiment)
        try:
            if known is None or (config.objective is not None and known.objective != config.objective):
                known = experiments.ensure(conn, ids, now, config.experiment, config.objective, actor=actor)
                found[config.experiment] = known
        except ConflictError as error:
            draft.status, draft.hint = ProposalStatus.REFUSED, f"{error.message}. {error.hint}"
            known = experiments.get(conn, config.experiment)
        draft.experiment = known


def _require_sweeps(conn: sa.Connection, drafts: Sequence[_Draft]) -> None:
    asked = {storable(draft.proposal.sweep_id) for draft in drafts if draft.proposal.sweep_id is not None}
    table = models.sweeps
    known: set[str] = set()
    for chunk in _chunks(sorted(asked)):
        known |= set(conn.scalars(sa.select(table.c.id).where(table.c.id.in_(chunk))))
    for draft in drafts:
        sweep_id = draft.proposal.sweep_id
        if sweep_id is not None and sweep_id not in known and draft.answer is None:
            draft.answer = no_sweep(sweep_id)


def _plan(conn: sa.Connection, ids: IdFactory, drafts: Sequence[_Draft]) -> None:
    """Decides what is new and gives it ids."""
    pending = [draft for draft in drafts if draft.answer is None]
    wanted = [key for draft in pending if draft.status is ProposalStatus.ACCEPTED for key in draft.keys]
    taken = _find_existing(conn, wanted)
    first_of_key: dict[str, _Draft] = {}
    for draft in pending:
        key = draft.proposal.key
        if key is not None and (first := first_of_key.setdefault(key, draft)) is not draft:
            if first.body_hash == draft.body_hash:
                draft.same_as = first
            else:
                draft.answer = key_reused(key)
            continue
        draft.id = ids("proposal")
        if draft.status is ProposalStatus.ACCEPTED:
            _name_trials(draft, ids, taken)


def _name_trials(draft: _Draft, ids: IdFactory, taken: dict[_Hash, str]) -> None:
    for replicate, key in enumerate(draft.keys):
        if key not in taken:
            taken[key] = draft.new[replicate] = ids("trial")
    total, new = len(draft.hashes), len(draft.new)
    if new == 0:
        draft.status = ProposalStatus.DUPLICATE
        draft.trial_ids = [taken[key] for key in draft.keys]
        draft.hint = "This configuration exists in the experiment. For another run of it ask for more replicates."
        return
    draft.trial_ids = list(draft.new.values())
    if new < total:
        draft.hint = f"{total - new} of {total} replicates exist already; {new} are new."


def _find_existing(conn: sa.Connection, keys: Iterable[_Hash]) -> dict[_Hash, str]:
    """Trial ids by what they are; of several the oldest."""
    by_experiment: dict[str, list[str]] = {}
    for experiment_id, found in keys:
        by_experiment.setdefault(experiment_id, []).append(found)
    result: dict[_Hash, str] = {}
    for experiment_id, hashes in by_experiment.items():
        for chunk in _chunks(hashes):
            for row in conn.execute(_SAME_WORK, {"experiment": experiment_id, "hashes": chunk}):
                result.setdefault((experiment_id, row.config_hash), row.id)
    return result


def _write(conn: sa.Connection, now: datetime, actor: str, drafts: Sequence[_Draft]) -> None:
    """Writes all rows and gives each draft its answer."""
    if not drafts:
        return
    _write_proposals(conn, now, actor, drafts)
    found = _write_trials(conn, now, actor, drafts)
    older = {trial_id: None for draft in drafts for trial_id in draft.trial_ids if trial_id not in found}
    found |= {trial.id: trial for trial in trials.find(conn, list(older))}
    for draft in drafts:
        answered = tuple(found[trial_id] for trial_id in draft.trial_ids)
        draft.answer = Proposal(id=draft.id, status=draft.status, hint=draft.hint, trials=answered)
    touch(conn, "proposals")


def _write_proposals(conn: sa.Connection, now: datetime, actor: str, drafts: Sequence[_Draft]) -> None:
    rows = [
        {
            "id": draft.id,
            "experiment_id": draft.experiment.id if draft.experiment else None,
            "sweep_id": draft.proposal.sweep_id,
            "actor": storable(actor, 200),
            "key": draft.proposal.key,
            "body_hash": draft.body_hash,
            "status": draft.status.value,
            "hint": draft.hint,
            "note": draft.proposal.note,
            "trial_ids": draft.trial_ids,
            "created_at": now,
        }
        for draft in drafts
    ]
    conn.execute(_INSERT_PROPOSALS, rows)


def _write_trials(conn: sa.Connection, now: datetime, actor: str, drafts: Sequence[_Draft]) -> dict[str, Trial]:
    rows = _trial_rows(conn, now, drafts)
    if not rows:
        return {}
    created = [
        NewEvent("trial.created", row["name"], actor, "", row["id"], after=row["state"], data={"params": row["params"]})
        for row in rows
    ]
    first = events.append(conn, now, *created)
    for offset, row in enumerate(rows):
        row["seq"] = row["place"] = first + offset
    conn.execute(_INSERT_TRIALS, [row | {"config": row["config"].model_dump(mode="json")} for row in rows])
    outbox.add(conn, now, [(row["id"], "run", {}) for row in rows])
    _count_proposed(conn, rows)
    touch(conn, "trials", *(f"trial:{row['id']}" for row in rows))
    return {row["id"]: trials.build(row) for row in rows}


def _trial_rows(conn: sa.Connection, now: datetime, drafts: Sequence[_Draft]) -> list[dict[str, Any]]:
    numbers: dict[str, int] = {}
    for experiment_id, num in Counter(
        draft.experiment.id for draft in drafts if draft.experiment for _ in draft.new
    ).items():
        numbers[experiment_id] = experiments.number_trials(conn, experiment_id, num)
    rows: list[dict[str, Any]] = []
    for draft in drafts:
        for replicate, trial_id in draft.new.items():
            experiment_id = draft.keys[replicate][0]
            rows.append(_trial_row(draft, replicate, trial_id, numbers[experiment_id], now))
            numbers[experiment_id] += 1
    return rows


def _trial_row(draft: _Draft, replicate: int, trial_id: str, number: int, now: datetime) -> dict[str, Any]:
    proposal = draft.proposal
    config = proposal.config
    experiment_id, found_hash = draft.keys[replicate]
    return {
        "id": trial_id,
        "experiment_id": experiment_id,
        "number": number,
        "name": f"{config.experiment}-{number}",
        "sweep_id": proposal.sweep_id,
        "proposal_id": draft.id,
        "config": config,
        "params": draft.params,
        "config_hash": found_hash,
        "replicate": replicate,
        "state": (TrialState.HELD if proposal.hold else TrialState.QUEUED).value,
        "state_cause": "held by its proposal" if proposal.hold else "",
        "priority": CLASS_ORDER.index(config.priority),
        "rank": config.rank,
        "tracked": False,
        "created_at": now,
    }


def _count_proposed(conn: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    table = models.sweeps
    for sweep_id, num in Counter(row["sweep_id"] for row in rows if row["sweep_id"] is not None).items():
        conn.execute(sa.update(table).where(table.c.id == sweep_id).values(proposed=table.c.proposed + num))
        touch(conn, "sweeps", f"sweep:{sweep_id}")


def get(conn: sa.Connection, proposal_id: str) -> Proposal:
    """The stored answer, with the trials as they are now.

    Raises:
        NotFoundError: There is none.
    """
    row = conn.execute(sa.select(_TABLE).where(_TABLE.c.id == storable(proposal_id))).one_or_none()
    if row is None:
        raise NotFoundError(
            f"there is no proposal {proposal_id[:200]!r}", hint="`overnight ls` shows the trials that proposals became."
        )
    return _stored(conn, row)


def _stored(conn: sa.Connection, row: sa.Row[Any]) -> Proposal:
    found = tuple(trials.find(conn, row.trial_ids))
    return Proposal(id=row.id, status=ProposalStatus(row.status), hint=row.hint, trials=found)


def _chunks(items: Sequence[str]) -> Iterable[Sequence[str]]:
    return (items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK))
