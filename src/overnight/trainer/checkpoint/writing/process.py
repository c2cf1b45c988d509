"""The writer process: takes orders from its trainer, one after the other, until one of them ends.

It lives in the trainer's session and process group, so that whatever kills the rank reaches it, and dies with the
thread that started it (PR_SET_PDEATHSIG). It ignores the signals by which ranks are asked to leave: the last save comes
after them.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overnight.core.errors import OvernightError, SaveFailedError
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.place import CheckpointName, Place, open_place
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.retry import Patience
from overnight.trainer.checkpoint.writing.channel import Channel, ChannelClosedError, Pulse, content_of
from overnight.trainer.checkpoint.writing.destination import Destination, make_destination
from overnight.trainer.checkpoint.writing.order import Author, SaveOrder
from overnight.trainer.checkpoint.writing.save import History, Save
from overnight.trainer.checkpoint.writing.tidying import Tidying

NICENESS = 10
BEAT_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Serves one trainer.

    Args:
        arguments: Descriptors of the channel and of the pulse, and the trainer's process id.
    """
    channel_descriptor, pulse_descriptor, parent = map(int, arguments)
    _die_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    channel, pulse = Channel.inherited(channel_descriptor), Pulse(pulse_descriptor)
    threading.Thread(target=_beat, args=(pulse,), daemon=True).start()
    with contextlib.suppress(ChannelClosedError):
        Server(channel, pulse).serve()


def _die_with(parent: int) -> None:
    """Asks the kernel for SIGKILL when the trainer dies; leaves at once if it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _beat(pulse: Pulse) -> None:
    never = threading.Event()
    beats = 0
    while True:
        beats += 1
        pulse.beat(beats)
        never.wait(BEAT_SECONDS)


@dataclass(frozen=True)
class Setup:
    """What the first message says."""

    author: Author
    place: Place
    destination: Destination
    retention: Retention
    tidies: bool


class Server:
    """The loop of the process.

    Args:
        channel: To the trainer.
        pulse: Signs of life.
    """

    def __init__(self, channel: Channel, pulse: Pulse) -> None:
        self._channel = channel
        self._pulse = pulse
        self._settings: dict[str, Any] = {}
        self._setup: Setup | None = None
        self._arena: tuple[int, mmap.mmap] | None = None
        self._history = History()
        self._tidying = Tidying()
        self._newest: CheckpointName | None = None

    def serve(self) -> None:
        """Serves until the trainer says that it is over.

        Raises:
            ChannelClosedError: The trainer is gone.
        """
        while True:
            received = self._channel.receive()
            assert received is not None
            message, descriptors = received
            match message["do"]:
                case "set up":
                    self._settings = json.loads(content_of(descriptors[0]))
                case "save":
                    self._save(message, descriptors)
                case "close":
                    self._tidy_at_end()
                    return

    def _set_up(self) -> Setup:
        """Opens the place with the first save, whose error it is if that fails."""
        if self._setup is not None:
            return self._setup
        message = self._settings
        author = Author.from_json(message["author"])
        place = open_place(message["place"])
        if isinstance(place, RemotePlace):
            place.patience = replace(Patience(author.retry_seconds), progress=self._pulse.step)
        destination = make_destination(place, author.rank, Path(message["staging"]), self._pulse.step)
        if message["fresh"]:
            destination.tidy(author.token)
        retention = Retention.from_json(message["retention"])
        self._setup = Setup(author, place, destination, retention, message["tidies"])
        return self._setup

    def _save(self, message: dict[str, Any], descriptors: list[int]) -> None:
        number = int(message["number"])
        save: Save | None = None
        error: OvernightError | None = None
        manifest = None
        try:
            order = SaveOrder.from_bytes(content_of(descriptors[0]))
            self._take_arena(message, descriptors[1:])
            setup = self._set_up()
            with self._memory(message) as memory:
                save = Save(
                    order,
                    memory,
                    setup.author,
                    setup.destination,
                    self._history,
                    self._pulse,
                    lambda num_bytes: self._release(number, num_bytes),
                )
                manifest = save.run()
        except OvernightError as failure:
            error = failure
        except Exception as failure:  # a defect here must not leave the trainer waiting
            error = SaveFailedError(f"the writer process failed: {type(failure).__name__}: {failure}")
        self._tell(number, save, manifest, error)
        if manifest is not None:
            self._tidy(manifest.name)

    def _tell(self, number: int, save: Save | None, manifest: Manifest | None, error: OvernightError | None) -> None:
        if save is not None:
            save.stopwatch.enter(None)
        self._pulse.enter("done")
        self._channel.send(
            {
                "say": "done",
                "number": number,
                "seconds": save.stopwatch.seconds if save else {},
                "error": error.to_dict() if error else None,
                "published": str(manifest.name) if manifest is not None else None,
                "num_bytes": manifest.num_bytes if manifest is not None else 0,
            }
        )

    def _release(self, number: int, num_bytes: int) -> None:
        self._channel.send({"say": "released", "number": number, "num_bytes": num_bytes})

    def _take_arena(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Maps an arena that came with the message; the older one is not used any more."""
        for descriptor in descriptors:
            if self._arena is not None:
                self._arena[1].close()
                self._arena = None
            mapped = mmap.mmap(descriptor, int(message["size"]), prot=mmap.PROT_READ)
            os.close(descriptor)
            self._arena = (int(message["arena"]), mapped)

    @contextlib.contextmanager
    def _memory(self, message: dict[str, Any]) -> Iterator[memoryview | None]:
        if message["arena"] is None:
            yield None
            return
        if self._arena is None or self._arena[0] != message["arena"]:
            raise SaveFailedError("the writer process does not have the arena of this save")
        view = memoryview(self._arena[1])
        try:
            yield view
        finally:
            with contextlib.suppress(BufferError):
                view.release()

    def _tidy(self, newest: CheckpointName) -> None:
        """Deletes what retention does not keep."""
        setup = self._set_up()
        self._newest = newest
        with _forgiving():
            self._tidying.after(setup.place, newest, setup.retention)
            if setup.tidies:
                self._tidying.of_earlier(setup.place, newest, setup.author.parent)

    def _tidy_at_end(self) -> None:
        if self._newest is not None and (setup := self._set_up()).tidies:
            with _forgiving():
                self._tidying.at_end(setup.place, self._newest)


@contextlib.contextmanager
def _forgiving() -> Iterator[None]:
    """A failure to delete costs space, not the checkpoint."""
    try:
        yield
    except Exception as error:  # whatever a store's driver raises
        print(f"overnight: old checkpoints were not deleted: {error}", file=sys.stderr, flush=True)
