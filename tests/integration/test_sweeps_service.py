"""Sweeps on a real store with a real planner process: filled without a barrier, never twice, through every death."""

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
from sweep_lab import LOSS, SMALL, WIDE, Lab, sweep_in, until

from overnight.core.canonical import canonical_json
from overnight.core.enums import Mode, SweepState, TrialState
from overnight.core.errors import InvalidSpecError, UnsatisfiableError
from overnight.core.models.spec import Distribution, Objective, Prune, SweepConfig
from overnight.planning.observations import Request
from overnight.platform.sweeps.planner import PlannerFailedError, PlannerProcess

S = TrialState


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.fixture
async def planner() -> AsyncIterator[PlannerProcess]:
    process = PlannerProcess()
    yield process
    await process.close()


def loss(params: dict) -> float:
    return (math.log10(params["lr"]) + 3) ** 2 + params["x"]


async def test_a_sweep_keeps_trials_in_flight_and_ends(lab: Lab) -> None:
    async with lab.service() as service:
        sweep = await service.start(sweep_in("tpe", trials=12, parallel=3), actor="ann")
        await until(lambda: len(lab.of_state(sweep.id, S.QUEUED)) == 3)
        done = await lab.work(sweep.id, loss)
    assert (done.state, done.cause) == (SweepState.FINISHED, "all 12 trials are done")
    assert done.trials_by_state == {S.COMPLETED: 12}
    assert lab.most_open == 3
    assert sorted(lab.submitted) == sorted(f"{sweep.id}:{n}" for n in range(12))
    assert len({canonical_json(t.params) for t in lab.trials(sweep.id)}) == 12
    assert done.best is not None
    assert done.best.value == min(t.value for t in lab.trials(sweep.id) if t.value is not None)


async def test_there_is_no_barrier(lab: Lab) -> None:
    async with lab.service() as service:
        sweep = await service.start(sweep_in(trials=6, parallel=2), actor="ann")
        slow, *_ = await until(lambda: (q := lab.of_state(sweep.id, S.QUEUED)) and len(q) == 2 and q)
        for _ in range(5):
            fast = await until(lambda: [t for t in lab.of_state(sweep.id, S.QUEUED) if t.id != slow.id])
            lab.finish(fast[0].id, 1.0)
        assert not [t for t in lab.trials(sweep.id) if t.id != slow.id and t.state is S.QUEUED]
        assert lab.sweep(sweep.id).state is SweepState.ACTIVE
        lab.finish(slow.id, 0.5)
        await until(lambda: lab.sweep(sweep.id).state is SweepState.FINISHED)


async def test_a_small_space_ends_the_sweep_when_it_is_exhausted(lab: Lab) -> None:
    async with lab.service() as service:
        sweep = await service.start(sweep_in("tpe", SMALL, trials=50, parallel=3), actor="ann")
        done = await lab.work(sweep.id, lambda p: p["a"])
    assert done.cause == "the space is exhausted: all 8 configurations have been tried"
    assert done.trials_by_state == {S.COMPLETED: 8}


async def test_what_another_sweep_has_tried_is_known_and_not_run_again(lab: Lab) -> None:
    async with lab.service() as service:
        first = await service.start(sweep_in("random", SMALL, trials=5), actor="ann")
        await lab.work(first.id, lambda p: p["a"])
        second = await service.start(sweep_in("random", SMALL, trials=50), actor="bob")
        done = await lab.work(second.id, lambda p: p["a"])
    own = [t for t in lab.trials(second.id) if t.sweep_id == second.id]
    assert len(own) == done.proposed == 3
    assert done.cause == "the space is exhausted: all 8 configurations have been tried"


async def test_failures_in_a_row_break_the_sweep_and_drop_the_queue(lab: Lab) -> None:
    async with lab.service() as service:
        body = sweep_in(trials=20, parallel=3, stop={"consecutive_failures": 2})
        sweep = await service.start(body, actor="ann")
        for _ in range(2):
            queued = await until(lambda: lab.of_state(sweep.id, S.QUEUED))
            lab.finish(queued[0].id, None, S.FAILED, cause="ValueError: lr is negative")
        broken = await until(lambda: (s := lab.sweep(sweep.id)).state is SweepState.BROKEN and s)
    assert broken.cause.startswith("2 trials in a row failed, the last was digits-")
    assert broken.cause.endswith(": ValueError: lr is negative")
    assert not lab.of_state(sweep.id, S.QUEUED)


async def test_nan_objectives_do_not_stop_the_search(lab: Lab) -> None:
    async with lab.service() as service:
        sweep = await service.start(sweep_in("tpe", trials=8, parallel=2), actor="ann")
        done = await lab.work(sweep.id, lambda p: math.nan if p["x"] < 0.5 else loss(p))
    assert done.state is SweepState.FINISHED
    assert done.best is not None


async def test_a_target_ends_it_early(lab: Lab) -> None:
    objective = Objective(metric="acc", mode=Mode.MAX)
    async with lab.service() as service:
        body = sweep_in(trials=50, parallel=3, objective=objective, stop={"target": 0.9})
        sweep = await service.start(body, actor="ann")
        queued = await until(lambda: (q := lab.of_state(sweep.id, S.QUEUED)) and len(q) == 3 and q)
        lab.finish(queued[0].id, 0.95)
        done = await until(lambda: (s := lab.sweep(sweep.id)).state is SweepState.FINISHED and s)
    assert "reached 0.95, the target was at least 0.9" in done.cause
    assert not lab.of_state(sweep.id, S.QUEUED)


async def test_stop_cancels_and_nothing_comes_after(lab: Lab) -> None:
    async with lab.service() as service:
        sweep = await service.start(sweep_in(trials=50, parallel=4), actor="ann")
        await until(lambda: len(lab.of_state(sweep.id, S.QUEUED)) == 4)
        stopped = await service.stop(sweep.id, actor="bob", reason="seen enough")
        assert (stopped.state, stopped.cause) == (SweepState.STOPPED, "seen enough")
        assert stopped.trials_by_state == {S.CANCELLED: 4}
        assert (await service.stop(sweep.id, actor="bob")).cause == "seen enough"
        other = await service.start(sweep_in(trials=2, experiment="other"), actor="ann")
        await lab.work(other.id, loss)
    assert len(lab.trials(sweep.id)) == 4


async def test_a_service_that_is_closed_and_opened_again_loses_and_doubles_nothing(lab: Lab) -> None:
    sweep_id = ""
    for generation in range(6):
        async with lab.service() as service:
            if not sweep_id:
                sweep_id = (await service.start(sweep_in("tpe", trials=12, parallel=3), actor="ann")).id
            if generation % 2:  # leave while it is at work
                await asyncio.sleep(0)
            else:
                queued = await until(partial(lab.of_state, sweep_id, S.QUEUED))
                lab.finish(queued[0].id, loss(queued[0].params))
    async with lab.service():
        done = await lab.work(sweep_id, loss)
    assert done.trials_by_state == {S.COMPLETED: 12}
    assert lab.most_open <= 3
    assert len({canonical_json(t.params) for t in lab.trials(sweep_id)}) == 12


async def test_a_planner_killed_at_any_moment_loses_and_doubles_nothing(lab: Lab, planner: PlannerProcess) -> None:
    async with lab.service(planner) as service:
        sweep = await service.start(sweep_in("random", trials=20, parallel=2), actor="ann")
        killed: set[int] = set()

        def kill() -> bool:
            pid = planner.pid
            if pid is not None and pid not in killed and len(lab.submitted) >= 4 * len(killed):
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            queued = lab.of_state(sweep.id, S.QUEUED)
            if queued:
                lab.finish(queued[0].id, loss(queued[0].params))
            return lab.sweep(sweep.id).state is not SweepState.ACTIVE

        await until(kill, 60)
    assert len(killed) >= 4
    done = lab.sweep(sweep.id)
    assert (done.state, done.trials_by_state) == (SweepState.FINISHED, {S.COMPLETED: 20})
    assert sorted(set(lab.submitted)) == sorted(lab.submitted)


async def test_a_planner_that_always_dies_breaks_its_sweep_with_its_last_words(lab: Lab) -> None:
    dying = PlannerProcess([sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"])
    async with lab.service(dying) as service:
        sweep = await service.start(sweep_in(), actor="ann")
        broken = await until(lambda: (s := lab.sweep(sweep.id)).state is SweepState.BROKEN and s)
    assert "status 3" in broken.cause
    assert "3 times in a row" in broken.cause


REQUEST = Request(SweepConfig(planner="random", space=WIDE), LOSS, [], 1, 0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "no answer"),
        ("print('hello', flush=True); input(); input()", "failed"),
        ("import sys; sys.exit(0)", "ended with status 0"),
        ('input(); print(\'{"id": 7, "params": [], "exhausted": true}\', flush=True); input()', "question 7"),
        ('input(); print(\'{"id": 1, "params": [3], "exhausted": false}\', flush=True); input()', "no mapping"),
        ('input(); print(\'{"id": 1, "error": {"message": "ouch"}}\', flush=True); input()', "ouch"),
    ],
)
async def test_a_planner_that_misbehaves_costs_one_question(code: str, words: str) -> None:
    process = PlannerProcess([sys.executable, "-c", code], timeout_seconds=1.5)
    with pytest.raises(PlannerFailedError, match=words):
        await process.propose(REQUEST)
    await process.close()
    assert process.pid is None


async def test_the_planner_process_stays_warm_refuses_clearly_and_ends_with_its_server(planner: PlannerProcess) -> None:
    first = await planner.propose(REQUEST)
    pid = planner.pid
    assert pid is not None
    bad = SweepConfig(planner="random", space={"x": Distribution(kind="range", low=0, high=1, when="y == 1")})
    with pytest.raises(InvalidSpecError, match="no param"):
        await planner.propose(Request(bad, LOSS, [], 1, 0))
    assert await planner.propose(REQUEST) == first
    assert planner.pid == pid
    process = planner._child._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 5) == 0


async def test_unsatisfiable_trials_break_the_sweep(lab: Lab) -> None:
    async def refuse(actor, items):
        return [UnsatisfiableError("no node has 64 devices") for _ in items]

    lab.submit = refuse  # type: ignore[method-assign]
    async with lab.service() as service:
        sweep = await service.start(sweep_in(), actor="ann")
        broken = await until(lambda: (s := lab.sweep(sweep.id)).state is SweepState.BROKEN and s)
    assert broken.cause == "proposal 0 cannot be run: no node has 64 devices"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (sweep_in("grid"), "no planner"),
        (sweep_in("tpe", objective=None), "need an objective"),
        (sweep_in(objective=None, stop={"target": 1.0}), "need an objective"),
        (sweep_in(space={"x": Distribution(kind="range", low=0, high=1, when="1")}), "cannot read the condition"),
    ],
)
async def test_sweeps_that_cannot_work_are_refused_at_once(lab: Lab, body, words: str) -> None:
    async with lab.service() as service:
        with pytest.raises(InvalidSpecError, match=words):
            await service.start(body, actor="ann")
    assert lab.sweeps() == []


async def test_a_dry_run_leaves_nothing(lab: Lab) -> None:
    async with lab.service() as service:
        found = await service.start(sweep_in().model_copy(update={"dry_run": True}), actor="ann")
    assert found.state is SweepState.ACTIVE
    assert lab.sweeps() == []


async def test_a_report_below_the_rung_prunes(lab: Lab) -> None:
    body = sweep_in("random", trials=6, parallel=6, prune=Prune(min_step=1, reduction=3))
    async with lab.service() as service:
        sweep = await service.start(body, actor="ann")
        queued = await until(lambda: (q := lab.of_state(sweep.id, S.QUEUED)) and len(q) == 6 and q)
        attempts = {trial.id: lab.begin(trial.id) for trial in queued}
        for place, trial in enumerate(queued):
            lab.spool(attempts[trial.id], "started", pids={}, warm=True)
            lab.spool(attempts[trial.id], "report", step=3, values={"loss": float(place)})
            await service.on_report(attempts[trial.id], [{"step": 3, "values": {"loss": float(place), "other": 1}}])
        states = {t.id: t.state for t in lab.trials(sweep.id)}
        assert [states[t.id] for t in queued] == [S.RUNNING] + [S.STOPPING] * 5
        await service.on_report("att-unknown", [{"step": 3, "values": {"loss": 0}}])
    async with lab.service() as service:  # a new server: the curves come back from the store
        await service.on_report(attempts[queued[0].id], [{"step": 9, "values": {"loss": "nan"}}])
        assert next(t for t in lab.trials(sweep.id) if t.id == queued[0].id).state is S.RUNNING
