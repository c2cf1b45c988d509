"""The line to the supervisor: in order, once, and never in the way."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_supervisor import Supervisor

from overnight import trainer
from overnight.core.enums import DirectiveAction
from overnight.core.errors import BadInputError, FencedError, SaveFailedError
from overnight.trainer.link import Link, wire_number
from overnight.trainer.metrics import Metrics
from overnight.trainer.phases import Ledger


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "s.sock")
    yield supervisor
    supervisor.close()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_messages_arrive_in_order_with_metrics_before_what_followed_them(supervisor: Supervisor) -> None:
    link = Link(supervisor.path, rank=0, pid=42)
    link.open()
    link.push(1, "", [["loss", 1, 0.5, 9.0]], {"seconds": {"compute": 1.0}, "counts": {}})
    link.push(2, "", [["loss", 2, 0.4, 9.5]], {"seconds": {"compute": 2.0}, "counts": {"updates": 1}})
    link.send("/v1/report", {"step": 2, "values": {"acc": 0.9}})
    assert link.flush()
    assert [route for route, _ in supervisor.received] == ["/v1/hello", "/v1/push", "/v1/report"]
    hello, push, report = (body for _, body in supervisor.received)
    assert hello == {"rank": 0, "pid": 42, "trainer": True}
    assert push["metrics"] == [["loss", 1, 0.5, 9.0], ["loss", 2, 0.4, 9.5]]
    assert push["ledger"] == {"seconds": {"compute": 3.0}, "counts": {"updates": 1.0}}
    assert (push["step"], report["values"]) == (2, {"acc": 0.9})
    assert link.close()


def test_a_directive_arrives_in_milliseconds(supervisor: Supervisor) -> None:
    link = Link(supervisor.path, 0, 1)
    link.open()
    assert link.flush()
    started = time.monotonic()
    supervisor.tell("yield")
    wait_until(lambda: link.directive.action is DirectiveAction.YIELD)
    assert time.monotonic() - started < 0.5
    link.close()


def test_what_was_said_while_the_supervisor_was_away_arrives_once_it_is_there(tmp_path: Path) -> None:
    link = Link(str(tmp_path / "s.sock"), 0, 1)
    link.open()
    for step in range(5):
        link.push(step, "", [["loss", step, 1.0, 0.0]])
    started = time.monotonic()
    assert not link.flush(30.0)
    assert time.monotonic() - started < 5.0, "an absent supervisor must not hold up a save"
    supervisor = Supervisor(tmp_path / "s.sock")
    try:
        wait_until(lambda: link.flush(1.0))
        rows = [row for _, body in supervisor.received for row in body.get("metrics", [])]
        assert [row[1] for row in rows] == [0, 1, 2, 3, 4]
    finally:
        link.close()
        supervisor.close()


def test_server_errors_are_retried_and_refusals_are_not(supervisor: Supervisor) -> None:
    supervisor.status = 503
    link = Link(supervisor.path, 0, 1)
    link.open()
    assert not link.flush(0.3)
    supervisor.status = 200
    wait_until(lambda: link.flush(1.0))
    assert [route for route, _ in supervisor.received] == ["/v1/hello"]
    supervisor.status = 400
    link.send("/v1/report", {"step": 1, "values": {}})
    wait_until(lambda: link.flush(1.0))
    link.close()


def test_without_a_supervisor_nothing_is_kept() -> None:
    link = Link(None, 0, 1)
    link.open()
    link.push(1, "", [["a", 1, 1.0, 0.0]])
    assert link.flush() and link.close()


def test_numbers_that_json_lacks_travel_as_text(supervisor: Supervisor) -> None:
    assert [wire_number(x) for x in (float("nan"), float("inf"), float("-inf"), 2, 0.5)] == [
        "nan",
        "inf",
        "-inf",
        2,
        0.5,
    ]
    link = Link(supervisor.path, 0, 1)
    link.open()
    metrics = Metrics(link, Ledger())
    metrics.report(metrics.announce(3, {"loss": float("nan"), "note": "ok"}), "")
    assert link.flush()
    assert supervisor.received[-1][1]["values"] == {"loss": "nan", "note": "ok"}
    link.close()


@pytest.mark.parametrize("values", [{"x": [1, 2]}, {"x": object()}, {"y" * 300: 1.0}, {"": 1.0}])
def test_what_is_no_metric_is_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        Metrics(Link(None, 0, 1), Ledger()).log(1, values)


@pytest.fixture
def supervised(supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    trial = tmp_path / "trial"
    values = {
        "OVERNIGHT_TRIAL_ID": "tri-1",
        "OVERNIGHT_ATTEMPT": "3",
        "OVERNIGHT_GENERATION": "2",
        "OVERNIGHT_TRIAL_DIR": str(trial),
        "OVERNIGHT_ATTEMPT_DIR": str(trial / "attempts" / "0003"),
        "OVERNIGHT_CHECKPOINTS": str(trial / "checkpoints"),
        "OVERNIGHT_PARAMS": '{"lr": 1, "opt": {"beta": 0.5}}',
        "OVERNIGHT_SEED": "11",
        "OVERNIGHT_SUPERVISOR": supervisor.path,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "5", "--fresh"])
    return supervisor


def routes(supervisor: Supervisor) -> list[str]:
    return [route for route, _ in supervisor.received]


def test_a_supervised_run_from_hello_to_the_last_checkpoint(supervised: Supervisor) -> None:
    with trainer.run(defaults={"lr": 0.1, "n": 4}, every=2) as run:
        assert (run.params["lr"], run.params["opt.beta"], run.params["n"], run.seed) == (1.0, 0.5, 4, 11)
        assert run.argv == ["--lr", "5"]
        run.track(model=torch.nn.Linear(2, 2))
        for step in run.steps(4):
            run.log(loss=torch.tensor(1.0 / step))
            with run.phase("eval"):
                run.report(acc=step / 10)
    assert routes(supervised)[0] == "/v1/hello"
    rows = [row for _, body in supervised.received for row in body.get("metrics", [])]
    assert [(key, step, round(value, 4)) for key, step, value, _ in rows] == [
        ("loss", 1, 1.0),
        ("loss", 2, 0.5),
        ("loss", 3, 0.3333),
        ("loss", 4, 0.25),
    ]
    reports = [(body["step"], body["values"]) for route, body in supervised.received if route == "/v1/report"]
    assert reports == [(step, {"acc": step / 10}) for step in range(1, 5)]
    saved = [body for route, body in supervised.received if route == "/v1/checkpoint"]
    assert [(body["step"], Path(body["uri"]).name) for body in saved] == [
        (2, "step-2.attempt-3.2"),
        (4, "step-4.attempt-3.2"),
    ], "the final save has nothing new to write"
    for place, (route, body) in enumerate(supervised.received):
        if route == "/v1/checkpoint":  # whatever led to a checkpoint is told before
            told = [said["step"] for known, said in supervised.received[:place] if known == "/v1/report"]
            assert told[: body["step"]] == list(range(1, body["step"] + 1))
    seconds: dict[str, float] = {}
    for _, body in supervised.received:
        for name, amount in body.get("ledger", {}).get("seconds", {}).items():
            seconds[name] = seconds.get(name, 0.0) + amount
    assert {"launch", "restore", "compute", "checkpoint", "eval"} <= set(seconds)


def test_where_the_seconds_of_five_went(supervised: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived sums to the wall clock, read by the ledger itself: launch to the very end of the run."""
    readings: list[float] = []

    def clock() -> float:
        readings.append(time.monotonic())
        return readings[-1]

    def ledger(launched: float) -> Ledger:
        return Ledger(clock, launched)

    monkeypatch.setattr("overnight.trainer.execution.Ledger", ledger)
    monkeypatch.setattr("overnight.trainer.execution.seconds_since_launch", lambda _: 0.25)
    entered = time.monotonic()
    with trainer.run(every=20) as run:
        run.track(model=torch.nn.Linear(2, 2))
        for _ in run.batches(trainer.DataLoader(range(8), batch_size=2, num_workers=0), seconds=5.0):
            time.sleep(0.02)  # the work
            if run.every(updates=25):
                with run.phase("eval"), run.phase("of my own"):
                    run.report(acc=run.step)
    left = time.monotonic()
    seconds: dict[str, float] = {}
    for body in supervised.of("/v1/push"):
        for name, amount in body.get("ledger", {}).get("seconds", {}).items():
            seconds[name] = seconds.get(name, 0.0) + amount
    assert sum(seconds.values()) == pytest.approx(readings[-1] - readings[0] + 0.25, rel=1e-6)
    assert entered <= readings[0] and readings[-1] <= left and readings[-1] - readings[0] >= 5.0
    assert seconds["compute"] > 4.0 and seconds["launch"] >= 0.25
    assert set(seconds) == {"launch", "restore", "compute", "data_wait", "checkpoint", "eval", "shutdown"}


ENDS = [("yield", trainer.Yielded, True), ("stop", trainer.Stopped, False)]


@pytest.mark.parametrize(("action", "kind", "saved"), ENDS)
def test_directives_end_a_run_at_the_next_boundary(
    supervised: Supervisor, action: str, kind: type[trainer.Left], saved: bool
) -> None:
    with pytest.raises(kind) as caught, trainer.run(every=None) as run:
        run.track(keep=dict[str, Any]())
        for step in run.steps(10_000):
            if step == 5:
                supervised.tell(action)
                wait_until(lambda: run._link.directive.action == action)
    assert (caught.value.step, caught.value.saved, caught.value.code) == (5, saved, 75)
    leaving = [body for route, body in supervised.received if route == "/v1/leaving"]
    assert leaving == [{"rank": 0, "why": action, "saved": saved, "step": 5}]
    assert (Path(run.trial_dir) / "checkpoints" / "step-5.attempt-3.2").exists() == saved


def test_a_checkpoint_directive_saves_once(supervised: Supervisor) -> None:
    with trainer.run(every=None) as run:
        run.track(keep=dict[str, Any]())
        for step in run.steps(6):
            if step == 2:
                supervised.tell("checkpoint")
                wait_until(lambda: run._link.directive.version == 1)
            run.state["step"] = step
    assert [body["step"] for route, body in supervised.received if route == "/v1/checkpoint"] == [2, 6]


def test_a_yield_whose_save_fails_says_so(supervised: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(trainer.Yielded) as caught, trainer.run(every=None) as run:
        run.track(keep=(keep := dict[str, Any]()))
        for _ in run.steps(5):
            keep["bad"] = lambda: 0
            supervised.tell("yield")
            wait_until(lambda: run._link.directive.action == "yield")
    assert not caught.value.saved
    assert "leaving without a save" in capsys.readouterr().err
    assert [body["saved"] for route, body in supervised.received if route == "/v1/leaving"] == [False]


def test_an_exception_is_told_and_a_failing_last_save_is_one(supervised: Supervisor) -> None:
    """C2, C5: never done without a checkpoint."""
    with pytest.raises(SaveFailedError, match=r"keep\.bad is a function"), trainer.run(every=None) as run:
        run.track(keep=(keep := dict[str, Any]()))
        list(run.steps(2))
        keep["bad"] = lambda: 0
    (error,) = [body for route, body in supervised.received if route == "/v1/error"]
    assert error["type"] == "SaveFailedError" and error["step"] == 2 and "Traceback" in error["traceback"]
    assert not (run._attempt_dir / "final.json").exists()
    assert [p.name for p in (run.trial_dir / "checkpoints").iterdir()] == ["fence-3.2.json"]


def test_a_trial_that_is_started_twice_is_refused(supervised: Supervisor) -> None:
    with trainer.run(every=None):
        pass
    with pytest.raises(FencedError), trainer.run(every=None):
        pass


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_speaks_nor_waits_for_a_lock_that_a_thread_held(supervisor: Supervisor) -> None:
    link = Link(supervisor.path, 0, 1)
    link.open()
    assert link.flush()
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with link._state:
            held.set()
            forked.wait(30.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5.0)
    child = os.fork()
    if child == 0:
        link.push(1, "eval")
        link.send("/v1/report", {"step": 1, "values": {}})
        os._exit(0 if link.flush() and link.close() else 1)
    forked.set()
    holder.join()
    try:
        wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == 0
    assert link.close()
    assert [route for route, _ in supervisor.received] == ["/v1/hello"]
