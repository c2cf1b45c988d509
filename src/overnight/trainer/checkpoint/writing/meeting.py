"""Where the ranks of one save meet: files in the folder in which the checkpoint is prepared, and nothing else.

No collective runs here: a rank that fails leaves an abort file that all others see, and a rank that is gone costs a
time-out instead of a hang.
"""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from overnight.core.errors import CheckpointError, OvernightError, SaveFailedError, from_dict
from overnight.trainer.checkpoint.place import LocalPlace, Place, write_atomic

_FIRST_PAUSE_SECONDS = 0.002
_LOCAL_PAUSE_SECONDS = 0.02
_REMOTE_PAUSE_SECONDS = 0.5


class Meeting:
    """The folder in which one save is prepared, as one rank uses it.

    Args:
        place: The checkpoint place.
        folder: Name of the folder in it.
        rank, world_size: Of this process.
        timeout_seconds: How long it waits for others.
        progress: Called while it waits.
    """

    def __init__(
        self,
        place: Place,
        folder: str,
        *,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        progress: Callable[[], None],
    ) -> None:
        self._place = place
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._progress = progress

    def tell(self, topic: str, body: dict[str, Any]) -> None:
        """Leaves a file for the others. It need not outlive a power cut, only this process."""
        data = json.dumps(body, separators=(",", ":")).encode()
        name = f"{topic}-{self._rank}.json"
        if isinstance(self._place, LocalPlace):
            folder = self._place.root / self._folder
            folder.mkdir(exist_ok=True)  # who gives up first may be the first to come
            write_atomic(folder / name, data, durable=False)
        else:
            self._place.write(f"{self._folder}/{name}", data)

    def gather(self, topic: str) -> list[dict[str, Any]]:
        """What all ranks tell, in their order.

        Raises:
            OvernightError: A rank gave up; its error.
            SaveFailedError: A rank was not heard of in time.
        """
        names = [f"{topic}-{rank}.json" for rank in range(self._world_size)]
        if self._world_size > 1:
            self.wait(lambda present: set(names) <= present, f"all ranks to tell their {topic}")
        return [json.loads(self._place.read(f"{self._folder}/{name}")) for name in names]

    def wait(self, done: Callable[[set[str]], bool], what: str) -> None:
        """Waits until the names in the folder satisfy a condition.

        Raises:
            OvernightError, SaveFailedError: See :meth:`gather`.
        """
        deadline = time.monotonic() + self._timeout_seconds
        longest = _LOCAL_PAUSE_SECONDS if isinstance(self._place, LocalPlace) else _REMOTE_PAUSE_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while not done(present := set(self._place.entries(self._folder))):
            for name in sorted(present):
                if name.startswith("abort-"):
                    raise self._error_in(name)
            if time.monotonic() > deadline:
                raise SaveFailedError(
                    f"waited {self._timeout_seconds:g} s for {what}",
                    hint="A rank has died or its disk is stuck; nothing was published.",
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
            self._progress()

    def abort(self, error: OvernightError) -> None:
        """Tells the others that this rank gives up. On a full disk they run into their time-out instead."""
        with contextlib.suppress(Exception):  # whatever the store's driver raises
            self.tell("abort", error.to_dict())

    def _error_in(self, name: str) -> OvernightError:
        try:
            error = from_dict(json.loads(self._place.read(f"{self._folder}/{name}")))
        except (OSError, ValueError):
            error = SaveFailedError("no reason could be read")
        kind = type(error) if isinstance(error, CheckpointError) else SaveFailedError
        return kind(f"rank {name[6:-5]} gave up: {error.message}", hint=error.hint)
