"""Whether what a rank waits for on its way out can still come: the commit of a save that all ranks take part in.

A peer whose connection is gone has ended, and its writer with it. What it had told the others by then still counts, and
is enough if it is all of its part; nothing will be added to it. So the wait is over when a lost peer's part is missing,
and goes on while none is, however many peers are lost.
"""

import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Self

from overnight.trainer.checkpoint.place import CheckpointName, Place, partial_name

PAUSE_SECONDS = 0.1
"""Between the first two looks. Two in a row must be the same: a writer that was killed ends the system call that it was
in."""

LONGEST_PAUSE_SECONDS = 2.0
"""Each look sends peers something that nobody takes, and each pause is a little longer: a store may need hours."""

_GROWTH = 1.05


class Prospect:
    """Looks in the background, as a store may not answer, for as long as its context is open.

    Args:
        place: Of the checkpoints.
        lost: Ranks whose connection is gone.
        waited_for: The save that is waited for, None if there is none.
        pause_seconds: Between the first two looks.

    Attributes:
        reason: Why the commit cannot come any more; empty while it can.
    """

    def __init__(
        self,
        place: Place,
        lost: Callable[[], Collection[int]],
        waited_for: Callable[[], CheckpointName | None],
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._place = place
        self._lost = lost
        self._waited_for = waited_for
        self._pause_seconds = pause_seconds
        self._over = threading.Event()
        self._asking_peers = threading.Lock()
        self.reason = ""

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="overnight-prospect", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._asking_peers:  # their connections are used for other things from now on, or closed
            self._over.set()

    def _watch(self) -> None:
        before: tuple[CheckpointName, int] | None = None
        pause_seconds = self._pause_seconds
        while not self._over.is_set():
            found = None
            with contextlib.suppress(Exception):  # a store that does not answer says nothing
                found = self.look()
            if found is not None and found == before:
                name, rank = found
                self.reason = f"checkpoint {name} was given up: rank {rank} has ended before its part was written"
                return
            before = found
            self._over.wait(pause_seconds)
            pause_seconds = min(pause_seconds * _GROWTH, LONGEST_PAUSE_SECONDS)

    def look(self) -> tuple[CheckpointName, int] | None:
        """The save that cannot be committed any more, and the rank because of which; None if it can.

        Raises:
            Exception: Whatever the place raises.
        """
        name = self._waited_for()
        if name is None or not (lost := self._lost_now()):
            return None
        told = set(self._place.entries(partial_name(name)))
        missing = lost if lost[0] == 0 else [rank for rank in lost if f"rank-{rank}.json" not in told]
        if not missing or name in self._place.checkpoints():  # whose notes are taken away
            return None
        return name, missing[0]

    def _lost_now(self) -> list[int]:
        with self._asking_peers:
            return [] if self._over.is_set() else sorted(self._lost())
