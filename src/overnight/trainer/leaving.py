"""How a run leaves before its end: with a save where there is time for one, and by an exception."""

from typing import NoReturn

from overnight.core.errors import CheckpointError
from overnight.trainer.agreement import Agreement
from overnight.trainer.boundary import Leave
from overnight.trainer.checkpoint.reader import complain
from overnight.trainer.cursor import Cursor
from overnight.trainer.exits import Interrupted, Left, Stopped, Yielded, is_success
from overnight.trainer.link import Link
from overnight.trainer.orders import Orders
from overnight.trainer.saves import Saves
from overnight.trainer.start import Origin

MIN_GRACE_SECONDS = 5.0
"""With less than this left of a grace, a run leaves without waiting for the next boundary."""

LEAVE_SECONDS = 1.0
"""Of a grace, what is kept for leaving once the save is done."""

MIN_SAVE_SECONDS = 0.5

LATE_SECONDS = 10.0
"""How long a run that ends before its end waits for the commit of what is staged, unless that cannot come any more."""


class Departure:
    """The way out of a script that is not at its end.

    Args:
        origin: Says whether anybody supervises the run.
        orders: What this rank was told, and how much time is left.
        agreement: Of all ranks.
        saves: Saves once more.
        cursor: Knows the step.
        link: Hears of it.
    """

    def __init__(
        self, origin: Origin, orders: Orders, agreement: Agreement, saves: Saves, cursor: Cursor, link: Link
    ) -> None:
        self._origin = origin
        self._alone = origin.environment.alone
        self._orders = orders
        self._agreement = agreement
        self._saves = saves
        self._cursor = cursor
        self._link = link

    def leave_body_if_told(self) -> None:
        """Inside a loop's body nothing can be saved: leaves only if told to stop, or if the next boundary is too late.

        Raises:
            Left: It leaves.
        """
        leave, remaining_seconds = self._orders.leave()
        if leave is Leave.STOP or (leave is not Leave.NO and remaining_seconds < MIN_GRACE_SECONDS):
            self.leave(leave, save=False)

    def leave(self, leave: Leave, *, save: bool) -> NoReturn:
        """Leaves by an exception, after a save where one is wanted and possible.

        Raises:
            Left: Always.
        """
        self._agreement.drain()
        saved = save and self._saves.possible and self._save()
        kind = {Leave.STOP: Stopped, Leave.INTERRUPT: Interrupted}.get(leave, Yielded)
        step = self._cursor.step
        self._link.send("/v1/leaving", {"why": kind.why, "saved": saved, "step": step})
        if self._alone and self._origin.environment.rank == 0:
            where = f"; the same command goes on from there ({self._origin.place})" if saved else ""
            complain(f"left at step {step}{where}")
        raise kind(step, saved=saved, reason=self._orders.reason)

    def _save(self) -> bool:
        try:
            self._saves.finish("yield", None if self._alone else max(MIN_SAVE_SECONDS, self._left_seconds))
        except CheckpointError as error:
            complain(f"leaving without a save: {error}")
            return False
        return True

    @property
    def _left_seconds(self) -> float:
        """Until this process is killed, less what leaving takes."""
        return self._orders.leave()[1] - LEAVE_SECONDS

    def late_seconds(self, error: BaseException | None) -> float:
        """How long the commit of what is staged may take once the script is over.

        Args:
            error: What ended the script, None where it ran through.
        """
        if is_success(error):
            return 0.0
        is_limited = isinstance(error, Left) and not self._alone
        return min(LATE_SECONDS, max(0.0, self._left_seconds)) if is_limited else LATE_SECONDS
