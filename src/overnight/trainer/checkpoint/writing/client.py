"""The trainer's side of the writer process: spawn it, hand it orders, notice when it dies or stalls, redo what it left.

Nothing here runs in a thread of its own. The trainer calls :meth:`WriterClient.poll` at its boundaries; between them
the process works alone.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overnight
from overnight.core.errors import OvernightError, SaveFailedError, from_dict
from overnight.trainer.checkpoint.place import CheckpointName
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.writing.channel import Channel, ChannelClosedError, Pulse, anonymous
from overnight.trainer.checkpoint.writing.order import Author, SaveOrder
from overnight.trainer.checkpoint.writing.ticket import Arena, Ticket

__all__ = ["Arena", "Ticket", "WriterClient"]

MAX_TRIES = 3
STALL_SECONDS = 30.0
START_SECONDS = 60.0
"""On a busy machine an interpreter may need that long for its first sign of life."""

_DOUBT_SECONDS = 2.0
_POLL_SECONDS = 0.2

BOOT_LINE = (
    "import sys,json,importlib.util as u;"
    "p=sys.argv[1];"
    "s=u.spec_from_file_location('overnight',p+'/__init__.py',submodule_search_locations=[p]);"
    "m=u.module_from_spec(s);sys.modules['overnight']=m;s.loader.exec_module(m);"
    "from overnight.trainer.checkpoint.writing.process import main;"
    "main(sys.argv[2:])"
)
"""Loads this very installation, whether or not it is on the path of the interpreter, without changing that path."""


def command() -> list[str]:
    """The command line of the process, without its arguments; ``-P`` keeps the script's folder off the path."""
    return [sys.executable, "-P", "-c", BOOT_LINE, str(Path(overnight.__file__).resolve().parent)]


@dataclass
class _Job:
    """An order that is not done: what is needed to hand it over again."""

    ticket: Ticket
    order: bytes
    arena: Arena


class _Process:
    """One life of the writer process."""

    def __init__(self, arguments: Sequence[str], clock: Callable[[], float]) -> None:
        self.channel, theirs = Channel.pair()
        self.pulse = Pulse.make()
        descriptors = (theirs.fileno(), self.pulse.descriptor)
        try:
            self._process = subprocess.Popen(
                [*arguments, *map(str, descriptors), str(os.getpid())], stdin=subprocess.DEVNULL, pass_fds=descriptors
            )
        except OSError:
            self.channel.close()
            self.pulse.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.arena: int | None = None
        self._clock = clock
        self._started_at = clock()
        self._seen: dict[str, tuple[int, float]] = {}
        self._doubted_at: float | None = None

    def is_dead(self) -> bool:
        """Whether it has ended; then it is no zombie either."""
        return self._process.poll() is not None

    def describe_end(self) -> str:
        """How it ended."""
        code = self._process.returncode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"

    def is_stalled(self, stall_seconds: float, progress_seconds: float) -> bool:
        """Whether it has shown no sign of life, or its save no progress, for too long.

        After a pause of this process itself (a suspended machine) the other one gets time to show that it lives.
        """
        now = self._clock()
        beats, progress, _ = self.pulse.read()
        if beats == 0:
            return now - self._started_at > START_SECONDS
        for name, value in (("beats", beats), ("progress", progress)):
            if self._seen.get(name, (-1, 0.0))[0] != value:
                self._seen[name] = (value, now)
        late = now - self._seen["beats"][1] > stall_seconds or now - self._seen["progress"][1] > progress_seconds
        if not late:
            self._doubted_at = None
        elif self._doubted_at is None:
            self._doubted_at = now
        return self._doubted_at is not None and now - self._doubted_at >= min(_DOUBT_SECONDS, stall_seconds)

    def busy_again(self) -> None:
        """A save begins: the time without progress counts from now."""
        self._seen.pop("progress", None)

    def end(self, seconds: float) -> bool:
        """Waits for its end, then kills it; False if not even that ends it (a write that hangs in the kernel)."""
        for limit in (seconds, 1.0):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if limit > 0:
                    self._process.wait(limit)
                    break
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self.channel.close()
        self.pulse.close()
        return self._process.poll() is not None


class WriterClient:
    """A writer process and the orders that it has.

    Args:
        place_url: The checkpoint place, path or URL.
        author: Who writes.
        retention: What is deleted after a commit.
        staging_dir: Local folder for checkpoints on their way to a remote place; of no use for local ones.
        tidies: It also deletes what earlier attempts left, since nobody else does. Rank 0's does it.
        arguments: Command line of the process.
        stall_seconds: Without a sign of life for so long, the process is killed and its work redone.
        clock: Monotonic.

    One call at a time. The thread that calls :meth:`start` must not end before :meth:`close`: the process dies with it;
    for the same reason only :meth:`poll` from that thread respawns. None but :meth:`wait` and :meth:`close` waits.
    """

    def __init__(
        self,
        place_url: str,
        author: Author,
        retention: Retention,
        staging_dir: Path,
        *,
        tidies: bool = False,
        arguments: Sequence[str] | None = None,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place_url = place_url
        self._author = author
        self._retention = retention
        self._staging_dir = staging_dir
        self._tidies = tidies
        self._arguments = list(arguments) if arguments is not None else command()
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._process: _Process | None = None
        self._jobs: list[_Job] = []
        self._done: list[Ticket] = []
        self._stuck: list[_Process] = []
        self._has_started = False
        self._home = threading.get_ident()
        self._last_end = ""

    @property
    def busy(self) -> bool:
        """Whether some order still reads the arena: do not overwrite it."""
        return any(not job.ticket.released for job in self._jobs)

    @property
    def pid(self) -> int | None:
        """Of the process, None if none runs."""
        return self._process.pid if self._process is not None else None

    @property
    def is_down(self) -> bool:
        """Whether there are orders, but no process: the thread that may start one has to :meth:`poll`."""
        return self._process is None and bool(self._jobs)

    def start(self) -> None:
        """Spawns the process and returns at once. Submitting does it too."""
        self._home = threading.get_ident()
        if self._process is not None:
            return
        with contextlib.suppress(OSError, ChannelClosedError):  # submitting tries again, and tells
            self._spawn()

    def _spawn(self) -> None:
        self._process = process = _Process(self._arguments, self._clock)
        settings = {
            "do": "set up",
            "place": self._place_url,
            "author": self._author.to_json(),
            "retention": self._retention.to_json(),
            "staging": str(self._staging_dir),
            "tidies": self._tidies,
            "fresh": not self._has_started,
        }
        descriptor = anonymous(json.dumps(settings).encode())
        try:
            process.channel.send({"do": "set up"}, descriptor)
        finally:
            os.close(descriptor)
        self._has_started = True

    def submit(self, order: SaveOrder, arena: Arena) -> Ticket:
        """Hands an order over; the arena stays untouched until ``ticket.released``.

        Never raises for what goes wrong with the save itself: that is ``ticket.error``.
        """
        ticket = Ticket(order.number, order.name(self._author.token), self._clock())
        job = _Job(ticket, order.to_bytes(), arena)
        self._jobs.append(job)
        if self._process is None:
            self._revive()
        else:
            self._send(job, self._process)
        return ticket

    def _revive(self) -> None:
        """Starts a process, from the thread that may, and gives it all that is not done."""
        if threading.get_ident() != self._home:
            return  # the process would die with this thread; the next poll() from the other one does it
        for job in list(self._jobs):
            if job.ticket.num_tries >= MAX_TRIES:
                what = f"the writer process {self._last_end}, {MAX_TRIES} times"
                hint = "Nothing was published; earlier checkpoints are untouched and usable."
                self._finish(job, SaveFailedError(f"checkpoint {job.ticket.name} was not saved: {what}", hint=hint))
        try:
            self._spawn()
        except ChannelClosedError:
            pass  # it has just died: poll() sees that
        except OSError as error:
            for job in list(self._jobs):
                self._finish(job, SaveFailedError(f"no writer process could be started: {error}"))
        for job in self._jobs:
            assert self._process is not None
            self._send(job, self._process)

    def _send(self, job: _Job, process: _Process) -> None:
        job.ticket.num_tries += 1
        body: dict[str, Any] = {"do": "save", "number": job.ticket.number, "arena": None}
        descriptors = [anonymous(job.order)]
        try:
            if not job.ticket.released:
                body |= {"arena": job.arena.number, "size": job.arena.size}
                if process.arena != job.arena.number:
                    descriptors.append(os.dup(job.arena.fileno()))
                    process.arena = job.arena.number
            with contextlib.suppress(ChannelClosedError):  # it has just died: poll() sees that, and redoes the job
                process.channel.send(body, *descriptors)
            process.busy_again()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def poll(self) -> list[Ticket]:
        """Takes in what the process says, respawns it if it died, and updates tickets.

        Returns:
            Tickets that were done since the last call.
        """
        self._stuck = [process for process in self._stuck if not process.is_dead()]
        process = self._process
        if process is not None:
            ended = process.is_dead()  # asked first: whatever it has said is in the channel by now
            self._listen(process)
            if self._jobs and not ended:
                self._jobs[0].ticket.stage = process.pulse.read()[2]
                if process.is_stalled(self._stall_seconds, self._author.timeout_seconds + _DOUBT_SECONDS):
                    self._redo(process, "made no progress")
            elif ended:
                self._redo(process, process.describe_end())
        elif self._jobs:
            self._revive()
        done, self._done = self._done, []
        return done

    def _listen(self, process: _Process) -> None:
        with contextlib.suppress(ChannelClosedError):
            while (received := process.channel.receive(wait=False)) is not None:
                message, _ = received
                job = next((job for job in self._jobs if job.ticket.number == message["number"]), None)
                if job is not None:
                    self._take_in(job, message)
                process.busy_again()

    def _take_in(self, job: _Job, message: dict[str, Any]) -> None:
        if message["say"] == "released":
            job.ticket.released = True
            job.ticket.num_bytes = message["num_bytes"]
            return
        job.ticket.seconds |= message["seconds"]
        if message["published"] is not None:  # its name only: to parse a manifest here would hold training up
            job.ticket.published = CheckpointName.parse(message["published"])
            job.ticket.published_bytes = message["num_bytes"]
        self._finish(job, from_dict(message["error"]) if message["error"] is not None else None)

    def _finish(self, job: _Job, error: OvernightError | None) -> None:
        ticket = job.ticket
        ticket.error, ticket.committed = error, error is None
        ticket.released, ticket.stage = True, "done"
        ticket.seconds["total"] = self._clock() - ticket.submitted_at
        self._jobs.remove(job)
        self._done.append(ticket)

    def _redo(self, process: _Process, what: str) -> None:
        """Ends the process and gives a new one what it has not done."""
        self._process = None
        self._last_end = what
        if not process.end(0.0):
            self._stuck.append(process)
        self._revive()

    def wait(self, ticket: Ticket, seconds: float | None = None) -> bool:
        """Waits until a ticket is done; :meth:`poll` returns it still.

        Returns:
            False if it is not after that many seconds, or at once if another thread has to start the process.
        """
        deadline = None if seconds is None else self._clock() + seconds
        while True:
            self._done = self.poll()
            if ticket.done:
                return True
            left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - self._clock())
            if left <= 0 or self._process is None:
                return False
            poller = select.poll()  # unlike select(), it takes descriptors above 1023
            poller.register(self._process.channel, select.POLLIN)
            poller.poll(1000 * left)

    def close(self, seconds: float = 5.0) -> None:
        """Ends the process: orderly if it is idle, else by SIGKILL; leaves no zombie. May be called twice."""
        self.poll()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ChannelClosedError):
                process.channel.send({"do": "close"})
            if not process.end(0.0 if self._jobs else seconds):
                self._stuck.append(process)
        for job in list(self._jobs):
            self._finish(job, SaveFailedError(f"checkpoint {job.ticket.name} was given up: the run has ended"))
