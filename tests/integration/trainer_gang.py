"""What the ranks of a gang log and report, right and wrong; ``CASE`` names a function below."""

import math
import os
import time
from pathlib import Path

import torch

from overnight import trainer
from overnight.trainer import metrics


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.002)


def rules(run: trainer.Run) -> None:
    run.track(keep={})
    for step in run.steps(40):
        run.log(loss=torch.tensor(float(run.rank + step)), step=step)
        run.log({"train/tokens": run.rank + 1}, reduce="sum")
        run.log(high=run.rank, reduce="max")
        run.log(low=-run.rank if step != 5 else math.nan if run.rank == 1 else 0, reduce="min")
        run.log(odd=math.nan if (step, run.rank) == (7, 1) else math.inf if step == 8 else 1.0)
        if step % 10 == 0:
            run.report(accuracy=run.rank, note=f"rank {run.rank}")
            run.report({"best/accuracy": run.rank}, reduce="max")


def padded(run: trainer.Run) -> None:
    value = [2.0, 4.0][run.rank]
    for length, micro_batch in ((10, 3), (9, 3)):
        data = trainer.DataLoader(range(length), batch_size=micro_batch, tail="pad", name=f"of {length}")
        for _ in run.batches(data):
            is_empty = not data.sample_weight.any()
            run.log(loss=math.nan if is_empty else value)
            run.log(peak=math.nan if is_empty else value, reduce="max")
            run.log(total=math.nan if is_empty else value, reduce="sum")
            with run.phase("eval"):
                run.log(val=value)
                run.report(val=value)


def unhurried(run: trainer.Run) -> None:
    """Rank 1 stays in the body of each step until rank 0 is in the body of the next, behind its log."""
    for step in run.steps(6):
        run.log(loss=run.rank + step)
        Path(f"{run.rank}.{step}").touch()
        if run.rank == 1 and step < 6:
            wait_for(Path(f"0.{step + 1}"))


def one_is_silent(run: trainer.Run) -> None:
    for step in run.steps(50):
        if run.rank != 2 or step != 3:
            run.log(loss=1.0)


def other_names(run: trainer.Run) -> None:
    run.track(keep={})
    for step in run.steps(3):
        run.log(loss=1.0)
        run.log({f"extra of {run.rank}" if step == 3 else "extra": 1.0})


def only_rank_zero_reports(run: trainer.Run) -> None:
    for _ in run.steps(5):
        if run.rank == 0:
            run.report(accuracy=1.0)


def other_report(run: trainer.Run) -> None:
    for _ in run.steps(5):
        run.report(accuracy=1.0, reduce="mean" if run.rank else "max")


def only_rank_zero_saves(run: trainer.Run) -> None:
    run.track(keep={})
    list(run.steps(2))
    if run.rank == 0:
        run.save()


def fewer_steps(run: trainer.Run) -> None:
    run.track(keep={})
    list(run.steps(3 + run.rank))


def main() -> None:
    metrics.SEND_SECONDS = float(os.environ.get("SEND_SECONDS", "0"))
    with trainer.run(every=None) as run:
        globals()[os.environ["CASE"]](run)


main()
