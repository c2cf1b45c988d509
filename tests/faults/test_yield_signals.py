"""A signal to any process of a gang asks all of it to leave: together, at one step, with one checkpoint."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_lab import wait_for, warm_lab
from training_lab import check_as_undisturbed, committed, generations, logs, ranks, train

NEVER = 1_000_000


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with warm_lab() as made:
        yield made


def trained(lab: Any, attempt: str) -> bool:
    return any(event["data"].get("step") for event in lab.server.events(attempt, "progress"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_signal_to_the_last_rank_is_a_yield_of_all(lab: Any, num_ranks: int, number: int) -> None:
    attempt = train(lab, num_ranks=num_ranks, params={"every": NEVER})
    wait_for(lambda: trained(lab, attempt), 60, "a first step")
    os.kill(ranks(lab, attempt)[num_ranks - 1], number)
    report = lab.server.exit_of(attempt, 30)
    assert report["exit_codes"] == [75] * num_ranks, logs(lab, attempt, num_ranks)
    assert (report["left"], report["saved"], report["killed"], report["error"]) == ("yield", True, None, None)
    assert report["directive"] is None, "nobody but the signal asked"
    (step,) = committed(lab, attempt)
    assert 0 < step < 48 and generations(lab, attempt) == [1]


def test_a_loader_worker_ignores_it(lab: Any) -> None:
    attempt = train(lab, num_ranks=2, params={"workers": 1})
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    for pid in ranks(lab, attempt).values():
        workers = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert workers
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
            os.kill(worker, signal.SIGUSR1)
    assert check_as_undisturbed(lab, attempt, 2)["generations"] == 1
