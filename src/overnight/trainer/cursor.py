"""What the script was given and what of it counts: updates, samples, and where each loader is.

A batch counts as consumed when the next one is requested, or when the script goes on after a ``break``; not when an
exception leaves the run. So what was handed out last stays pending until one of these is known. With ``ack="manual"``
it counts when the loader's position has passed it, which may be many updates later: until then it is in flight.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from overnight.core.errors import DataError
from overnight.trainer.data.loader import DataLoader, MicroBatch
from overnight.trainer.data.record import SampleRecord
from overnight.trainer.loops import Loop
from overnight.trainer.owner import Owner
from overnight.trainer.phases import Ledger, Reached


@dataclass
class Pending:
    """What was handed to a loop's body last.

    Attributes:
        loop: The loop.
        loader: Where the batch came from; None in ``steps``.
        batch: None in ``steps``.
        completes: Whether the update is complete with it.
        abandoned: Whether the loop was left by ``break`` or by an exception; which of them, time will tell.
    """

    loop: Loop
    loader: DataLoader | None = None
    batch: MicroBatch | None = None
    completes: bool = True
    abandoned: bool = False


@dataclass(frozen=True)
class Reader:
    """As whom loaders are read: by which rank of how many, under which seed."""

    rank: int
    world_size: int
    seed: int


class Cursor:
    """Counts updates and samples, and writes down which samples they were.

    Args:
        reader: For every loader.
        record: The attempt's sample record.
        ledger: Gets the time in the loop's body and the number of updates.
        reached: Tells recomputed from new updates.
        step: Updates done before.
        loader_states: Saved states of loaders by name, for those that come.
        owner: The process whose loops these are.

    Attributes:
        step: Updates done.
    """

    def __init__(
        self,
        reader: Reader,
        record: SampleRecord,
        ledger: Ledger,
        reached: Reached,
        step: int,
        loader_states: dict[str, Any],
        owner: Owner,
    ) -> None:
        self.step = step
        self._owner = owner
        self._reader = reader
        self._record = record
        self._ledger = ledger
        self._reached = reached
        self._loader_states = loader_states
        self._loaders: dict[str, DataLoader] = {}
        self._pending: Pending | None = None
        self._update: list[MicroBatch] = []
        self._in_flight: dict[str, deque[list[MicroBatch]]] = {}
        self._given: dict[str, tuple[int, int]] = {}

    @property
    def shown_step(self) -> int:
        """Updates done, counting the one that the loop's body is at."""
        pending = self._pending
        return self.step + (pending is not None and (pending.completes or not pending.abandoned))

    @property
    def completes(self) -> bool:
        """Whether what the body has is the last part of its update."""
        return self._pending is None or self._pending.completes

    @property
    def batch(self) -> MicroBatch | None:
        """The micro-batch that the body has, if it has one."""
        return self._pending.batch if self._pending is not None else None

    @property
    def weight(self) -> float:
        """Samples of the body's micro-batch that are no padding; 1 where the loader does not pad and all are equal."""
        return 1.0 if self.batch is None or self.batch.weights is None else float(self.batch.weights.sum())

    @property
    def num_peers(self) -> int | None:
        """Number of ranks that have the body's micro-batch too, this one included; None without a micro-batch."""
        return self._pending.loader.num_peers if self._pending is not None and self._pending.loader else None

    @property
    def in_body(self) -> bool:
        """Whether the script is inside the body of a loop."""
        return self._pending is not None and not self._pending.abandoned

    def bind(self, loader: DataLoader) -> None:
        """Takes a loader into the run, at its saved place if there is one; a second time does nothing.

        Raises:
            DatasetChangedError: The data is not what it was at the save.
            IndivisibleBatchError: The global batch does not divide by the number of ranks.
        """
        if any(known is loader for known in self._loaders.values()):
            return
        key, number = loader.name, 1
        while key in self._loaders:
            number += 1
            key = f"{loader.name}~{number}"
        loader.bind(rank=self._reader.rank, world_size=self._reader.world_size, seed=self._reader.seed)
        if key in self._loader_states:
            loader.load_state_dict(self._loader_states[key])
        self._loaders[key] = loader

    @property
    def is_divided_as_saved(self) -> bool:
        """Whether the samples of all loaders are divided among as many ranks as at the save."""
        saved = {key: self._loader_states[key]["world_size"] for key in self._loaders if key in self._loader_states}
        return all(self._loaders[key].world_size == number for key, number in saved.items())

    def open_epoch(self, loader: DataLoader) -> int:
        """The first epoch of a new loop over a loader: one of which no loop has given a batch."""
        epoch, position = self._given.get(self._key_of(loader), (loader.epoch, loader.position))
        if position == 0:
            return epoch
        if loader.ack == "auto":  # an earlier loop left this epoch early
            loader.seek(epoch + 1, 0)
        return epoch + 1

    def place(self, loader: DataLoader, first_epoch: int) -> tuple[int, int]:
        """Epoch and position from which a loop goes on: behind what this process has given of the loader so far."""
        given = self._given.get(self._key_of(loader))
        return (loader.epoch, loader.position) if given is None else max(given, (first_epoch, 0))

    def declare(self, loader: DataLoader, epochs: int | None) -> None:
        """Tells the sample record what to expect; None when something else than the data ends the loop."""
        key, repeats = self._key_of(loader), loader.repeats
        data_rank = loader.rank if loader.num_peers > 1 else None
        self._record.declare(
            key, epochs=epochs, samples_per_epoch=loader.samples_per_epoch, repeats=repeats, data_rank=data_rank
        )

    def leave_epoch(self, loader: DataLoader, batch: MicroBatch, *, consumed: bool) -> None:
        """Tells the sample record that nothing behind ``batch`` is wanted of its epoch and of its loop."""
        position = batch.end if consumed else batch.position
        self.declare(loader, batch.epoch + (position > 0))
        if position:
            self._record.leave(self.step, batch.epoch, position, self._key_of(loader))

    def hand_out(self, pending: Pending, value: Any) -> Generator[Any, None, None]:
        """Gives one value to the loop's body."""
        self._pending = pending
        self._ledger.switch("recomputed" if self.step < self._reached.step else "compute")
        try:
            yield value
        except GeneratorExit:
            pending.abandoned = True
            pending.loop.state["done"] = True
            raise
        self.settle()

    def settle(self) -> None:
        """Counts what was handed out as consumed.

        Raises:
            BadInputError: In a process that was forked from the run.
        """
        self._owner.require()
        pending, self._pending = self._pending, None
        if pending is None:
            self._record_acknowledged()
            return
        if pending.batch is not None:
            # an unfinished update is remembered without its data, which may be large
            self._update.append(pending.batch if pending.completes else replace(pending.batch, data=None))
        if pending.completes:
            self._count(pending)
        elif pending.abandoned:  # the update was never finished: its micro-batches come again
            self._update.clear()
        if pending.abandoned and pending.loader is not None and pending.batch is not None:
            # a break, since the script went on behind it: an exception would not have come here
            self.leave_epoch(pending.loader, pending.batch, consumed=pending.completes)

    def _count(self, pending: Pending) -> None:
        self.step += 1
        self._ledger.count("updates")
        if pending.batch is None or pending.loader is None:
            pending.loop.state["count"] += 1
        elif pending.loader.ack == "auto":
            self._record_update(self._update, self._key_of(pending.loader))
            pending.loader.seek(pending.batch.epoch, pending.batch.end)
        else:
            key = self._key_of(pending.loader)
            waiting = [replace(batch, data=None) for batch in self._update]
            self._in_flight.setdefault(key, deque()).append(waiting)
            self._given[key] = pending.loader.place_at(pending.batch.epoch, pending.batch.end)
        self._update.clear()
        self._record_acknowledged()

    def _record_update(self, update: list[MicroBatch], key: str) -> None:
        for batch in update:
            self._record.append(max(self.step - 1, 0), batch, key)

    def _record_acknowledged(self) -> None:
        """Writes down what was in flight until its loader's position passed it.

        Raises:
            DataError: More was acknowledged than has been given.
        """
        for key, waiting in self._in_flight.items():
            loader = self._loaders[key]
            place = loader.epoch, loader.position
            if place > self._given[key]:
                raise DataError(
                    f"loader {loader.name!r} was advanced to epoch {place[0]}, position {place[1]}, but it has given "
                    f"batches up to epoch {self._given[key][0]}, position {self._given[key][1]} only",
                    hint="Call loader.advance() once for each update that was trained on.",
                )
            while waiting and loader.place_at(waiting[0][-1].epoch, waiting[0][-1].end) <= place:
                self._record_update(waiting.popleft(), key)

    def places(self) -> dict[str, dict[str, int]]:
        """Epoch and position of each loader, for a manifest's readers."""
        return {key: {"epoch": one.epoch, "position": one.position} for key, one in self._loaders.items()}

    def loader_states(self) -> dict[str, Any]:
        """The states of all loaders, those that have not come yet included."""
        return {**self._loader_states, **{key: loader.state_dict() for key, loader in self._loaders.items()}}

    def _key_of(self, loader: DataLoader) -> str:
        return next(key for key, known in self._loaders.items() if known is loader)
