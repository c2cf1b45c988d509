"""The boundary between two updates, the one place where a run saves, leaves and sends, on all ranks alike."""

from overnight.trainer.agreement import Agreement, Spot
from overnight.trainer.boundary import Leave
from overnight.trainer.cursor import Cursor
from overnight.trainer.leaving import Departure
from overnight.trainer.loops import Loops
from overnight.trainer.orders import Orders
from overnight.trainer.saves import Saves
from overnight.trainer.telling import Telling


class Boundaries:
    """The boundaries of a run.

    Args:
        orders: What this rank was told.
        agreement: Makes one decision of the wishes of all ranks.
        departure: The way out.
        saves: Decide when to save.
        telling: Makes one of what all ranks logged, and sends it.
        cursor: Knows the step.
        loops: Know which loop's time may be over.
    """

    def __init__(
        self,
        orders: Orders,
        agreement: Agreement,
        departure: Departure,
        saves: Saves,
        telling: Telling,
        cursor: Cursor,
        loops: Loops,
    ) -> None:
        self._orders = orders
        self._agreement = agreement
        self._departure = departure
        self._saves = saves
        self._telling = telling
        self._cursor = cursor
        self._loops = loops

    def cross(self, *, epoch_end: bool = False, over: bool = False) -> int:
        """Agrees, leaves, saves, sends.

        Args:
            epoch_end: An epoch ends here.
            over: On this rank, the time of the innermost loop is over.

        Returns:
            Number of the loop whose time is over on some rank, 0 for none.

        Raises:
            Left: The run was told to leave.
            RanksDisagreeError: The ranks are not all at this boundary, or logged different things before it.
            SaveFailedError, FencedError: A save has failed and nobody was told.
        """
        leave, _ = self._orders.leave()
        wishes = self._saves.wishes(
            leave=leave,
            save=self._orders.take_save(),
            over=self._loops.innermost.number if over else 0,
            send=self._telling.wants_reduction(),
        )
        agreed = self._agreement.exchange(wishes, self._cursor.step)
        self._telling.advance(start=bool(agreed.send))
        if agreed.leave:
            self._telling.gather(Spot.BOUNDARY)
            self._departure.leave(Leave(agreed.leave), save=agreed.leave != Leave.STOP)
        self._saves.at_boundary(agreed, step=self._cursor.step, epoch_end=epoch_end)
        self._telling.send_if_time()
        return agreed.over
