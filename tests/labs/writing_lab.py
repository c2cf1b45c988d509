"""A trainer's side of the writer process without a trainer: an arena, orders, clients, and where to strike."""

import contextlib
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import LIMIT_SECONDS

from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Place, Token
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.writing.client import Ticket, WriterClient
from overnight.trainer.checkpoint.writing.order import Author, Piece, SaveOrder

if TYPE_CHECKING:
    import torch

STRIKER = Path(__file__).with_name("writing_strike.py")


def raw(tensor: "torch.Tensor") -> bytes:
    """The bytes of a tensor in C order."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class Memory:
    """Staging memory with some tensors in it."""

    def __init__(self, tensors: "dict[str, torch.Tensor | bytes]", number: int = 1) -> None:
        self.number = number
        self.pieces: list[Piece] = []
        data = bytearray()
        for key, tensor in tensors.items():
            data += bytes(-len(data) % 64)
            if isinstance(tensor, bytes):  # a process that is started for a moment need not import torch
                content, dtype, shape = tensor, "uint8", (len(tensor),)
            else:
                content, dtype, shape = raw(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            self.pieces.append(Piece(key, dtype, shape, len(data), len(content)))
            data += content
        self.size = max(mmap.PAGESIZE, len(data))
        self._descriptor = os.memfd_create("lab")
        os.ftruncate(self._descriptor, self.size)
        self.bytes = mmap.mmap(self._descriptor, self.size)
        self.bytes[: len(data)] = bytes(data)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self.bytes.close()
        os.close(self._descriptor)


def order(number: int, step: int, memory: Memory, **changes: Any) -> SaveOrder:
    """An order for what lies in a memory."""
    facts = {"versions": {"torch": "x"}, "threads": 1}
    given = {"save": 1, "objects": f'{{"it": {step}}}', "position": {"at": step}, "facts": facts, **changes}
    return SaveOrder(number=number, step=step, pieces=tuple(given.pop("pieces", memory.pieces)), **given)


@contextlib.contextmanager
def client_of(
    place: Place | str, tmp_path: Path, token: Token = Token(1), *, claims: bool = True, **options: Any
) -> Iterator[WriterClient]:
    """A client whose token has claimed the place."""
    author_fields = {name: options.pop(name) for name in list(options) if name in Author.__dataclass_fields__}
    author = Author(**{"token": token, "parent": None, "timeout_seconds": 30.0, **author_fields})
    if claims and author.rank == 0 and isinstance(place, Place):
        author = replace(author, place=claim(place, token, author.parent).place)
    retention = options.pop("retention", Retention(keep=2))
    client = WriterClient(
        place.url if isinstance(place, Place) else place, author, retention, tmp_path / "staging", **options
    )
    client.start()
    try:
        yield client
    finally:
        client.close()


def finish(client: WriterClient, ticket: Ticket) -> Ticket:
    """Waits for a ticket."""
    assert client.wait(ticket, LIMIT_SECONDS), f"still {ticket.stage} after {LIMIT_SECONDS} s"
    return ticket


def descriptors(pid: int | str = "self") -> set[str]:
    """Open descriptors of a process."""
    return {path.name for path in Path(f"/proc/{pid}/fd").iterdir()}


def is_gone(pid: int) -> bool:
    """Whether a process is neither running nor a zombie."""
    return not Path(f"/proc/{pid}").exists()


def state_of(pid: int) -> str:
    """The state of a process: R, S, T, Z …, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def strikes(point: str, number: int, deed: str, mark: Path | str) -> list[str]:
    """The command line of a writer process that does something to itself at a point of its work, once per mark.

    Args:
        point: ``module:function`` below ``overnight.trainer.checkpoint``, or ``os:function``.
        number: At which call of it, from 1.
        deed: ``kill`` or ``stop`` (both before the call), or an errno's name: the call fails with it.
        mark: A file that says that it was done; the next process does nothing. :data:`ALWAYS` for none.
    """
    return [sys.executable, "-P", str(STRIKER), point, str(number), deed, str(mark)]


def run_rank(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Starts this file as a trainer (see ``_rank``) in a session of its own."""
    command = [sys.executable, __file__, "rank", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _rank(root: str) -> None:
    """A trainer that starts a writer process, gives it work, and then hangs until it is killed."""
    memory = Memory({"w": bytes(4000)})
    place = LocalPlace(Path(root))
    with client_of(place, Path(root).parent) as client:
        ticket = finish(client, client.submit(order(1, 1, memory), memory))
        print(client.pid, ticket.committed, flush=True)
        while True:
            time.sleep(1)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own of that size, as ``mount`` writes it; skips the test where nobody may mount."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        import pytest

        pytest.skip("no right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def committed(place: Place) -> list[str]:
    """Names of what is published."""
    return [str(name) for name in place.checkpoints()]


def name_of(step: int, token: Token = Token(1), save: int = 1) -> CheckpointName:
    """The name of a checkpoint."""
    return CheckpointName(step, token, save)


if __name__ == "__main__":
    _rank(sys.argv[2])
