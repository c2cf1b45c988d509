"""Proposals become trials, a duplicate's trials, or a refusal; a key makes asking twice safe."""

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa

from overnight.core.errors import OvernightError
from overnight.core.ids import IdFactory
from overnight.core.models.api import Proposal, ProposalIn


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

    The answer's status is ``accepted`` (new trials, QUEUED or HELD), ``duplicate`` (the existing ones of the same
    experiment; FAILED and CANCELLED ones do not count) or ``refused`` (another objective than the experiment's).

    Args:
        max_devices: What the pool could ever give; None skips the check.

    Raises:
        InvalidParamsError, UnsatisfiableError, KeyReusedError, NotFoundError (sweep).
    """
    raise NotImplementedError


def accept_many(
    conn: sa.Connection,
    *,
    ids: IdFactory,
    now: datetime,
    actor: str,
    proposals: Sequence[ProposalIn],
    max_devices: int | None = None,
) -> list[Proposal | OvernightError]:
    """:func:`accept` for many, set-based; each gets its own answer, and a bad one does not hurt the others."""
    raise NotImplementedError


def get(conn: sa.Connection, proposal_id: str) -> Proposal:
    """The stored answer, with the trials as they are now. Raises NotFoundError."""
    raise NotImplementedError
