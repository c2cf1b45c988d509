"""From a validated proposal to durable trials."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from overnight.core.errors import OvernightError, UnsatisfiableError
from overnight.core.models.api import Proposal, ProposalIn
from overnight.platform.server.services import Services
from overnight.store import proposals

if TYPE_CHECKING:
    from sqlalchemy import Connection


class _DryRun(Exception):
    """Leaves a transaction without a trace, and carries what it would have answered."""

    def __init__(self, answer: Proposal) -> None:
        self.answer = answer


def check(house: Services, proposal: ProposalIn) -> None:
    """What can be refused without a transaction.

    Raises:
        NotFoundError: The code snapshot that it names is not here.
        UnsatisfiableError: No node could ever give what it asks for.
    """
    house.code.require(proposal.config.code)
    reason = house.scheduler.unsatisfiable(proposal.config.compute)
    if reason is not None:
        raise UnsatisfiableError(reason, hint="Ask for less; `overnight devices` shows what there is.")


async def submit(house: Services, actor: str, proposal: ProposalIn) -> Proposal:
    """Writes one proposal and its trials, or for a dry run only says what would happen.

    Raises:
        BadInputError, ConflictError: See :func:`overnight.store.proposals.accept`.
    """
    now = house.clock.now()

    def write(conn: "Connection") -> Proposal:
        answer = proposals.accept(conn, ids=house.ids, now=now, actor=actor, proposal=proposal)
        if proposal.dry_run:
            raise _DryRun(answer)
        return answer

    try:
        return await house.store.awrite(write)
    except _DryRun as dry:
        return dry.answer


async def submit_many(house: Services, actor: str, batch: Sequence[ProposalIn]) -> list[Proposal | OvernightError]:
    """Writes many in one transaction; each gets its own answer, and a bad one does not hurt the others."""
    answers: list[Proposal | OvernightError | None] = [None] * len(batch)
    good: list[int] = []
    for index, proposal in enumerate(batch):
        try:
            check(house, proposal)
            if proposal.dry_run:
                answers[index] = await submit(house, actor, proposal)
            else:
                good.append(index)
        except OvernightError as error:
            answers[index] = error
    if good:
        now = house.clock.now()
        chosen = [batch[index] for index in good]
        written = await house.store.awrite(
            lambda conn: proposals.accept_many(conn, ids=house.ids, now=now, actor=actor, proposals=chosen)
        )
        for index, found in zip(good, written, strict=True):
            answers[index] = found
    return [found for found in answers if found is not None]
