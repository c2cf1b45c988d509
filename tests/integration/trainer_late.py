"""A gang whose last save is under way when a rank is killed; ``VICTIM`` says which, ``CASE`` what of the save is done.

``torn``: the victim's part is missing. ``told``: it is there, and the writer of rank 0, which can commit it, is slow.
Writers are stopped and continued, so that the order of events does not depend on the machine.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from overnight import trainer

CASE, VICTIM = os.environ["CASE"], int(os.environ["VICTIM"])
CHECKPOINTS = Path(os.environ["OVERNIGHT_CHECKPOINTS"])
MEETING = CHECKPOINTS / "step-2.attempt-1.1.partial"
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


def die_with_a_part_missing(run: trainer.Run, stopped: int | None) -> None:
    if run.rank == VICTIM:
        assert stopped is not None
        os.kill(stopped, signal.SIGKILL)  # stopped as it began, it may not have asked yet to die with its rank
        os.kill(os.getpid(), signal.SIGKILL)


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
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    failed_at = 0.0
    try:
        with trainer.run(every=None) as run:
            run.track(held={"x": run.rank})
            stopped = None
            try:
                for step in run.steps(50):
                    if step == 2:
                        run.save()
                        stopped = stop_writer() if run.rank == VICTIM else None
                    if step == 3:
                        die = die_with_a_part_missing if CASE == "torn" else die_with_the_part_told
                        die(run, stopped)
            except RuntimeError:
                failed_at = time.monotonic()
                raise
    finally:
        print(f"rank {os.environ['RANK']} waited {time.monotonic() - failed_at:.2f}", flush=True)


main()
