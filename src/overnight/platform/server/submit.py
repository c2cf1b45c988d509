"""From a validated proposal to durable trials; the one way in for people, agents and sweeps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from overnight.core.clock import Clock
from overnight.core.errors import OvernightError, UnsatisfiableError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Proposal, ProposalIn
from overnight.platform.code import CodeStore
from overnight.platform.scheduler.loop import SchedulerLoop
from overnight.store import proposals
from overnight.store.engine import Store

if TYPE_CHECKING:
    from overnight.store.engine import Connection


class _RehearsedError(Exception):
    """Leaves a dry run's transaction without a trace, and carries what it would have answered."""

    def __init__(self, answer: Proposal) -> None:
        super().__init__()
        self.answer = answer


class Submissions:
    """Checks proposals and writes them.

    Args:
        store: Where they go.
        clock: For the record.
        ids: Makes ids.
        code: Must have the snapshots that they name.
        scheduler: Knows what the devices could ever give.
    """

    def __init__(self, store: Store, clock: Clock, ids: IdFactory, code: CodeStore, scheduler: SchedulerLoop) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._code = code
        self._scheduler = scheduler

    async def one(self, actor: str, proposal: ProposalIn) -> Proposal:
        """Writes one proposal and its trials, or for a dry run only says what would happen.

        Raises:
            NotFoundError: The code snapshot or sweep that it names is not here.
            UnsatisfiableError: No node could ever give what it asks for.
            BadInputError, ConflictError: See :func:`overnight.store.proposals.accept`.
        """
        self._check(proposal)
        now = self._clock.now()

        def write(conn: "Connection") -> Proposal:
            answer = proposals.accept(conn, ids=self._ids, now=now, actor=actor, proposal=proposal)
            if proposal.dry_run:
                raise _RehearsedError(answer)
            return answer

        try:
            return await self._store.awrite(write)
        except _RehearsedError as rehearsed:
            return rehearsed.answer

    async def many(self, actor: str, batch: Sequence[ProposalIn]) -> list[Proposal | OvernightError]:
        """Writes many in one transaction; each gets its own answer, and a bad one does not hurt the others."""
        answers: dict[int, Proposal | OvernightError] = {}
        good: list[int] = []
        for index, proposal in enumerate(batch):
            try:
                if proposal.dry_run:
                    answers[index] = await self.one(actor, proposal)
                else:
                    self._check(proposal)
                    good.append(index)
            except OvernightError as error:
                answers[index] = error
        if good:
            now = self._clock.now()
            chosen = [batch[index] for index in good]
            written = await self._store.awrite(
                lambda conn: proposals.accept_many(conn, ids=self._ids, now=now, actor=actor, proposals=chosen)
            )
            answers.update(zip(good, written, strict=True))
        return [answers[index] for index in range(len(batch))]

    def _check(self, proposal: ProposalIn) -> None:
        """What can be refused without a transaction."""
        self._code.require(proposal.config.code)
        reason = self._scheduler.unsatisfiable(proposal.config.compute)
        if reason is not None:
            raise UnsatisfiableError(reason, hint="Ask for less; `overnight devices` shows what there is.")
