"""From a checkpoint on disk to the live model and optimizer, every byte verified, beside raw reads and torch's loaders.

    python benchmarks/restore.py [--json] [--sizes 64,512] [--runs 7]

Each measure is a forked process of its own, as a restore is: it makes model and AdamW (not timed), then restores into
them. ``raw`` reads the bytes of the checkpoint's files and hashes them (xxh3-128) with as many threads: once into fresh
memory, which a reader that keeps them needs, and once into one small buffer that is used again and again, which nobody
could restore from. The page cache is warm (all bytes just read) unless the measure says ``cold`` (dropped with
``posix_fadvise``). Peers verify nothing. Sizes are MB of parameters and moments.

``corruptions_undetected`` damages each region of each file of the newest of two checkpoints in turn. Damage counts as
noticed only if the other checkpoint comes back, with its own weights.
"""

import contextlib
import functools
import io
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch._dynamo  # which an optimizer's first call would import
import torch.distributed.checkpoint as dcp
import xxhash
from _report import Row, median, parser, publish
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import overnight.trainer.execution  # noqa: F401  # as a process that is about to restore has
from overnight import trainer
from overnight.core.errors import CheckpointError
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace
from overnight.trainer.checkpoint.reading.finding import open_newest
from overnight.trainer.checkpoint.reading.memory import bytes_of
from overnight.trainer.checkpoint.reading.source import BLOCK_BYTES, FolderSource
from overnight.trainer.checkpoint.reading.transfer import num_threads
from overnight.trainer.checkpoint.tracked import device_for, fit_of, put_back

MB = 1_000_000
SEGMENT_BYTES = 16 << 20
NUM_REGIONS = 24
CPU = torch.device("cpu")

T = TypeVar("T")
State = tuple[torch.nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Files:
    """The same state three times."""

    ours: LocalPlace
    torch: Path
    dcp: Path

    @property
    def checkpoint(self) -> Path:
        """Our checkpoint's folder."""
        return self.ours.path(self.ours.checkpoints()[-1])

    def of(self, peer: str) -> list[Path]:
        """The files that a peer reads."""
        folder = {"torch": self.torch.parent, "dcp": self.dcp}.get(peer, self.checkpoint)
        return sorted(path for path in folder.iterdir() if path.is_file())


def make(state_mb: int) -> State:
    """A model of transformer-like layers whose parameters and AdamW moments have so many MB together."""
    width = 512 if state_mb < 256 else 1024
    blocks = max(1, round(state_mb * MB / 3 / (8 * width * width * 4)))
    layers: list[torch.nn.Module] = []
    for _ in range(blocks):
        layers += [torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters())


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """A run that nobody scheduled, in a folder of its own."""
    kept = Path.cwd(), sys.argv
    folder.mkdir()
    os.chdir(folder)
    sys.argv = ["restore"]
    try:
        yield
    finally:
        os.chdir(kept[0])
        sys.argv = kept[1]


def write(folder: Path, state_mb: int, num_checkpoints: int = 1) -> Files:
    """Trains and saves: as a run does, after each step, and at the end with ``torch.save`` and with ``dcp.save``."""
    model, optimizer = make(state_mb)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with in_folder(folder / "run"), contextlib.redirect_stderr(io.StringIO()), trainer.run(every=None, keep=5) as run:
        run.track(model=model, optimizer=optimizer)
        for _ in range(num_checkpoints):
            for _ in run.steps(1):
                optimizer.step()
            run.save().result()
    path = folder / "torch" / "state.pt"
    path.parent.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "dcp", no_dist=True)
    os.sync()
    return Files(LocalPlace(run.trial_dir / "checkpoints"), path, folder / "dcp")


def restore_ours(files: Files, state: State) -> None:
    """What a resumed run does: find the newest good checkpoint, and give each tracked object its state."""
    restored = open_newest(files.ours)
    assert restored is not None
    for name, obj in zip(("model", "optimizer"), state, strict=True):
        put_back(obj, restored.state(name, device_for(obj, CPU), fit_of(obj)))


def restore_torch(files: Files, state: State) -> None:
    """``torch.load`` and ``load_state_dict``."""
    loaded = torch.load(files.torch, weights_only=True)
    state[0].load_state_dict(loaded["model"])
    state[1].load_state_dict(loaded["optimizer"])


def restore_dcp(files: Files, state: State) -> None:
    """``dcp.load`` and ``set_state_dict``."""
    model_state, optimizer_state = get_state_dict(*state)
    target = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(target, checkpoint_id=files.dcp, no_dist=True)
    set_state_dict(*state, model_state_dict=target["model"], optim_state_dict=target["optimizer"])


def read_raw(files: Files, *, keep: bool) -> None:
    """Reads and hashes the bytes of our checkpoint; keeps them in fresh memory, or forgets each block at once."""
    threads = num_threads(FolderSource(files.checkpoint))
    kept = [torch.empty(path.stat().st_size if keep else 0, dtype=torch.uint8) for path in files.of("ours")]
    jobs = [
        (path, start, min(start + SEGMENT_BYTES, path.stat().st_size), memory)
        for path, memory in zip(files.of("ours"), kept, strict=True)
        for start in range(0, path.stat().st_size, SEGMENT_BYTES)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: _read_segment(*job), jobs))


def _read_segment(path: Path, start: int, end: int, memory: torch.Tensor) -> str:
    digest = xxhash.xxh3_128()
    view = bytes_of(memory)
    small = memoryview(bytearray(BLOCK_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for offset in range(start, end, BLOCK_BYTES):
            stop = min(offset + BLOCK_BYTES, end)
            block = view[offset:stop] if len(view) else small[: stop - offset]
            os.preadv(descriptor, [block], offset)
            digest.update(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def prepare_cache(paths: Sequence[Path], *, cold: bool) -> None:
    """Brings files into the page cache, or drops them from it."""
    for path in paths:
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(BLOCK_BYTES):
                    pass


def apart(action: Callable[[], T]) -> T:
    """Does something in a forked process, since torch's threads do not survive a fork: this one never starts any."""
    read, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        status = 1
        warnings.simplefilter("ignore")  # DCP's, that there is one process only
        try:
            result = pickle.dumps(action())
            os.write(write_end, result)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read, "rb") as answer:
        result = answer.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit("a measure failed")
    found: T = pickle.loads(result)
    return found


def timed(action: Callable[[State], None], state_mb: int) -> float:
    """Milliseconds of an action in a process of its own, which makes the live objects before."""

    def run() -> float:
        state = make(state_mb)
        began = time.perf_counter()
        action(state)
        return (time.perf_counter() - began) * 1e3

    return apart(run)


def measure(files: Files, state_mb: int, runs: int, *, cold: bool) -> dict[str, float]:
    """Median milliseconds by contender; they take turns, so that a busy moment of the machine hits all."""
    contenders: dict[str, Callable[[State], None]] = {
        "ours": lambda state: restore_ours(files, state),
        "raw": lambda state: read_raw(files, keep=True),
        "raw_reused": lambda state: read_raw(files, keep=False),
        "torch": lambda state: restore_torch(files, state),
        "dcp": lambda state: restore_dcp(files, state),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, action in contenders.items():
            prepare_cache(files.of(name), cold=cold)
            found[name].append(timed(action, state_mb))
    return {name: median(values) for name, values in found.items()}


def rows(ms: dict[str, float], state_mb: int, *, cold: bool) -> list[Row]:
    """The rows of one size and state of the page cache; goals are for the warm one."""
    ours = ms["ours"]
    what = f"{state_mb} MB, page cache {'cold' if cold else 'warm'}"

    def over(measure: str, peer: str, peer_name: str, goal: str = "") -> Row:
        value = round(ours / ms[peer], 3)
        return Row(measure, f"x, {what}", value, 1.0, f"{peer_name}: {ms[peer]} ms", "" if cold else goal)

    return [
        Row("restore_ms", f"ms, {what}", ours, ms["torch"], "torch.load + load_state_dict"),
        over("restore_over_raw", "raw", "read + xxh3 into fresh memory", "<= 1.25"),
        over("restore_over_raw_reused", "raw_reused", "read + xxh3, forgetting the bytes"),
        over("restore_over_torch_load", "torch", "torch.load + load_state_dict", "<= 1"),
        over("restore_over_dcp_load", "dcp", "dcp.load + set_state_dict"),
    ]


def regions(path: Path) -> Iterator[Callable[[Path], None]]:
    """Damage to a file: a bit in each of its regions, every length to which it may be cut, and all of it gone."""
    size = path.stat().st_size

    def flip(at: int) -> Callable[[Path], None]:
        def damage(victim: Path) -> None:
            with victim.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x04]))

        return damage

    yield from (flip(at) for at in sorted({part * (size - 1) // NUM_REGIONS for part in range(NUM_REGIONS + 1)}))
    yield from (functools.partial(os.truncate, length=length) for length in (0, 1, size // 2, size - 1))
    yield Path.unlink


def corruptions(folder: Path) -> tuple[int, int, int, int]:
    """Damages each region of each file in turn.

    Returns:
        How often ours did not notice and go back, of how many; the same of ``torch.load``, which cannot go back.
    """
    folder.mkdir()
    files = write(folder, 4, num_checkpoints=2)
    newest, older = (files.ours.checkpoints()[index] for index in (-1, -2))
    weights = weights_of(files.ours, newest)
    restored = restored_weights(files.ours)
    assert restored is not None and restored[0] == newest and torch.equal(restored[1], weights)
    expected = weights_of(files.ours, older)
    found = [went_back(files.ours, path, damage, expected) for path in files.of("ours") for damage in regions(path)]
    theirs = [torch_noticed(files.torch, damage) for damage in regions(files.torch)]
    return found.count(False), len(found), theirs.count(False), len(theirs)


def restored_weights(place: LocalPlace) -> tuple[CheckpointName, torch.Tensor] | None:
    """From which checkpoint a run would go on, and with which first weights; None if from none."""
    try:
        restored = open_newest(place, complaints=lambda _: None)
    except CheckpointError:
        return None
    return None if restored is None else (restored.manifest.name, restored.state("model")["1.weight"])


def weights_of(place: LocalPlace, name: CheckpointName) -> torch.Tensor:
    """The first weights of one checkpoint, as torch's own tools read them."""
    found = {"model.1.weight": torch.empty(2048, 512)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(place.path(name)), no_dist=True)
    return found["model.1.weight"]


def went_back(place: LocalPlace, path: Path, damage: Callable[[Path], None], expected: torch.Tensor) -> bool:
    """Whether the damage was noticed and the older checkpoint came back; repairs the file."""
    with damaged(path, damage):
        restored = restored_weights(place)
    return restored is not None and restored[0] == place.checkpoints()[-2] and torch.equal(restored[1], expected)


def torch_noticed(path: Path, damage: Callable[[Path], None]) -> bool:
    """Whether ``torch.load`` fails; repairs the file."""
    with damaged(path, damage):
        try:
            torch.load(path, weights_only=True)
            return False
        except Exception:  # whatever it is, nobody goes on with what was read
            return True


@contextlib.contextmanager
def damaged(path: Path, damage: Callable[[Path], None]) -> Iterator[None]:
    """A file that is damaged for a while."""
    whole = path.read_bytes()
    damage(path)
    try:
        yield
    finally:
        path.write_bytes(whole)


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__ or "")
    options.add_argument("--sizes", default="64,512", help="MB of parameters and moments (default 64,512)")
    options.add_argument("--runs", type=int, default=7, help="runs of each measure, of which the median counts")
    arguments = options.parse_args()
    result: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name:
        for state_mb in (int(size) for size in arguments.sizes.split(",")):
            folder = Path(name) / str(state_mb)
            folder.mkdir()
            files = apart(functools.partial(write, folder, state_mb))
            for cold in (False, True):
                result += rows(measure(files, state_mb, arguments.runs, cold=cold), state_mb, cold=cold)
            shutil.rmtree(folder)
        ours, total, theirs, of = apart(functools.partial(corruptions, Path(name) / "damage"))
        unit = f"of {total} damages, each to be noticed and answered by the older checkpoint"
        result.append(Row("corruptions_undetected", unit, ours, theirs, f"torch.load, of {of}", "== 0"))
    publish("restore", result, as_json=arguments.json)


if __name__ == "__main__":
    main()
