"""Messages between the trainer and its writer process, and the memory they share.

A message is a small JSON object; whatever is large (an order with 100,000 tensors, a manifest) goes as the descriptor
of an anonymous file, so that sending never waits for the other side to read. Signs of life are numbers in shared
memory: they cost no message, and nobody has to fetch them.
"""

import array
import json
import mmap
import os
import socket
from typing import Any

STAGES = ("queued", "hashing", "writing", "uploading", "waiting", "publishing", "done")
_MESSAGE_BYTES = 256 << 10
_RIGHTS_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of a socket pair; keeps the boundaries of messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        """Two connected ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def inherited(cls, descriptor: int) -> "Channel":
        """The end that a parent left open."""
        end = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        return cls(end)

    def fileno(self) -> int:
        """Descriptor, readable when a message or the end of the channel is there."""
        return self._socket.fileno()

    def send(self, body: dict[str, Any], *descriptors: int) -> None:
        """Sends a message without waiting for its reader.

        Raises:
            ChannelClosedError: Nobody will ever read it, or nobody has read for long.
        """
        rights = array.array("i", descriptors)
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        try:
            self._socket.sendmsg([json.dumps(body).encode()], attached, socket.MSG_DONTWAIT)
        except OSError as error:
            raise ChannelClosedError(f"a message could not be sent: {error.strerror}") from error

    def receive(self, *, wait: bool = True) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, which are the caller's to close.

        Returns:
            None if there is none and nobody waits.

        Raises:
            ChannelClosedError: The other side has closed, and everything was read.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            data, attached, _, _ = self._socket.recvmsg(_MESSAGE_BYTES, _RIGHTS_SPACE, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosedError(f"the channel broke: {error.strerror}") from error
        if not data:
            raise ChannelClosedError("the other side has closed the channel")
        rights = array.array("i")
        for level, kind, content in attached:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
        return json.loads(data), list(rights)

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()


def anonymous(data: bytes) -> int:
    """Descriptor of memory with that content and no name; the caller closes it."""
    descriptor = os.memfd_create("overnight", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def content_of(descriptor: int) -> bytes:
    """What :func:`anonymous` was given; closes the descriptor."""
    with open(descriptor, "rb") as file:  # a descriptor, no path
        file.seek(0)
        return file.read()


class Pulse:
    """Signs of life of a writer process in shared memory: it writes them, the trainer reads them.

    Attributes:
        beats: Grows several times a second while the process runs.
        progress: Grows while a save gets on.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("Q")  # whole numbers: ``struct`` fills with zeros before it packs
        self._progress = 0
        self._stage = 0

    @classmethod
    def make(cls) -> "Pulse":
        """New shared memory."""
        descriptor = os.memfd_create("overnight-pulse", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor)

    def read(self) -> tuple[int, int, str]:
        """Beats, progress and stage."""
        beats, progress, stage = self._numbers[0], self._numbers[1], self._numbers[2]
        return beats, progress, STAGES[stage]

    def beat(self, beats: int) -> None:
        """Writes everything down; called by one thread alone."""
        self._numbers[2], self._numbers[1], self._numbers[0] = self._stage, self._progress, beats

    def step(self, _: int = 0) -> None:
        """Notes that the save gets on."""
        self._progress += 1

    def enter(self, stage: str) -> None:
        """Notes what the process is doing now."""
        self._stage = STAGES.index(stage)
        self._progress += 1

    def close(self) -> None:
        """Gives the memory back."""
        self._numbers.release()
        self._memory.close()
        os.close(self.descriptor)
