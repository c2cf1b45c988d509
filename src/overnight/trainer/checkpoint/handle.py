"""A save under way, as the script and as the run see it."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from overnight.core.errors import BadInputError, OvernightError, SaveFailedError
from overnight.trainer.checkpoint.place import CheckpointName
from overnight.trainer.checkpoint.writing.order import Kind
from overnight.trainer.checkpoint.writing.ticket import Ticket


class Saving:
    """One save, from the boundary to its commit. The staging thread and the loop both look at it.

    Attributes:
        name: Under which it will be published.
        kind: Why it was begun.
        began_at: ``time.monotonic()``.
        staged: Set once the state of the boundary is safe in the arena, whatever training does.
        delivered: Set once the writer has it, or nothing will come of it.
        ticket: The writer's.
        error: Why nothing will come of it.
        observed: Whether somebody who asked was told how it ended.
    """

    def __init__(self, name: CheckpointName, kind: Kind, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.kind = kind
        self.began_at = monotonic()
        self.staged = threading.Event()
        self.delivered = threading.Event()
        self.ticket: Ticket | None = None
        self.error: OvernightError | None = None
        self.observed = False
        self.handles: list[SaveHandle] = []

    @property
    def released(self) -> bool:
        """Whether the arena may be overwritten."""
        if not self.delivered.is_set():
            return False
        return self.ticket is None or self.ticket.released or self.ticket.done

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is durable."""
        return self.ticket is not None and self.ticket.committed

    @property
    def failure(self) -> OvernightError | None:
        """Why it was not saved."""
        return self.error or (self.ticket.error if self.ticket is not None else None)

    @property
    def done(self) -> bool:
        """Committed or failed."""
        return self.delivered.is_set() and (self.committed or self.failure is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes of the checkpoint on rank 0, of this rank's part elsewhere."""
        if self.ticket is None:
            return 0
        return self.ticket.published_bytes if self.ticket.published is not None else self.ticket.num_bytes


class Drives(Protocol):
    """Who brings saves forward."""

    def poll(self) -> None:
        """Looks what has become of the saves under way."""

    def wait(self, saving: Saving, seconds: float | None) -> bool:
        """Waits until a save is done; whether it is."""

    def uri(self, name: CheckpointName) -> str:
        """Where a checkpoint is."""


class SaveHandle:
    """What :meth:`overnight.trainer.execution.Run.save` returns: how far the save is.

    A save that was discarded, since the script changed its state while it was copied, goes on at the next boundary.
    """

    def __init__(self, driver: Drives) -> None:
        self._driver = driver
        self._saving: Saving | None = None
        self._was_discarded = False

    def __repr__(self) -> str:
        name = self._saving.name if self._saving is not None else "a save"
        state = "committed" if self.committed else "staged" if self.staged else "waiting for a boundary"
        return f"<{name}: {state}>"

    @property
    def staged(self) -> bool:
        """Whether the state is copied: it will be saved as it was at the boundary, whatever training does now."""
        return self._saving is not None and self._saving.staged.is_set()

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is published, hence durable."""
        if self._saving is not None and not self._saving.done:
            self._driver.poll()
        return self._saving is not None and self._saving.committed

    def result(self, timeout: float | None = None) -> str:
        """Waits for the commit.

        Args:
            timeout: Seconds; None waits until the save is committed or has failed.

        Returns:
            Where the checkpoint is.

        Raises:
            BadInputError: It has not begun, or has to begin again: inside the body of a loop, a save begins at the
                next boundary.
            TimeoutError: Not yet.
            SaveFailedError, FencedError: It was not saved. The run does not raise that again.
        """
        if self._saving is None and self._was_discarded:
            raise BadInputError(
                "this save was discarded: its state was changed while it was copied; the next boundary takes it again",
                hint="Call result() in a later round of the loop.",
            )
        if self._saving is None:
            raise BadInputError(
                "this save has not begun: inside the body of a loop, run.save() takes effect at the next boundary",
                hint="Call result() in a later round of the loop, or save between two loops.",
            )
        saving = self._saving
        if not self._driver.wait(saving, timeout):
            raise TimeoutError(f"{saving.name} is not committed after {timeout:g} s")
        if saving is not self._saving:  # discarded meanwhile, and put off to the next boundary
            return self.result(timeout)
        saving.observed = True
        if saving.failure is not None:
            raise saving.failure
        published = saving.ticket.published if saving.ticket is not None else None  # an earlier one if nothing changed
        return self._driver.uri(published or saving.name)

    def attach(self, saving: Saving | None) -> None:
        """Says which save it is about; None if that was discarded and another one will begin."""
        self._saving = saving
        self._was_discarded = saving is None


def as_failure(error: Exception, name: CheckpointName) -> OvernightError:
    """An error of a save as the run raises it."""
    if isinstance(error, OvernightError):
        return error
    return SaveFailedError(f"checkpoint {name} was not saved: {type(error).__name__}: {error}")
