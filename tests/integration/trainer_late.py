"""A gang whose last save is under way when a rank is killed; ``VICTIM`` says which, ``CASE`` what of the save is done.

``torn``: the victim's part is missing. ``told``: it is there, and the writer of rank 0, which can commit it, is slow.
In both the ranks are in the loop, and an error ends it. In the others all are at the end of the run, waiting for its
last save (``final``, and ``final-told``, and ``final-slow``, in which nobody dies), or for the one before (``before``).
Writers are stopped and continued, so that the order of events does not depend on the machine.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from overnight import trainer

CASE, VICTIM = os.environ["CASE"], int(os.environ["VICTIM"])
CHECKPOINTS = Path(os.environ["OVERNIGHT_CHECKPOINTS"])
MEETING = CHECKPOINTS / f"step-{2 if CASE in ('torn', 'told') else 5}.attempt-1.1.partial"
DYING = CHECKPOINTS.with_name("dying")
SLOW_SECONDS = 1.0


def wait_for(look: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not look():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.002)


def writer() -> int | None:
    """This rank's writer process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and b"checkpoint.writing" in command:
            return int(path.parent.name)
    return None


def stop_writer() -> int:
    wait_for(writer, "the writer")
    pid = writer()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def die() -> None:
    DYING.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_a_part_missing(run: trainer.Run, stopped: int | None) -> None:
    if run.rank == VICTIM:
        assert stopped is not None
        os.kill(stopped, signal.SIGKILL)  # stopped as it began, it may not have asked yet to die with its rank
        die()


def die_with_the_part_told(run: trainer.Run, stopped: int | None) -> None:
    """Only rank 0 has to go on, and does so when the victim has been gone for a while."""
    if run.rank == 0:
        wait_for((MEETING / "digests-0.json").exists, "the digests of rank 0")
        pid = stop_writer()
        (CHECKPOINTS / "stopped").touch()
        wait_for((MEETING / f"rank-{VICTIM}.json").exists, "the victim's part")
        threading.Timer(SLOW_SECONDS, os.kill, (pid, signal.SIGCONT)).start()
    if run.rank == VICTIM:
        assert stopped is not None
        wait_for((CHECKPOINTS / "stopped").exists, "rank 0")
        os.kill(stopped, signal.SIGCONT)
        wait_for((MEETING / f"rank-{VICTIM}.json").exists, "the victim's part")
        die()


def waits_in(function: str) -> bool:
    """Whether the main thread is in a function of this name."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def die_at_the_end(run: trainer.Run, stopped: int | None) -> None:
    """Beside the main thread, once that waits for the last save, or for the one before."""
    if CASE == "final-slow" and run.rank == 0:
        wait_for((MEETING / "digests-0.json").exists, "the digests of rank 0")
        threading.Timer(SLOW_SECONDS, os.kill, (stop_writer(), signal.SIGCONT)).start()
    elif CASE == "final-told":
        die_with_the_part_told(run, stopped)
    elif run.rank == VICTIM:
        wait_for(lambda: waits_in("wait_until_free" if CASE == "before" else "wait"), "the wait for the save")
        wait_for(lambda: list(MEETING.glob("digests-*.json")), "the save of another rank")
        die_with_a_part_missing(run, stopped)


def to_the_end(run: trainer.Run) -> None:
    for step in run.steps(5):
        if step == 1:
            first = run.save()
        if step == 3:
            first.result(20)
        if step == 5:  # by now all ranks know that no save is under way
            stopped = stop_writer() if run.rank == VICTIM else None
            threading.Thread(target=die_at_the_end, args=(run, stopped), daemon=True).start()
            if CASE == "before":
                run.save()


def to_the_end_of_a_peer(run: trainer.Run) -> None:
    stopped = None
    for step in run.steps(50):
        if step == 2:
            run.save()
            stopped = stop_writer() if run.rank == VICTIM else None
        if step == 3:
            (die_with_a_part_missing if CASE == "torn" else die_with_the_part_told)(run, stopped)


def main() -> None:
    failed_at = 0.0
    try:
        with trainer.run(every=None) as run:
            run.track(held={"x": run.rank}, weight=torch.ones(3))
            if CASE not in ("torn", "told"):
                to_the_end(run)
                return
            try:
                to_the_end_of_a_peer(run)
            except RuntimeError:
                failed_at = time.monotonic()
                raise
    finally:
        failed_at = failed_at or (float(DYING.read_text()) if DYING.exists() else time.monotonic())
        print(f"rank {os.environ['RANK']} waited {time.monotonic() - failed_at:.2f}", flush=True)


main()
