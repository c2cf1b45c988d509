"""What supervisors spool becomes rows, once and in order, whatever is sent twice."""

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa

from overnight.core.models.node import SpoolEvent


def ingest(conn: sa.Connection, attempt_id: str, generation: int, events: Sequence[SpoolEvent], now: datetime) -> int:
    """Applies new events in order and returns the highest contiguous sequence that is now durable.

    ``started`` moves the trial STARTING -> RUNNING; ``exit`` is kept for ``attempts.exit_report`` and ends nothing:
    the caller decides the outcome and calls ``attempts.end`` (in the same write).

    Raises:
        NotFoundError: No such attempt.
        StaleAttemptError: The attempt has ended or is not the current one, and something in ``events`` is new.
    """
    raise NotImplementedError
