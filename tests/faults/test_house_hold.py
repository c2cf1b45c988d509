"""What a trial does to a house, what a house that goes away does to a trial, and gangs, which live and die together."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_lab import NUM_STEPS, PRINTED, House, is_alive, running_house, wait_for

from overnight.core.enums import Outcome, PriorityClass, TrialState
from overnight.core.models.spec import Compute

MEGABYTE = 2**20
pytestmark = pytest.mark.timeout(400)  # deadlines are inside; a busy machine must not matter


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with running_house(tmp_path_factory.mktemp("house"), "fake:3", grace_seconds=3) as made:
        yield made
        made.check_leases()


def test_a_child_that_survives_its_trial_is_gone_before_the_device_is_clean(house: House) -> None:
    (trial,) = house.completed([house.submit("survivor.py", objective=None)])
    house.check_ends([trial])
    assert house.claimed() == [], "the device is clean, and yet a process has it"
    again = house.completed([house.submit("survivor.py", {"again": n}, objective=None) for n in range(6)])
    house.check_ends(again)
    assert house.claimed() == []


def test_a_trial_that_is_deaf_to_the_yield_is_killed_and_resumed_from_its_last_commit(house: House) -> None:
    # One save before it is deaf: a second one may wait for the first, and would not have begun.
    deaf = house.submit(params={"deaf_at": 10, "every": 8}, seed=11, priority=PriorityClass.EXPLORATORY)
    house.until(deaf, lambda t: t.checkpoints and t.checkpoints[-1].step == 8, "it is deaf")
    everything = Compute(gpus=3)
    urgent = house.submit("plain.py", {"steps": 5}, objective=None, compute=everything, priority=PriorityClass.URGENT)
    house.until(deaf, lambda t: t.state is TrialState.YIELDING, "it is told to yield")
    (done,) = house.completed([urgent])
    trial = house.trial(deaf)
    assert trial.attempts[0].outcome is Outcome.PREEMPTED, house.story(trial)
    assert "nothing was saved" in trial.attempts[0].cause
    assert trial.retries_used == 0 and trial.preemptions == 1
    assert done.attempts_made == 1, house.story(done)
    house.completed([deaf])
    assert forked_at(house, deaf, 2) == 8
    house.check_as_undisturbed([deaf])


def forked_at(house: House, trial_id: str, attempt: int, generation: int = 1) -> int:
    """The step of the checkpoint from which the ranks of a token went on."""
    return json.loads((house.home.checkpoints(trial_id) / f"fence-{attempt}.{generation}.json").read_text())["step"]


def newest_step(house: House, trial_id: str) -> int:
    """The step of the newest checkpoint that lies in a trial's place."""
    folders = [path.parent.name for path in house.home.checkpoints(trial_id).glob("step-*/manifest.json")]
    return max(int(name.partition(".")[0].removeprefix("step-")) for name in folders)


def test_a_flood_of_output_is_bounded_and_its_end_can_be_read(house: House) -> None:
    server = house.pid("server")
    before = peak_memory(server)
    (trial,) = house.completed([house.submit("flood.py", objective=PRINTED)])
    assert trial.value == 0.5
    log = house.home.attempt_dir(trial.id, 1) / "out.log"
    assert log.stat().st_size > 180 * MEGABYTE, "offsets stay those of the whole output"
    assert log.stat().st_blocks * 512 < 40 * MEGABYTE
    last = house.cli("logs", "-n", "3", trial.name).splitlines()
    assert last[-2:] == ["line 24999 of a flood that nobody reads", "step 1 score=0.5"]
    assert peak_memory(server) - before < 100 * MEGABYTE


def peak_memory(pid: int | None) -> int:
    """Highest resident memory of a process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_what_runs_is_what_was_submitted_however_long_it_waited(house: House, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import helper; print('main as submitted,', helper.WORD)")
    (tmp_path / "helper.py").write_text("WORD = 'helper too'")
    blocker = house.submit("plain.py", {"steps": 1_000_000}, objective=None, compute=Compute(gpus=3))
    house.until(blocker, lambda t: t.state is TrialState.RUNNING, "every device is busy")
    name = house.cli("submit", "main.py", cwd=tmp_path).split()[0].rstrip(":")
    (tmp_path / "main.py").write_text("raise SystemExit('changed')")
    (tmp_path / "helper.py").unlink()
    assert house.client.trial(name).state is TrialState.QUEUED
    house.client.cancel(blocker)
    house.completed([house.client.trial(name).id])
    assert len(house.zygotes()) == 1, "what was warmed in advance serves what this shell submits"
    assert house.cli("logs", name) == "main as submitted, helper too\n"


def test_a_trial_that_ends_while_server_and_daemon_are_away_is_adopted(house: House) -> None:
    trial_id = house.submit(seed=12)
    trial = house.until_saved(trial_id)
    pids, up = house.pids(trial), house.process
    assert up is not None
    up.send_signal(signal.SIGSTOP)  # which would start both again at once
    server, daemon = house.pid("server"), house.pid("node")
    assert server is not None and daemon is not None
    os.kill(server, signal.SIGKILL)
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: not pids["supervisor"].alive(), "it has ended without anybody")
    assert (house.home.attempt_dir(trial_id, 1) / "exit.json").exists()
    assert not is_alive(server) and not is_alive(daemon)
    up.send_signal(signal.SIGCONT)
    (trial,) = house.completed([trial_id])
    assert trial.attempts_made == 1, house.story(trial)
    assert trial.step == NUM_STEPS
    house.check_as_undisturbed([trial_id])


def test_after_ctrl_c_the_next_up_goes_on_from_where_they_yielded(house: House) -> None:
    trials = [house.submit(seed=seed) for seed in (13, 14)]
    plain = house.submit("plain.py", {"start": 0.7}, objective=PRINTED)
    saved = [house.until_saved(trial_id) for trial_id in trials]
    assert house.interrupt() == 0
    wait_for(lambda: not house.processes(), "no process of the home is left", 30)
    assert house.recorded_alive() == [] and house.claimed() == []
    yielded_at = {trial_id: newest_step(house, trial_id) for trial_id in trials}
    house.up()
    house.completed([*trials, plain])
    for before in saved:
        trial = house.trial(before.id)
        first = trial.attempts[0]
        assert (first.outcome, trial.attempts_made) == (Outcome.PREEMPTED, 2), house.story(trial)
        assert "nothing was saved" not in first.cause
        assert forked_at(house, trial.id, 2) == yielded_at[trial.id] >= before.checkpoints[-1].step
        assert trial.retries_used == 0
    house.check_as_undisturbed(trials)


def test_a_gang_that_loses_a_rank_starts_again_as_a_whole_without_leaving_its_lease(house: House) -> None:
    gang = house.submit(seed=21, compute=Compute(gpus=2))
    saved = house.until_saved(gang)
    pids = house.pids(saved)
    assert len(pids["ranks"]) == len(saved.devices) == 2
    os.kill(pids["ranks"][1].pid, signal.SIGKILL)
    wait_for(lambda: not any(one.alive() for one in pids["ranks"]), "the other rank is ended too", 60)
    (trial,) = house.completed([gang])
    assert (trial.attempts_made, trial.retries_used, trial.attempts[0].generation) == (1, 0, 2), house.story(trial)
    assert forked_at(house, gang, 1, 2) >= saved.checkpoints[-1].step, "it started over"
    (restarted,) = [event for event in house.events() if event.kind == "attempt.restarted"]
    assert (restarted.trial_id, restarted.cause) == (gang, "rank 1 was ended by SIGKILL")
    assert "1 restart inside an attempt" in house.cli("show", trial.name)
    house.check_as_undisturbed([gang])


def test_a_gang_is_not_starved_by_small_trials(house: House) -> None:
    small = {"objective": None, "experiment": "small"}
    early = [house.submit("plain.py", {"steps": 30 + 20 * n}, **small) for n in range(3)]
    for trial_id in early:
        house.until(trial_id, lambda t: t.state is not TrialState.QUEUED, "every device is busy")
    gang = house.submit("plain.py", {"steps": 10}, objective=None, compute=Compute(gpus=3))
    late = [house.submit("plain.py", {"steps": 5, "start": n}, **small) for n in range(9)]
    house.completed([*early, gang, *late])
    starts = [e.trial_id for e in house.events() if e.kind == "trial.state" and e.after == TrialState.STARTING]
    order = [trial_id for trial_id in starts if trial_id == gang or trial_id in late]
    assert order.index(gang) == 0, "a small trial that came later passed it"
