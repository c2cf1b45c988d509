"""Small trainings whose saves a test looks at: by epochs, by time, by what saves cost, and on a wall clock that jumps.

``MODE`` says which. ``JUMPS`` lets the wall clocks of ranks and writers jump by days, ``KILL_AT`` is an update at
which rank 0 kills itself.
"""

import json
import os
import signal
import time
from collections.abc import Callable

import jumping_clock
import torch
from waiting import wait_for

from overnight import trainer
from overnight.trainer import interval
from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.checkpoint.writing import client

SAMPLES = torch.utils.data.TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))
ELSEWHERE = ".pin-step-4.attempt-1.1.0123456789ab.json"


class Training:
    """A small model; its saves are waited for, so that none is put off."""

    def __init__(self, run: trainer.Run) -> None:
        self.run = run
        self.place = LocalPlace(run.trial_dir / "checkpoints")
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        run.track(model=self.model, optimizer=self.optimizer)

    def loader(self, global_batch: int = 4, tail: str = "drop") -> trainer.DataLoader:
        return trainer.DataLoader(SAMPLES, global_batch_size=global_batch, shuffle=True, tail=tail)

    def update(self, batch: torch.Tensor | None = None) -> None:
        wait_for(self.is_idle, "the save before")
        loss = self.model(torch.ones(1, 4) if batch is None else batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.log(loss=loss)
        if str(self.run.step) == os.environ.get("KILL_AT") and self.run.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_idle(self) -> bool:
        self.run._saver.pipeline.poll()
        return not self.run._saver.pipeline.writing

    def tell(self, **facts: float) -> None:
        if self.run.rank == 0:
            (self.run.trial_dir / "facts.json").write_text(json.dumps(facts))


def epochs() -> None:
    """Five updates an epoch in a loop of two epochs and in two nested ones, then six of four samples of 22."""
    with trainer.run(every="epoch", keep=50) as run:
        training = Training(run)
        for (batch,) in run.batches(training.loader(), epochs=2, name="plain"):
            training.update(batch)
        for _ in run.epochs(2):
            for (batch,) in run.batches(training.loader(), name="nested"):
                training.update(batch)
        for (batch,) in run.batches(training.loader(6, "pad"), epochs=2, name="padded"):
            training.update(batch)


def jumps() -> None:
    """Fifteen updates, with a checkpoint that somebody on another machine reads."""
    with trainer.run(every=4, keep=2, keep_every=8) as run:
        training = Training(run)
        for (batch,) in run.batches(training.loader(), epochs=4):
            training.update(batch)
            if run.step == 5 and run.rank == 0:
                training.place.write(ELSEWHERE, json.dumps({"holder": "an evaluation", "process": None}).encode())
        run.report(loss=1.0)


def seconds() -> None:
    """A loop of 0.7 s, in updates of 5 ms."""
    with trainer.run(every="0.2s", keep=500) as run:
        training = Training(run)
        began = time.monotonic()
        for (batch,) in run.batches(training.loader(), seconds=0.7):
            training.update(batch)
            spin(0.005)
        training.tell(elapsed=time.monotonic() - began, updates=run.step)


def auto() -> None:
    """The first save unasked; then one that takes 0.1 s to begin and while which updates take ten times as long."""
    interval.FIRST_SECONDS = 0.1
    began = time.monotonic()
    with trainer.run(every="auto") as run:
        training = Training(run)
        first = 0.0
        for _ in run.steps(20, name="until the first save"):
            training.update()
            spin(0.01)
            if not first and training.place.checkpoints():
                first = time.monotonic() - began
        for _ in run.steps(12, name="calm"):
            training.update()
            spin(0.002)
        run.track(slow=Slow())
        run.save()
        pid = run._saver.pipeline._writer.pid
        os.kill(pid, signal.SIGSTOP)
        training.is_idle = lambda: True
        for _ in run.steps(12, name="disturbed"):
            training.update()
            spin(0.03)
        os.kill(pid, signal.SIGCONT)
        del training.is_idle
        for _ in run.steps(1, name="the commit is seen"):
            training.update()
        learnt = run._policy._auto
        parts = {"stall": learnt._stall, "write": learnt._write, "share": run._policy._slowdown.share}
        training.tell(first=first, seconds=learnt.seconds, cost=learnt.cost_seconds, **parts)


class Slow:
    """Something whose state takes a while to give."""

    def state_dict(self) -> dict[str, int]:
        spin(0.1)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


MODES: dict[str, Callable[[], None]] = {one.__name__: one for one in (epochs, jumps, seconds, auto)}

if os.environ.get("JUMPS"):
    jumping_clock.jump()
    client.command = jumping_clock.writer_command
MODES[os.environ["MODE"]]()
