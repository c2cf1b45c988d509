"""The way of a save: encoded and staged at a boundary, handed to the writer process behind it, followed to its end.

The loop gives what must be of this moment and goes on. A thread finishes the copy, lets what led to the checkpoint be
told, and hands the order over: nothing of that waits for the step that is under way, so that a run that is killed in a
long step still gets its last staged state committed.
"""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from overnight.core.errors import OvernightError, SaveDiscardedError
from overnight.trainer.checkpoint.handle import SaveHandle, Saving, as_failure
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Place, partial_name
from overnight.trainer.checkpoint.repetition import Encoder
from overnight.trainer.checkpoint.staging.stager import Staged, Stager
from overnight.trainer.checkpoint.staging.worker import Worker
from overnight.trainer.checkpoint.state import Encoded, encode
from overnight.trainer.checkpoint.writing.client import WriterClient
from overnight.trainer.checkpoint.writing.meeting import Meeting
from overnight.trainer.checkpoint.writing.order import Author, Kind, SaveOrder
from overnight.trainer.checkpoint.writing.ticket import Ticket

MAX_DISCARDS = 3
"""So many saves in a row are taken again when the script changes what they copy; each object can do it once."""

_POLL_SECONDS = 0.05
_FOLLOW_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the run adds to the tracked state.

    Attributes:
        step: Updates done.
        kind: Why it is saved.
        internal: The run's own state by name; names begin with ``$``.
        position: For the manifest: which loops are open, and where each loader is.
        metrics: Latest reported values.
        facts: See :class:`~overnight.trainer.checkpoint.writing.order.SaveOrder`.
    """

    step: int
    kind: Kind = "periodic"
    internal: Mapping[str, Any] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Pipeline:
    """The saves of one rank.

    Args:
        place: The checkpoint place.
        author: Who saves.
        stager: Copies states.
        writer: Writes them.
        before_submit: Called in the background before an order is handed over; may wait, must not raise.

    Attributes:
        on_commit: Called in the background as soon as a save is committed, however long the step is that is under way.
        wants_again: A save was discarded and is to be taken again.
    """

    def __init__(
        self,
        place: Place,
        author: Author,
        stager: Stager,
        writer: WriterClient,
        before_submit: Callable[[], object],
    ) -> None:
        self._place = place
        self._author = author
        self._stager = stager
        self._writer = writer
        self._before_submit = before_submit
        self._lock = threading.RLock()  # the writer's client is for one thread at a time
        self._newest = (0, 0)  # step, and how many saves of it there were
        self._num_orders = 0
        self._under_way: list[Saving] = []
        self._committed: list[Saving] = []
        self._failed: list[Saving] = []
        self._waiting: list[SaveHandle] = []
        self._num_discards = 0
        self._closed = False
        self._follower = Worker("overnight-following")
        self._encoder = Encoder()
        self.on_commit: Callable[[Saving], object] = lambda saving: None
        self.wants_again = False

    @property
    def busy(self) -> bool:
        """Whether the arena is in use: a save must wait."""
        return any(not saving.released for saving in self._under_way)

    @property
    def writing(self) -> bool:
        """Whether any save is under way."""
        return bool(self._under_way)

    @property
    def waited_for(self) -> CheckpointName | None:
        """The save whose commit comes next, None if none is under way; any thread may ask."""
        return next((saving.name for saving in list(self._under_way) if not saving.done), None)

    def uri(self, name: CheckpointName) -> str:
        """Where a checkpoint is."""
        return f"{self._place}/{name}"

    def start_writer(self) -> None:
        """Starts the writer process, which the first save would otherwise do."""
        with self._lock:
            self._writer.start()

    def request(self) -> SaveHandle:
        """A handle to the next save."""
        handle = SaveHandle(self)
        self._waiting.append(handle)
        return handle

    # -- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, moment: Moment, states: Callable[[], Mapping[str, Any]], objects: Collection[Any]) -> Saving:
        """Stages the state of this moment; nobody else may be reading the arena (:attr:`busy`).

        Args:
            moment: When, why, and the run's own state.
            states: Gives the live state of the tracked objects by name.
            objects: They themselves.

        Raises:
            SaveFailedError: Something cannot be saved, or there is no memory for it. Nothing was written.
        """
        step, num_saves = self._newest
        self._newest = (moment.step, num_saves + 1 if step == moment.step else 1)
        name = CheckpointName(moment.step, self._author.token, self._newest[1])
        saving = Saving(name, moment.kind)
        self.wants_again = False
        handles, self._waiting = self._waiting, []
        for handle in handles:
            handle.attach(saving)
        saving.handles = handles
        try:
            with _no_collection():
                encoded = self._encoder.encode({**states(), **moment.internal})
                self._under_way.append(saving)
                self._stager.stage(encoded, objects, lambda staged: self._hand_over(saving, moment, encoded, staged))
        except BaseException as error:
            with contextlib.suppress(ValueError):
                self._under_way.remove(saving)
            saving.handles = []
            saving.error = as_failure(error, name) if isinstance(error, Exception) else None
            saving.observed = True  # by whoever catches it
            saving.delivered.set()
            if saving.error is not None:
                self._tell_ranks(saving)
            raise
        return saving

    def prepare(self, states: Callable[[], Mapping[str, Any]], objects: Collection[Any]) -> None:
        """Takes the memory for such saves in the background, ahead of the first."""
        with _no_collection():
            self._stager.prepare(encode(states()), objects)

    def _hand_over(self, saving: Saving, moment: Moment, encoded: Encoded, staged: Staged) -> None:
        """Runs in the staging thread."""
        try:
            if not staged.good:
                raise _reason(saving.name, staged)
            saving.staged.set()
            self._before_submit()
            text = encoded.text()
            with self._lock:
                self._num_orders += 1
                order = SaveOrder(
                    number=self._num_orders,
                    step=moment.step,
                    save=saving.name.save,
                    objects=text,
                    position=moment.position,
                    pieces=staged.pieces,
                    kind=moment.kind,
                    metrics=moment.metrics,
                    facts=moment.facts,
                )
                saving.ticket = ticket = self._writer.submit(order, staged.arena)
            self._follower.do(lambda: self._follow(saving, ticket))
        except Exception as error:  # nobody is here to catch it: it goes to the loop
            saving.error = as_failure(error, saving.name)
            self._tell_ranks(saving)
        finally:
            saving.delivered.set()

    def _tell_ranks(self, saving: Saving) -> None:
        """Lets the other ranks' writers give up too, instead of waiting for this rank's part."""
        if self._author.world_size == 1 or saving.error is None:
            return
        folder = partial_name(saving.name)
        with contextlib.suppress(OSError):
            if isinstance(self._place, LocalPlace):
                (self._place.root / folder).mkdir(exist_ok=True)
            rank, world_size = self._author.rank, self._author.world_size
            meeting = Meeting(
                self._place, folder, rank=rank, world_size=world_size, timeout_seconds=0.0, progress=lambda: None
            )
            meeting.abort(saving.error)

    # -- following ----------------------------------------------------------------------------------------------------

    def _follow(self, saving: Saving, ticket: Ticket) -> None:
        """Runs in a thread of its own: the loop looks between two updates only, and one may last for minutes."""
        while not ticket.done and not self._closed:
            self._listen(ticket, _FOLLOW_SECONDS)
        if ticket.committed:
            self.on_commit(saving)

    def _listen(self, ticket: Ticket, seconds: float) -> None:
        """Waits a while for what the writer says; without its lock if the loop has to start it again."""
        with self._lock:
            if not self._closed:
                self._writer.wait(ticket, seconds)
            is_down = self._writer.is_down
        time.sleep(_FOLLOW_SECONDS if is_down else 0)  # whoever else wants the lock goes first

    def poll(self) -> None:
        """Looks what has become of the saves under way."""
        if not self._under_way or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._writer.poll()
            for saving in [one for one in self._under_way if one.done]:
                self._under_way.remove(saving)
                self._end(saving)
        finally:
            self._lock.release()

    def _end(self, saving: Saving) -> None:
        failure = saving.failure
        handles, saving.handles = saving.handles, []  # each refers to the other: else only the collector ends them
        if failure is None:
            self._committed.append(saving)
            self._num_discards = 0
        elif isinstance(failure, SaveDiscardedError) and self._num_discards < MAX_DISCARDS:
            self._num_discards += 1
            self.wants_again = True
            for handle in handles:
                handle.attach(None)
            self._waiting += handles
        else:
            self._failed = [*(one for one in self._failed if not one.observed), saving]  # some scripts try on and on

    def take_committed(self) -> list[Saving]:
        """Saves that were committed since the last call."""
        taken, self._committed = self._committed, []
        return taken

    @property
    def num_discards(self) -> int:
        """How many saves in a row were discarded."""
        return self._num_discards

    def unobserved_failure(self) -> OvernightError | None:
        """Why a save failed, if nobody was told yet; whoever takes it tells."""
        failed = next((saving for saving in self._failed if not saving.observed), None)
        return failed.failure if failed is not None else None

    def take_failure(self) -> OvernightError | None:
        """As :meth:`unobserved_failure`, and all failures count as told."""
        with self._lock:  # another thread may just be adding one
            failure = self.unobserved_failure()
            self._failed.clear()
        return failure

    def wait(self, saving: Saving, seconds: float | None = None) -> bool:
        """Waits until a save is done; whether it is."""
        return self._wait(lambda: saving.done, lambda: saving, seconds)

    def wait_until_free(self, seconds: float | None = None) -> bool:
        """Waits until the arena is not in use; whether it is not."""
        return self._wait(
            lambda: not self.busy, lambda: next((one for one in self._under_way if not one.released), None), seconds
        )

    def wait_for_all(self, seconds: float | None = None) -> bool:
        """Waits until no save is under way; whether none is."""
        return self._wait(lambda: not self._under_way, lambda: next(iter(self._under_way), None), seconds)

    def _wait(self, over: Callable[[], bool], which: Callable[[], Saving | None], seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self.poll()
            if over():
                return True
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return False
            saving = which()
            if saving is None:
                continue
            if not saving.delivered.wait(left):
                continue
            if saving.ticket is not None and not saving.done:
                self._listen(saving.ticket, left)

    def close(self, seconds: float) -> None:
        """Gives the saves under way so much time, then ends the writer process and the copies. Safe to call twice."""
        if self._closed:
            return
        self.wait_for_all(seconds)
        with self._lock:
            self._closed = True
            self._writer.close()
            self.poll()  # which does not wait for the lock, and would miss what has failed now
        self._stager.close()
        self._follower.close()


def _reason(name: CheckpointName, staged: Staged) -> OvernightError:
    if staged.error is not None:
        return as_failure(staged.error, name)
    changed = ", ".join(repr(one) for one in staged.changed)
    return SaveDiscardedError(
        f"checkpoint {name} was discarded: {changed} was changed, not by an optimizer's step, while it was copied",
        hint="It is saved again at the next boundary, and from now on copied before training goes on.",
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector away: thousands of small objects at once make it look at the whole heap, 20 ms."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
