"""When a run saves: between what the script, the clock and the platform want and what can be done at this boundary.

All ranks decide alike. What only one of them knows (its writer still reads the staging memory, an optimizer of its own
is in the middle of an accumulation, a save of its own has failed) travels with the agreement of all.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from overnight.core.errors import OvernightError, SaveDiscardedError, SaveFailedError
from overnight.trainer.agreement import Wishes
from overnight.trainer.boundary import Policy
from overnight.trainer.checkpoint.handle import SaveHandle, Saving
from overnight.trainer.checkpoint.pipeline import Moment
from overnight.trainer.checkpoint.place import CheckpointName
from overnight.trainer.checkpoint.saver import Saver
from overnight.trainer.checkpoint.writing.order import Kind
from overnight.trainer.link import Link
from overnight.trainer.phases import Ledger
from overnight.trainer.prospect import Prospect

ACCUMULATION_PATIENCE = 64
"""So many boundaries a save waits for an optimizer's step; then it takes gradients along."""

FAILURE_SECONDS = 10.0
"""How long a rank waits to hear of the failure that another one knows of already."""

_MAX_TRIES = 3
_LOOK_SECONDS = 0.05
_GIVEN_UP_HINT = "The output of that rank says why. The next start goes on from the last checkpoint that was committed."


class Saves:
    """The saves of a run.

    Args:
        saver: The tracked objects.
        policy: When to save without being asked; learns what saves cost.
        ledger: Gets the time that saves hold up the loop, and counts them.
        link: Hears of commits.
        moment: Makes sure that what led to this moment is told, and gives the run's own state.
        meet: Waits until all ranks are at the save, and combines their wishes.
        prospect: Watches whether the save that it is told can still be committed.
        rank, world_size: Of this process.
    """

    def __init__(
        self,
        saver: Saver,
        policy: Policy,
        ledger: Ledger,
        link: Link,
        *,
        moment: Callable[[Kind], Moment],
        meet: Callable[[Wishes], Wishes],
        prospect: Callable[[Callable[[], CheckpointName | None]], Prospect],
        rank: int,
        world_size: int,
    ) -> None:
        self._saver = saver
        self._pipeline = saver.pipeline
        self._policy = policy
        self._ledger = ledger
        self._link = link
        self._moment = moment
        self._meet = meet
        self._prospect = partial(prospect, lambda: self._pipeline.waited_for)
        self._shared = world_size > 1
        self._keeps_time = rank == 0
        self._wanted: Kind | None = None
        self._num_waits = 0
        self._began = False
        self._began_unseen = False
        self._has_given_up = False
        self._announced: CheckpointName | None = None
        self._announcing = threading.Lock()
        self._pipeline.on_commit = self._announce

    @property
    def possible(self) -> bool:
        """Whether there is anything that a checkpoint would hold."""
        return self._saver.tracks

    def request(self) -> SaveHandle:
        """The script wants a save at the next boundary."""
        self._wanted = "asked"
        return self._saver.request()

    # -- at boundaries ------------------------------------------------------------------------------------------------

    def wishes(self, *, leave: int, save: bool, over: int, send: bool) -> Wishes:
        """This rank's wishes, to which those of its saves are added; once at each boundary."""
        timed = self._keeps_time and self._saver.tracks and self._policy.due_by_time()
        self._pipeline.poll()
        self._tell_commits()
        # other ranks' wishes are those of the boundary before: they do not know yet of what began there
        self._began_unseen, self._began = self._began and self._shared, False
        return Wishes(
            leave=leave,
            save=int(save or timed or self._pipeline.wants_again),
            over=over,
            send=int(send),
            busy=int(self._pipeline.busy),
            failed=int(self._pipeline.unobserved_failure() is not None),
        )

    def at_boundary(self, agreed: Wishes, *, step: int, epoch_end: bool) -> None:
        """Begins a save if one is wanted and possible; puts it off and counts that if one is still being written.

        Args:
            agreed: The wishes of all ranks.
            step: Updates done.
            epoch_end: An epoch ends here.

        Raises:
            SaveFailedError, FencedError: An earlier save has failed, here or on another rank, and nobody was told.
        """
        if agreed.failed:
            raise self._failure()
        self._policy.updated(writing=self._pipeline.writing)
        due = self._saver.tracks and self._policy.due_by_count(step, epoch_end=epoch_end)
        if agreed.save or due:
            self._wanted = self._wanted or "periodic"
        if self._wanted is not None:
            if not (agreed.busy or self._began_unseen):
                self._begin_behind_an_update(self._wanted)
            elif agreed.save or due:
                self._ledger.count("saves_coalesced")
        elif self._saver.tracks:
            with suppress(Exception):  # whatever a state_dict() of the script raises: the save will tell
                self._saver.prepare()
        self._saver.next_update()

    def _begin_behind_an_update(self, kind: Kind) -> None:
        """Begins unless some rank is in the middle of an accumulation of its own, which may still come to its step."""
        patient = self._num_waits < ACCUMULATION_PATIENCE
        waits = patient and self._saver.accumulates()
        with self._ledger.within("checkpoint"):
            if self._meet(Wishes(wait=int(waits))).wait:
                self._num_waits += 1
                return
            self._begin(kind)

    def _begin(self, kind: Kind) -> Saving:
        started = time.monotonic()
        self._wanted, self._num_waits = None, 0
        saving = self._saver.save(self._moment(kind))
        self._began = True
        self._policy.saved(time.monotonic() - started)
        return saving

    def _failure(self) -> OvernightError:
        if self._pipeline.unobserved_failure() is None:
            self._pipeline.wait_for_all(FAILURE_SECONDS)
        hint = "The output of the other ranks says why."
        return self._pipeline.take_failure() or SaveFailedError("a checkpoint was not saved by another rank", hint=hint)

    def _tell_commits(self) -> None:
        for saving in self._pipeline.take_committed():
            assert saving.ticket is not None
            self._ledger.count("saves")
            self._ledger.count("bytes_staged", saving.num_bytes)
            self._policy.committed(saving.ticket.seconds.get("total", 0.0))
            self._announce(saving)

    def _announce(self, saving: Saving) -> None:
        """Tells the supervisor of a commit, once; whoever notices it first: the loop, or the thread that follows."""
        name = saving.ticket.published if saving.ticket is not None else None
        if name is None:
            return  # rank 0 tells
        with self._announcing:
            if self._announced is None or self._announced < name:  # saves are committed in order
                self._announced = name
                body = {"step": name.step, "uri": self._pipeline.uri(name), "bytes": saving.num_bytes}
                self._link.send("/v1/checkpoint", body)

    # -- at once ------------------------------------------------------------------------------------------------------

    def now(self, kind: Kind) -> Saving:
        """Saves without waiting for a boundary; all ranks are here. Waits for the staging memory, not for the commit.

        Raises:
            SaveFailedError: The state cannot be saved.
        """
        with self._ledger.within("checkpoint"):
            self._meet(Wishes())
            self._pipeline.wait_until_free()
            return self._begin(kind)

    # -- at the end ---------------------------------------------------------------------------------------------------

    def finish(self, kind: Kind, seconds: float | None = None) -> None:
        """Saves and waits for the commit; so do all ranks.

        Args:
            kind: Why.
            seconds: How long it may take in all.

        Raises:
            SaveFailedError, FencedError: It is not saved, or cannot be, since a peer has ended.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        for _ in range(_MAX_TRIES):
            with self._ledger.within("checkpoint"):
                self._meet(Wishes())
                if not self._wait(self._pipeline.wait_until_free, deadline):
                    raise SaveFailedError(f"the save before was not written within {seconds:.0f} s")
                saving = self._begin(kind)
                is_done = self._wait(partial(self._pipeline.wait, saving), deadline)
            if not is_done:
                raise SaveFailedError(f"{saving.name} was not committed within {seconds:.0f} s")
            saving.observed = True
            self._tell_commits()
            if saving.failure is None:
                return
            if not isinstance(saving.failure, SaveDiscardedError):
                break
        assert saving.failure is not None
        raise saving.failure

    def require_good(self) -> None:
        """Waits for all saves.

        Raises:
            SaveFailedError, FencedError: One failed and nobody was told, or cannot be committed, as a peer has ended.
        """
        self._wait(self._pipeline.wait_for_all)
        self._tell_commits()
        if (failure := self._pipeline.take_failure()) is not None:
            raise failure

    def close(self, seconds: float) -> OvernightError | None:
        """Gives saves that are under way so much time, and ends.

        Args:
            seconds: At most so much, and no more once it would be in vain.

        Returns:
            Why one failed, if nobody was told.
        """
        was_told, given_up = self._has_given_up, None
        try:
            self._wait(self._pipeline.wait_for_all, time.monotonic() + seconds)
        except SaveFailedError as error:
            given_up = error
        failure = self._saver.close(0.0)
        self._tell_commits()
        return None if failure is None or was_told else given_up or failure

    def _wait(self, wait: Callable[[float], bool], deadline: float | None = None) -> bool:
        """Waits for what all ranks have a part in, until it is there, the time is over, or a peer's part cannot come.

        Args:
            wait: Waits at most so many seconds; whether it is there.
            deadline: Of the monotonic clock.

        Returns:
            Whether it is there.

        Raises:
            SaveFailedError: It cannot come any more.
        """
        if wait(0.0):
            return True
        with self._prospect() as prospect:
            while deadline is None or time.monotonic() < deadline:
                if wait(_LOOK_SECONDS):
                    return True
                if prospect.reason:
                    self._has_given_up = True
                    raise SaveFailedError(prospect.reason, hint=_GIVEN_UP_HINT)
        return False
