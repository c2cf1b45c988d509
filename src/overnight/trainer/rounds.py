"""The rounds of a run's loops: what each hands to the script's body, and the boundary behind it."""

import time
from collections.abc import Generator, Iterator
from typing import Any

from overnight.trainer.crossing import Boundaries
from overnight.trainer.cursor import Cursor, Pending
from overnight.trainer.data.loader import DataLoader
from overnight.trainer.first_round import FirstRound
from overnight.trainer.loops import Loop, Loops
from overnight.trainer.phases import Ledger


class Rounds:
    """Goes through loops from exactly where they stopped.

    Args:
        loops: Remember where each is.
        cursor: Counts what was handed out.
        ledger: Gets the time that is spent waiting for data.
        first_round: Prepared before anything is handed out.
        boundaries: Crossed behind every update.
        resumed: Whether the run continues from a checkpoint.
    """

    def __init__(
        self,
        loops: Loops,
        cursor: Cursor,
        ledger: Ledger,
        first_round: FirstRound,
        boundaries: Boundaries,
        *,
        resumed: bool,
    ) -> None:
        self._loops = loops
        self._cursor = cursor
        self._ledger = ledger
        self._first_round = first_round
        self._boundaries = boundaries
        self._resumed = resumed

    def batches(self, loader: DataLoader, epochs: int | None, seconds: float | None, name: str) -> Iterator[Any]:
        """The data of a loader's batches.

        Args:
            loader: Whose.
            epochs: Ends after so many; None for no limit.
            seconds: Ends after so much productive time; None for no limit.
            name: Of the loop.

        Raises:
            DatasetChangedError: The data is not what it was at the save.
        """
        self._cursor.settle()
        with self._loops.enter(name, "batches") as loop:
            if loop.state["done"]:
                return
            self._cursor.bind(loader)
            if loop.state["first_epoch"] is None:
                loop.state["first_epoch"] = self._cursor.open_epoch(loader)
            last = None if epochs is None else loop.state["first_epoch"] + epochs
            self._cursor.declare(loader, last)
            self._at_entry()
            epoch, position = self._cursor.place(loader, loop.state["first_epoch"])
            while last is None or epoch < last:
                if (yield from self._rest_of_epoch(loop, loader, epoch, position, seconds)):
                    break
                epoch, position = epoch + 1, 0

    def _rest_of_epoch(
        self, loop: Loop, loader: DataLoader, epoch: int, position: int, seconds: float | None
    ) -> Generator[Any, None, bool]:
        """The batches from a position to the end of the epoch; returns whether the loop's time is over."""
        batches = loader.micro_batches(epoch, position)
        since = time.monotonic()
        while True:
            with self._ledger.within("data_wait"):
                batch = next(batches, None)
            if batch is None:
                break
            self._first_round.prepare()
            yield from self._cursor.hand_out(Pending(loop, loader, batch, batch.last_of_update), batch.data)
            if not batch.last_of_update:
                continue
            over = False
            if seconds is not None:
                loop.state["seconds"] += time.monotonic() - since
                over = loop.state["seconds"] >= seconds
            is_last = loader.place_at(epoch, batch.end)[0] != epoch
            ended = self._boundaries.cross(epoch_end=is_last and not self._loops.inside("epochs"), over=over)
            if seconds is not None and ended == loop.number:
                loop.state["done"] = True
                self._cursor.leave_epoch(loader, batch, consumed=True)
                return True
            since = time.monotonic()
        if loader.epoch == epoch and loader.ack == "auto":
            loader.seek(epoch + 1, 0)
        return False

    def steps(self, n: int, name: str) -> Iterator[int]:
        """The step of each of ``n`` updates without a loader."""
        self._cursor.settle()
        with self._loops.enter(name, "steps") as loop:
            self._at_entry()
            while loop.state["count"] < n and not loop.state["done"]:
                self._first_round.prepare()
                yield from self._cursor.hand_out(Pending(loop), self._cursor.step + 1)
                self._boundaries.cross()

    def epochs(self, n: int, name: str) -> Iterator[int]:
        """0 to ``n - 1``, for a loop around other loops."""
        self._cursor.settle()
        with self._loops.enter(name, "epochs") as loop:
            while loop.state["count"] < n and not loop.state["done"]:
                self._at_entry()
                try:
                    yield loop.state["count"]
                except GeneratorExit:
                    loop.state["done"] = True
                    raise
                self._first_round.prepare()
                self._cursor.settle()
                loop.next_round()
                self._boundaries.cross(epoch_end=True)

    def _at_entry(self) -> None:
        """Where a loop is entered: a resumed run is back at its place if these very loops were open at the save."""
        if not self._resumed or self._loops.was_here:
            self._first_round.prepare()
