"""What a run tells the platform as it goes: metrics and results at its step, and which phase it is in."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from overnight.trainer.agreement import Agreement, Spot, Wishes
from overnight.trainer.cursor import Cursor
from overnight.trainer.data.record import SampleRecord
from overnight.trainer.journal import Reduce
from overnight.trainer.link import Link
from overnight.trainer.meshes import Arrangement
from overnight.trainer.metrics import Metrics
from overnight.trainer.phases import CATEGORIES, Ledger, Reached


class Telling:
    """Tells what the script says together with where it says it, and keeps the record of samples abreast of it.

    Args:
        metrics: On their way to the supervisor.
        agreement: Of all ranks.
        link: The line to the supervisor.
        ledger: Where the seconds go.
        cursor: Knows the step and the batch.
        arrangement: How the ranks stand to each other.
        record: The attempt's sample record.
        reached: Noted by rank 0; None on others.
    """

    def __init__(
        self,
        metrics: Metrics,
        agreement: Agreement,
        link: Link,
        ledger: Ledger,
        cursor: Cursor,
        arrangement: Arrangement,
        record: SampleRecord,
        reached: Reached | None,
    ) -> None:
        self._metrics = metrics
        self._agreement = agreement
        self._link = link
        self._ledger = ledger
        self._cursor = cursor
        self._arrangement = arrangement
        self._record = record
        self._reached = reached
        self._phase = ""

    @property
    def _weight(self) -> float:
        return 1.0 if self._phase else self._cursor.weight

    @property
    def _num_peers(self) -> int:
        return self._cursor.num_peers or self._arrangement.num_peers

    def log(self, values: Mapping[str, Any], reduce: Reduce) -> None:
        """Records metrics; see :meth:`overnight.trainer.execution.Run.log`.

        Raises:
            BadInputError: A value is no single number, a name has no fitting length, or no such rule.
        """
        self._metrics.log(self._cursor.shown_step, values, reduce, self._weight, self._num_peers)

    def report(self, values: Mapping[str, Any], reduce: Reduce) -> None:
        """Reports results, on all ranks; see :meth:`overnight.trainer.execution.Run.report`.

        Raises:
            BadInputError: A value is neither a single number nor text, or no such rule.
            RanksDisagreeError: Another rank reports something else, or is somewhere else.
        """
        step = self._cursor.shown_step
        announced = self._metrics.announce(step, values, reduce, self._weight, self._num_peers)
        self._agreement.meet(Spot.REPORT, step)
        self._metrics.report(announced, self._phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what happens inside; phases nest."""
        before, self._phase = self._phase, name
        self._link.push(self._cursor.shown_step, name)
        try:
            with self._ledger.within(name if name in CATEGORIES else "compute"):
                yield
        finally:
            self._phase = before
            self._link.push(self._cursor.shown_step, before)

    def wants_reduction(self) -> bool:
        """Whether it is time to make one of what all ranks logged; true once per period."""
        return self._metrics.wants_reduction()

    def advance(self, *, start: bool) -> None:
        """Takes in what was made of all ranks' values in the background, and begins with those that came since.

        Args:
            start: All ranks have agreed to begin.

        Raises:
            RuntimeError: A peer has gone.
        """
        self._metrics.advance(start=start)

    def gather(self, spot: Spot, wishes: Wishes | None = None) -> Wishes:
        """Where all ranks wait for each other anyway: makes sure that they do, and brings in all that they logged.

        Args:
            spot: Where they meet.
            wishes: Of this rank, for this meeting alone.

        Returns:
            The wishes of all ranks for this meeting.

        Raises:
            RanksDisagreeError: They are not all here, or logged different things.
            RuntimeError: A peer has gone.
        """
        met = self._agreement.meet(spot, self._cursor.step, wishes)
        self._metrics.gather()
        return met

    def send_if_time(self) -> None:
        """Sends what is ready, unless something has been sent a moment ago."""
        if self._metrics.flush(self._cursor.step, self._phase):
            self._record.flush()
            if self._reached is not None:
                self._reached.note(self._cursor.step)

    def send_all(self) -> None:
        """What led to this moment is on its way to the supervisor, and safe in the record."""
        self._metrics.flush(self._cursor.step, self._phase, everything=True)
        self._record.flush()
