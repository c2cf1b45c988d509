"""Ranks that make no progress: their stacks are on record, and they start again. Ranks that do are left alone."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_lab import wait_for, warm_lab
from training_lab import check_as_undisturbed, committed, generations, logs, ranks, train

FLOOR = 0.5
HANG = {
    "a lock": "hang_here()",
    "the interpreter's lock held in C": "import ctypes; ctypes.PyDLL(None).sleep(1000)",
}
LOCKED = """
        def hang_here():
            import threading
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if run.step == 20 and generation == 1 and run.rank == run.world_size - 1:
            HOW
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with warm_lab() as made:
        yield made


def hang_of(lab: Any, attempt: str) -> tuple[str, str]:
    """Cause of the one hang that was spooled, and what the file says that it names."""
    (event,) = wait_for(lambda: lab.server.events(attempt, "hang"), 60, "a hang")
    return event["data"]["cause"], Path(event["data"]["stacks"]).read_text()


@pytest.mark.parametrize(("num_ranks", "how"), [(1, "the interpreter's lock held in C"), (2, "a lock")])
def test_a_rank_that_hangs_is_started_again_and_its_stacks_are_kept(lab: Any, num_ranks: int, how: str) -> None:
    body = LOCKED.replace("HOW", HANG[how]).strip()
    attempt = train(lab, body, "hang.py", num_ranks=num_ranks, hang_seconds=FLOOR)
    cause, stacks = hang_of(lab, attempt)
    assert cause.startswith("no rank makes progress: rank 0 silent for")
    assert stacks.count("Current thread") + stacks.count("most recent call first") >= num_ranks
    assert stacks.count("hang.py") >= num_ranks, stacks
    assert f"rank {num_ranks - 1}: silent for" in stacks
    report = check_as_undisturbed(lab, attempt, num_ranks)
    assert (report["generations"], report["restarts"]) == (2, [cause])


def test_a_stopped_rank_hangs(lab: Any) -> None:
    attempt = train(lab, num_ranks=2, hang_seconds=FLOOR)
    wait_for(lambda: len(committed(lab, attempt)) > 2, 60, "some checkpoints")
    os.kill(ranks(lab, attempt)[1], signal.SIGSTOP)
    _, stacks = hang_of(lab, attempt)
    assert "state T" in stacks and "no stacks" not in stacks
    assert check_as_undisturbed(lab, attempt, 2)["generations"] == 2


def test_what_takes_its_time_is_left_alone(lab: Any) -> None:
    """Steps longer than the floor, a rank that evaluates alone while its peer waits, a loop without a boundary."""
    body = """
        if run.step in (9, 10, 11): time.sleep(2 * 0.5)
        if run.step == 20 and run.rank == 0:
            with run.phase("eval"): time.sleep(4 * 0.5)
        if run.step == 30:
            for _ in range(12):
                with run.phase("generation"): time.sleep(0.5 / 2)
"""
    attempt = train(lab, body.strip(), "slow.py", num_ranks=2, hang_seconds=FLOOR)
    assert check_as_undisturbed(lab, attempt, 2)["generations"] == 1
    assert lab.server.events(attempt, "hang") == []


def test_one_that_hangs_while_it_is_told_to_leave_has_its_grace_and_is_not_started_again(lab: Any) -> None:
    attempt = train(lab, num_ranks=2, hang_seconds=FLOOR)
    wait_for(lambda: len(committed(lab, attempt)) > 2, 60, "some checkpoints")
    pids = ranks(lab, attempt)
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    lab.server.tell(attempt, "yield", 4 * FLOOR, "preempted")
    report = lab.server.exit_of(attempt, 40)
    assert (report["killed"], report["generations"]) == ("grace", 1)
    assert lab.server.events(attempt, "hang") == []


def test_a_yield_during_the_restart_is_heard(lab: Any) -> None:
    attempt = train(lab, LOCKED.replace("HOW", "hang_here()").strip(), "hang.py", num_ranks=2, hang_seconds=FLOOR)
    hang_of(lab, attempt)
    lab.server.tell(attempt, "yield", 30.0, "preempted")
    report = lab.server.exit_of(attempt, 60)
    if report["generations"] == 1:  # it came before the ranks were ended
        assert report["killed"] in ("hung", "grace")
        return
    assert (report["left"], report["saved"], report["exit_codes"]) == ("yield", True, [75, 75]), logs(lab, attempt)
    assert 2 in generations(lab, attempt)
