"""From SIGKILL of a rank to the first new step of the training, less the time that loading the checkpoint takes.

    python benchmarks/recovery.py [--json] [--kills 10] [--torchrun-kills 3]

A rank of a running trial is killed again and again; its supervisor starts all ranks again from warm spares. Beside it,
in the same run: the same training written for plain torch under ``torchrun --max-restarts``, killed in the same way.
All times are taken on the machine's monotonic clock, which its processes share.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _report import Row, median, parser, publish
from trial_start import server, wait_for

from overnight import Client
from overnight.core.enums import ArgsStyle, RunKind
from overnight.core.models.api import ProposalIn
from overnight.core.models.spec import Command, Compute, TrialConfig

SAVE_EVERY = 5
STEPS_BETWEEN_KILLS = 3 * SAVE_EVERY
RESTART_SECONDS = 120.0

OURS = f"""\
import os, time
import torch
from overnight import trainer

with trainer.run(every={SAVE_EVERY}) as run:
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = torch.nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.monotonic_ns()
    run.track(model=model, optimizer=optimizer)
    load = time.monotonic_ns() - began
    stamps = open(os.environ["STAMPS"], "a", buffering=1)
    for step in run.steps(10**9):
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stamps.write(f"{{run.rank}} {{os.getpid()}} {{step}} {{time.monotonic_ns()}} {{load}}\\n")
        time.sleep(0.01)
"""

PLAIN = f"""\
import os, pathlib, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model = torch.nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
optimizer = torch.optim.AdamW(model.parameters())
saved = pathlib.Path(os.environ["STAMPS"]).with_suffix(".pt")
began = time.monotonic_ns()
step = 0
if saved.exists():
    state = torch.load(saved)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
load = time.monotonic_ns() - began
stamps = open(os.environ["STAMPS"], "a", buffering=1)
while True:
    step += 1
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    stamps.write(f"{{rank}} {{os.getpid()}} {{step}} {{time.monotonic_ns()}} {{load}}\\n")
    if rank == 0 and step % {SAVE_EVERY} == 0:
        part = saved.with_suffix(".part")
        torch.save({{"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}, part)
        part.rename(saved)
    time.sleep(0.01)
"""


@dataclass(frozen=True)
class Stamp:
    """A step that a rank has done. ``at`` and ``load`` are nanoseconds."""

    rank: int
    pid: int
    step: int
    at: int
    load: int


class Stamps:
    """What the ranks of one training have written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, rank: int, after: int = 0) -> list[Stamp]:
        """The steps of a rank, those of its newest process only, done after a point in time."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        found = [Stamp(*map(int, line.split())) for line in lines if line.endswith("\n")]
        mine = [stamp for stamp in found if stamp.rank == rank and stamp.at > after]
        return [stamp for stamp in mine if stamp.pid == mine[-1].pid]


def recoveries(stamps: Stamps, num_ranks: int, kills: int, saved: Callable[[], int]) -> Iterator[float]:
    """Kills the last rank again and again; yields the seconds from each kill to the first step, less loading.

    Args:
        stamps: Of the training.
        num_ranks: Its ranks.
        kills: How often.
        saved: A number that rises with each checkpoint: each start saves before the next kill.
    """
    for _ in range(kills):
        begun = saved()
        wait_for(lambda: saved() > begun, RESTART_SECONDS, "a checkpoint")  # noqa: B023
        for rank in range(num_ranks):
            wait_for(lambda rank=rank: len(stamps.of(rank)) > STEPS_BETWEEN_KILLS, RESTART_SECONDS, "a training")  # type: ignore[misc]
        before = {rank: stamps.of(rank)[-1].pid for rank in range(num_ranks)}
        killed_at = time.monotonic_ns()
        os.kill(before[num_ranks - 1], signal.SIGKILL)
        wait_for(
            lambda: all(any(s.pid != before[r] for s in stamps.of(r, killed_at)) for r in before),  # noqa: B023
            RESTART_SECONDS,
            "a step after the kill",
        )
        first = [next(s for s in stamps.of(rank, killed_at) if s.pid != before[rank]) for rank in before]
        yield max(stamp.at - stamp.load - killed_at for stamp in first) / 1e9


def ours(client: Client, folder: Path, num_ranks: int, kills: int) -> list[float]:
    """A trial with so many ranks, on as many devices."""
    (folder / "ours.py").write_text(OURS)
    stamps = Stamps(folder / f"ours-{num_ranks}.stamps")
    config = TrialConfig(
        experiment=f"recovery-{num_ranks}",
        run=Command(kind=RunKind.SCRIPT, target="ours.py"),
        args=ArgsStyle.NONE,
        python=sys.executable,
        workdir=str(folder),
        env={**os.environ, "STAMPS": str(stamps.path)},
        compute=Compute(gpus=num_ranks),
    )
    trial = client.propose(ProposalIn(config=config, params={})).trials[0]
    found = list(recoveries(stamps, num_ranks, kills, lambda: len(client.trial(trial.id).checkpoints)))
    attempts = client.trial(trial.id).attempts_made
    client.cancel(trial.id, reason="measured")
    client.wait([trial.id], timeout=60)
    if attempts != 1:
        raise SystemExit(f"the trial took {attempts} attempts: its restarts were not all inside one")
    return found


@contextlib.contextmanager
def torchrun(folder: Path, num_ranks: int, stamps: Stamps) -> Iterator[None]:
    """The plain script under torchrun, which starts its ranks again however often they fail."""
    (folder / "plain.py").write_text(PLAIN)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    env = {**os.environ, "STAMPS": str(stamps.path), "OMP_NUM_THREADS": "1"}
    with (folder / "torchrun.log").open("ab") as log:
        process = subprocess.Popen(
            [*words, "--max-restarts=1000", "plain.py"],
            cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()


def torchruns(folder: Path, num_ranks: int, kills: int) -> list[float]:
    """The same under torchrun; shorter where it did not come back."""
    stamps = Stamps(folder / f"torchrun-{num_ranks}.stamps")
    found: list[float] = []
    with torchrun(folder, num_ranks, stamps):
        try:
            for seconds in recoveries(stamps, num_ranks, kills, partial(written_at, stamps.path.with_suffix(".pt"))):
                found.append(seconds)  # noqa: PERF402 - what was measured before a failure counts
        except SystemExit as error:
            print(f"torchrun with {num_ranks} ranks: {error}", file=sys.stderr)
    return found


def written_at(path: Path) -> int:
    """When a file was last written, in nanoseconds; 0 if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__ or "")
    options.add_argument("--kills", type=int, default=10, help="kills of a trial of ours (default 10)")
    options.add_argument("--torchrun-kills", type=int, default=3, help="kills under torchrun (default 3)")
    arguments = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name:
        folder = Path(name)
        found: dict[int, list[float]] = {}
        with server(folder, "fake:2") as settings, Client(settings) as client:
            for num_ranks in (1, 2):
                found[num_ranks] = ours(client, folder, num_ranks, arguments.kills)
        for num_ranks in (1, 2):
            peer = torchruns(folder, num_ranks, arguments.torchrun_kills)
            peer_name = f"torchrun --max-restarts, {num_ranks} rank" + "s" * (num_ranks > 1)
            mine = median(found[num_ranks])
            rows.append(Row("kill_to_step_s", "s", mine, median(peer) if peer else None, peer_name, "<= 1"))
    publish("recovery", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
