"""The trainer under a real daemon, warm process and supervisor: what it says arrives, what it is told it does."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import node_lab
import pytest
from node_lab import wait_for

from overnight.trainer.data.record import audit

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
PARAMS = {"epochs": 3, "width": 4}
UPDATES = 3 * 44


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with node_lab.warm_lab() as made:
        yield made


def start(lab: Any, trial: str, number: int, **fields: Any) -> str:
    attempt_dir = str(lab.home.attempt_dir(trial, number))
    return str(lab.run(DIGITS, trial_id=trial, number=number, attempt_dir=attempt_dir, params=PARAMS, **fields))


def log(lab: Any, trial: str, number: int) -> str:
    path = lab.home.attempt_dir(trial, number) / "out.log"
    return path.read_text(errors="replace") if path.exists() else ""


def weights(lab: Any, trial: str, number: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((lab.home.attempt_dir(trial, number) / "final.json").read_text())
    return result


def rank_pid(lab: Any, trial: str, number: int) -> int:
    path = lab.home.attempt_dir(trial, number) / "pids.json"
    pids = wait_for(lambda: path.exists() and json.loads(path.read_text()).get("ranks"), 30, "pids")
    first = pids[0] if isinstance(pids, list) else pids["0"]
    return int(first["pid"])


def supervisor_pid(lab: Any, trial: str, number: int) -> int:
    pids = json.loads((lab.home.attempt_dir(trial, number) / "pids.json").read_text())
    return int(pids["supervisor"]["pid"])


def test_pre_empted_and_killed_ends_like_undisturbed(lab: Any) -> None:
    whole = start(lab, "tri-whole", 1)
    report = lab.server.exit_of(whole, 90)
    assert report["exit_codes"] == [0], log(lab, "tri-whole", 1)
    reports = lab.server.events(whole, "report")
    assert [event["data"]["step"] for event in reports] == [44, 88, UPDATES]
    assert [event["data"]["step"] for event in lab.server.events(whole, "checkpoint")][-1] == UPDATES
    metrics = [row for event in lab.server.events(whole, "metrics") for row in event["data"]["rows"]]
    assert [row[1] for row in metrics if row[0] == "loss"] == list(range(1, UPDATES + 1))
    ledger: dict[str, float] = {}
    for event in lab.server.events(whole, "ledger"):
        for name, seconds in event["data"]["seconds"].items():
            ledger[name] = ledger.get(name, 0.0) + seconds
    started, ended = lab.server.events(whole, "started")[0]["at"], lab.server.events(whole, "exit")[0]["at"]
    assert sum(ledger.values()) == pytest.approx(ended - started, abs=1.0)

    first = start(lab, "tri-hit", 1)
    wait_for(lambda: lab.server.events(first, "report"), 60, "a report")
    lab.server.tell(first, "yield", reason="preempted")
    report = lab.server.exit_of(first, 30)
    assert (report["exit_codes"], report["left"], report["saved"]) == ([75], "yield", True), log(lab, "tri-hit", 1)

    second = start(lab, "tri-hit", 2)
    wait_for(lambda: "resumed at step" in log(lab, "tri-hit", 2), 60, "the resume")
    os.kill(rank_pid(lab, "tri-hit", 2), signal.SIGKILL)
    wait_for(lambda: log(lab, "tri-hit", 2).count("resumed at step") == 2, 60, "the ranks start again")
    os.kill(supervisor_pid(lab, "tri-hit", 2), signal.SIGKILL)
    assert lab.server.wait_ended(second, 30)["vanished"] is True

    third = start(lab, "tri-hit", 3)
    assert lab.server.exit_of(third, 90)["exit_codes"] == [0], log(lab, "tri-hit", 3)
    assert weights(lab, "tri-hit", 3) == weights(lab, "tri-whole", 1)
    counted = audit(lab.home.trial_dir("tri-hit"))
    assert (counted.repeated, counted.skipped, counted.recorded) == (0, 0, UPDATES * 32)


def test_a_prune_leaves_at_once(lab: Any) -> None:
    attempt = start(lab, "tri-pruned", 1)
    wait_for(lambda: lab.server.events(attempt, "report"), 60, "a report")
    lab.server.tell(attempt, "stop", reason="pruned")
    report = lab.server.exit_of(attempt, 30)
    assert (report["left"], report["saved"]) == ("stop", False)
    assert not (lab.home.attempt_dir("tri-pruned", 1) / "final.json").exists()


def test_an_exception_arrives_with_its_step(lab: Any) -> None:
    text = """
from overnight import trainer
with trainer.run() as run:
    for step in run.steps(5):
        if step == 3:
            raise ValueError("the third step is cursed")
"""
    lab.script(text)
    attempt = lab.run("train.py")
    error = lab.server.exit_of(attempt, 60)["error"]
    assert (error["type"], error["step"]) == ("ValueError", 3)
    assert "the third step is cursed" in error["message"] + error["traceback"]
