"""The measurements of ``checkpoint.py``, each run in a process of its own so that none inherits another's memory.

    python benchmarks/_checkpoint_parts.py PART '{"size": ..., ...}'

Prints one JSON object. Only the public interface is used: ``trainer.run``, ``run.track``, ``run.steps``, ``run.save``.
"""

import contextlib
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from overnight import trainer

MB = 1 << 20
MANY_STEPS = 1_000_000
M_MMAP_THRESHOLD = -3
"""Of ``malloc.h``, for ``mallopt()``."""

WARM_UP_SAVES = 200
"""So many saves later, what is loaded or taken once is there: the writer process takes some of it at the 60th."""

MEDIAN_OF = 50
"""Updates at both ends of which the memory is compared."""


@dataclass(frozen=True)
class Size:
    """A network whose parameters and two moments make the state.

    Attributes:
        layers, width: Square linear layers; a weight and a bias each, and of both two moments and a step.
        batch: Rows per update, so many that forward and backward take several times as long as a copy of the state.
    """

    layers: int
    width: int
    batch: int

    @property
    def num_bytes(self) -> int:
        """Parameters and moments, fp32."""
        return 12 * self.layers * (self.width * self.width + self.width)


SIZES = {
    "16 MB": Size(4, 590, 32),
    "64 MB": Size(5, 1056, 64),
    "256 MB": Size(125, 422, 64),
    "1 GB": Size(5, 4224, 48),
    "2 GB": Size(10, 4224, 16),
}
"""The third has 1,000 tensors, the step of each parameter among them."""


class Training:
    """A network and its optimizer, with one update."""

    def __init__(self, size: Size, frozen_share: float = 0.0) -> None:
        torch.manual_seed(0)
        self.size = size
        layers = [nn.Linear(size.width, size.width) for _ in range(size.layers)]
        for (
            layer
        ) in layers:  # keeps the scale of what passes through: else it shrinks to denormal numbers, which are slow
            nn.init.normal_(layer.weight, std=size.width**-0.5)
            nn.init.zeros_(layer.bias)
        self.model = nn.Sequential(*layers)
        if frozen_share:
            for layer in layers[:-1]:
                layer.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        self.inputs = torch.randn(size.batch, size.width)
        self.update()

    def update(self) -> None:
        """Forward, backward, step."""
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """What the peers save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and moments."""
        moments = [value for one in self.optimizer.state.values() for value in one.values() if value.numel() > 1]
        return [*(parameter.data for parameter in self.model.parameters()), *moments]


@contextlib.contextmanager
def run_in(folder: Path, keep: int = 1) -> Iterator[trainer.Run]:
    """A run without flags and without saves of its own, in a folder."""
    sys.argv = [sys.argv[0]]
    with contextlib.chdir(folder), trainer.run(every=None, keep=keep) as run:
        yield run


def finish(handle: Any) -> None:
    """Waits until a save is committed; a handle of None says that it is."""
    if handle is not None:
        handle.result()


# -- what a save adds to the loop -------------------------------------------------------------------------------------


class Peers:
    """How others save, into a folder on the same disk. Each method begins a save and returns what to wait for."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._folder.mkdir()
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def torch_save(self) -> Callable[[], None]:
        """``torch.save`` into the page cache; the disk is waited for outside the window."""
        path = self._folder / "state.pt"
        torch.save(self._training.state(), path)

        def wait() -> None:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.unlink()

        return wait

    def dcp_async(self, stager: DefaultStager | None = None) -> Callable[[], None]:
        """``dcp.async_save`` as it is shipped, which makes a new stager each time, or with one that is kept."""
        path = self._folder / "dcp"
        future = dcp.async_save(self._training.state(), checkpoint_id=path, async_stager=stager)

        def wait() -> None:
            future.result()  # type: ignore[union-attr]
            shutil.rmtree(path)

        return wait

    def dcp_async_kept(self) -> Callable[[], None]:
        """The same with one stager for all saves."""
        return self.dcp_async(self._stager)


class Copy:
    """A warm copy of the changed bytes into buffers that are reused."""

    def __init__(self, training: Training) -> None:
        self._sources = training.tensors()
        self._buffers = [torch.empty_like(source) for source in self._sources]
        self.seconds()

    def seconds(self) -> float:
        """Of one copy, on one thread; the lesser of two, since what is compared with it should not be."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = []
        for _ in range(2):
            began = time.perf_counter()
            for buffer, source in zip(self._buffers, self._sources, strict=True):
                buffer.copy_(source)
            found.append(time.perf_counter() - began)
        torch.set_num_threads(threads)
        return min(found)


class Walls:
    """Blocks of windows in random order: so many updates without a save, and with one of each kind.

    Args:
        run: The run.
        training: What it trains.
        peers: Other ways to save.
        num_updates: In a window.
    """

    def __init__(self, run: trainer.Run, training: Training, peers: Peers) -> None:
        self._training, self._peers, self._run = training, peers, run
        self._bodies = run.steps(MANY_STEPS)
        self._copy = Copy(training)
        next(self._bodies)

    def window(self, kind: str, num_updates: int) -> tuple[float, float]:
        """Seconds of the window, and of its first boundary; what goes on behind it is waited for outside."""
        self._training.update()  # as the save before has the same step, and to be warm
        next(self._bodies)
        wait: Callable[[], None] = lambda: None  # noqa: E731
        began = time.perf_counter()
        if kind == "ours":
            handle = self._run.save()
            wait = lambda: finish(handle)  # noqa: E731
        elif kind != "none":
            wait = getattr(self._peers, kind)()
        saved = time.perf_counter()
        next(self._bodies)
        blocked_seconds = time.perf_counter() - (saved if kind == "none" else began)
        for _ in range(num_updates):
            self._training.update()
            next(self._bodies)
        seconds = time.perf_counter() - began
        wait()
        return seconds, blocked_seconds

    def block(self, kinds: list[str], num_updates: int, dice: random.Random) -> dict[str, float]:
        """One window of each kind, in random order, and a copy beside them; seconds by name."""
        found = {"memcpy": self._copy.seconds()}
        for kind in dice.sample(kinds, len(kinds)):
            found[kind], found[f"{kind} blocked"] = self.window(kind, num_updates)
        return found

    def updates_for_a_window(self) -> int:
        """So many that a whole save fits: staging, writing and committing."""
        self.window("ours", 1)
        commits = []
        for _ in range(2):
            self._training.update()
            next(self._bodies)
            began = time.perf_counter()
            handle = self._run.save()
            next(self._bodies)
            self._training.update()
            finish(handle)
            commits.append(time.perf_counter() - began)
        update_seconds = self.window("none", 4)[0] / 4
        return max(3, min(40, round(1.2 * min(commits) / update_seconds) + 1))


def walls(size: str, pairs: int, peers_every: int, threads: int) -> dict[str, Any]:
    """Blocks of windows; peers take part in every so-many-th block only, 0 for never."""
    torch.set_num_threads(threads)
    dice = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name, run_in(Path(name)) as run:
        training = Training(SIZES[size])
        run.track(model=training.model, optimizer=training.optimizer)
        loops = Walls(run, training, Peers(training, Path(name) / "peers"))
        num_updates = loops.updates_for_a_window()
        others = ["torch_save", "dcp_async", "dcp_async_kept"] if peers_every else []
        if others:
            loops.block(others, 1, dice)  # the first of each is slow
        blocks = []
        for number in range(pairs):
            kinds = ["none", "ours", *(others if others and number % peers_every == 0 else [])]
            blocks.append(loops.block(kinds, num_updates, dice))
    return {"blocks": blocks, "num_updates": num_updates, "num_bytes": SIZES[size].num_bytes}


# -- commit, memory, bytes --------------------------------------------------------------------------------------------


def commits(size: str, pairs: int) -> dict[str, Any]:
    """Seconds from the call of ``save()`` to committed, and of ``dd`` with fsync of the same number of bytes."""
    torch.set_num_threads(1)
    blocks = []
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name, run_in(Path(name)) as run:
        training = Training(SIZES[size])
        run.track(model=training.model, optimizer=training.optimizer)
        source = Path("/dev/shm") / f"overnight-bench-{os.getpid()}"
        source.write_bytes(os.urandom(MB) * (SIZES[size].num_bytes // MB))
        dd = ["dd", f"if={source}", f"of={name}/dd", "bs=16M", "conv=fsync", "status=none"]
        try:
            for _ in range(pairs + 1):
                for _ in run.steps(1):
                    training.update()
                began = time.perf_counter()
                finish(run.save())
                committed = time.perf_counter()
                subprocess.run(dd, check=True)
                blocks.append({"ours": committed - began, "disk": time.perf_counter() - committed})
                Path(name, "dd").unlink()
        finally:
            source.unlink()
    return {"blocks": blocks[1:]}  # the first one touches the staging memory


def processes_below(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *processes_below(child)]
    return found


def status(pid: int, field: str) -> int:
    """A field of ``/proc/PID/status`` in bytes; 0 if the process has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 0


def others_memory() -> int:
    """Private memory of the processes below this one, and what they and this one share beyond what this one touched."""
    below = processes_below(os.getpid())
    own = status(os.getpid(), "RssShmem")
    shared = max([own, *(status(pid, "RssShmem") for pid in below)])  # the same pages in each: they count once
    return shared - own + sum(status(pid, "RssAnon") for pid in below)


def peak_of(act: Callable[[], None]) -> int:
    """Highest memory of this process while something is done, and what those below it hold at its end; bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    act()
    return status(os.getpid(), "VmHWM") + others_memory()


def staging(size: str) -> dict[str, Any]:
    """Memory that saves take over the same training without, in units of the state.

    It is the difference of the peaks of this process and those below it with and without saves.
    What an idle writer process takes, measured with a state of nothing, is no staging memory and is left out.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name, run_in(Path(name)) as run:
        training = Training(SIZES[size])
        run.track(model=nn.Linear(1, 1))
        bodies = run.steps(MANY_STEPS)
        next(bodies)

        def train(with_save: bool) -> None:
            for _ in range(3):
                training.update()
                handle = run.save() if with_save else None
                next(bodies)
                training.update()
                next(bodies)
                finish(handle)

        train(True)
        without = peak_of(lambda: train(True))  # the writer is there, but has next to nothing to write
        run.track(network=training.model, optimizer=training.optimizer)
        with_saves = peak_of(lambda: train(True))
        first = (with_saves - without) / SIZES[size].num_bytes
    return {"staging": first}


def give_freed_memory_back() -> None:
    """Lets malloc map each block from 128 KiB on for itself, here and in the writer process, as it does at first.

    By default it takes them from the heap once one was freed, and keeps up to twice as much as the largest of them free
    at its end. That comes and goes with updates, saves or not: several times the growth that is looked for.
    """
    threshold_bytes = 128 << 10
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(threshold_bytes)  # the writer process begins later
    if ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, threshold_bytes) != 1:
        raise OSError("malloc does not take the threshold")


def many(size: str, saves: int, with_saves: bool = True) -> dict[str, Any]:
    """How much more memory there is so many updates later, each of which is saved, or none of which is; x state.

    It is the resident memory of this process and those below it, at the end of an update, when nothing is being saved.
    """
    give_freed_memory_back()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name, run_in(Path(name)) as run:
        training = Training(SIZES[size])
        run.track(model=training.model, optimizer=training.optimizer)
        bodies = run.steps(MANY_STEPS)
        next(bodies)

        def memory(saved: bool) -> int:
            handle = run.save() if saved else None
            next(bodies)
            training.update()
            finish(handle)  # else those that come while it writes would be one
            return status(os.getpid(), "VmRSS") + others_memory()

        for _ in range(WARM_UP_SAVES):
            memory(True)
        seen = [memory(with_saves) for _ in range(saves + MEDIAN_OF)]
    early, late = statistics.median(seen[:MEDIAN_OF]), statistics.median(seen[-MEDIAN_OF:])
    return {"growth": (late - early) / SIZES[size].num_bytes}


def frozen(size: str, saves: int) -> dict[str, Any]:
    """Bytes of new files per save after the first, over the state, where 99 % of it is frozen."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name, run_in(Path(name), keep=saves + 2) as run:
        training = Training(Size(300, int((SIZES[size].num_bytes / 1200) ** 0.5), 4), frozen_share=0.99)
        run.track(model=training.model, optimizer=training.optimizer)
        total = sum(t.numel() * t.element_size() for t in training.tensors())
        shares: list[float] = []
        known: set[Path] = set()
        for _ in range(saves + 1):
            for _ in run.steps(1):
                training.update()
            finish(run.save())
            files = {path: path.stat().st_size for path in Path(name).rglob("*") if path.is_file()}
            shares.append(sum(size for path, size in files.items() if path not in known) / total)
            known = set(files)
    return {"shares": shares[1:], "first": shares[0]}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "walls": walls,
    "commits": commits,
    "staging": staging,
    "many": many,
    "frozen": frozen,
}


def main() -> None:
    """Runs one part."""
    part, options = sys.argv[1], json.loads(sys.argv[2])
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        found = PARTS[part](**options)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
