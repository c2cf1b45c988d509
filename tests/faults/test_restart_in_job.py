"""A lost rank does not end its attempt: the ranks start again from the last checkpoint, as if nothing had been."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_lab import wait_for, warm_lab
from training_lab import check_as_undisturbed, committed, generations, is_alive, logs, losses, ranks, train


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with warm_lab() as made:
        yield made


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(lab: Any, num_ranks: int) -> None:
    attempt = train(lab, num_ranks=num_ranks, params={"pause": 0.05})
    first = ranks(lab, attempt)
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    spares = wait_for(spares_of(lab, attempt), 30, "a spare")
    assert all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in spares), "they are warm"
    os.kill(first[num_ranks - 1], signal.SIGKILL)
    second = ranks(lab, attempt, 2)
    assert set(spares) <= set(second.values()), "which had waited for the kill"
    wait_for(lambda: [e for e in lab.server.events(attempt, "checkpoint") if e["generation"] == 2], 60, "a further one")
    os.kill(second[0], signal.SIGKILL)
    report = check_as_undisturbed(lab, attempt, num_ranks)
    assert report["generations"] == 3
    assert report["restarts"] == [f"rank {num_ranks - 1} was ended by SIGKILL", "rank 0 was ended by SIGKILL"]
    assert len(lab.server.events(attempt, "started")) == 1, "one attempt, one lease"
    assert lab.server.wait_ended(attempt)["vanished"] is False
    assert lab.alive(attempt) == []
    events = lab.server.events(attempt)
    assert [event["generation"] for event in events] == sorted(event["generation"] for event in events)
    forks = {e["generation"]: e["data"]["fork_step"] for e in events if "fork_step" in e["data"]}
    assert sorted(forks) == [1, 2, 3] and 0 < forks[2] < forks[3]
    parents = {e["generation"]: e["data"]["parent"] for e in events if "fork_step" in e["data"]}
    assert parents == {1: None, 2: [1, 1], 3: [1, 2]}
    for generation, steps in losses(lab, attempt).items():
        assert steps == sorted(set(steps)) and steps[0] > forks[generation], f"generation {generation}: {steps}"


def test_what_a_killed_rank_had_started_is_gone_before_the_next_generation_begins(lab: Any) -> None:
    """A child that ignores every signal holds a lock: the next generation would fail to take it."""
    body = """
        if not hasattr(run, "claimed"):
            import fcntl, subprocess, sys
            run.claimed = open(os.environ["OVERNIGHT_TRIAL_DIR"] + "/claim", "a")
            os.set_inheritable(run.claimed.fileno(), True)
            fcntl.flock(run.claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 10, 15)]; time.sleep(1e6)"
            subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, close_fds=False)
"""
    attempt = train(lab, body.strip(), "claims.py", params={"workers": 2})
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    os.kill(ranks(lab, attempt)[0], signal.SIGKILL)
    assert check_as_undisturbed(lab, attempt, 1)["generations"] == 2


def dies(when: str, number: str) -> str:
    """A training that ends itself; by then what it saved two updates ago is committed, and its supervisor knows."""
    return f"""
        if saved is not None and run.step % 6 == 1:
            saved.result()
        if {when}:
            run._link.flush()
            os.kill(os.getpid(), signal.{number})
""".strip()


def test_without_progress_three_restarts_are_the_most(lab: Any) -> None:
    attempt = train(lab, dies("run.step == 9", "SIGSEGV"), "doomed.py")
    report = lab.server.exit_of(attempt, 60)
    assert (report["exit_codes"], report["generations"], report["failed_rank"]) == ([-signal.SIGSEGV], 5 - 1, 0)
    assert report["restarts"] == ["rank 0 was ended by SIGSEGV"] * 3
    assert committed(lab, attempt) == [6], "each start went on from the checkpoint, none went further"


def test_progress_that_lasts_begins_the_count_anew(lab: Any) -> None:
    body = dies("run.step % 6 == 3 and run.step // 6 == generation", "SIGKILL")
    attempt = train(lab, body, "stumbling.py", params={"pause": 0.0})
    report = check_as_undisturbed(lab, attempt, 1)
    assert report["generations"] == 8, "killed once after each checkpoint"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_exception_is_never_repeated(lab: Any, num_ranks: int) -> None:
    body = "if run.step == 9 and run.rank == run.world_size - 1: raise ValueError('cursed')"
    attempt = train(lab, body, "cursed.py", num_ranks=num_ranks)
    report = lab.server.exit_of(attempt, 60)
    assert (report["generations"], report["failed_rank"]) == (1, num_ranks - 1)
    assert (report["error"]["type"], report["error"]["rank"], report["error"]["step"]) == (
        "ValueError",
        num_ranks - 1,
        9,
    )


def test_a_peer_that_notices_first_is_not_blamed(lab: Any) -> None:
    """Rank 0 raises because rank 1 has gone, and is seen to end first: rank 1 lingers in its death."""
    attempt = train(lab, num_ranks=2)
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    pids = lab.pids(attempt)
    os.kill(pids["supervisor"]["pid"], signal.SIGSTOP)  # it sees both ends at once
    os.kill(pids["ranks"]["1"]["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(pids["ranks"]["0"]["pid"]), 60, "rank 0 has given up")
    os.kill(pids["supervisor"]["pid"], signal.SIGCONT)
    assert check_as_undisturbed(lab, attempt, 2)["restarts"] == ["rank 1 was ended by SIGKILL"]


def test_a_rank_lost_while_it_is_told_to_leave_ends_the_attempt(lab: Any) -> None:
    body = """
        if run.step == 9:
            print("stuck", flush=True)
            while run._link.directive.version == 0: time.sleep(0.01)
            print("told", flush=True)
            time.sleep(1e6)
"""
    attempt = train(lab, body.strip(), "stuck.py")
    wait_for(lambda: "stuck" in lab.log(attempt), 60, "step 9")
    lab.server.tell(attempt, "yield", 30.0)
    wait_for(lambda: "told" in lab.log(attempt), 30, "the directive arrives")
    os.kill(ranks(lab, attempt)[0], signal.SIGKILL)
    report = lab.server.exit_of(attempt, 20)
    assert (report["generations"], report["exit_codes"]) == (1, [-signal.SIGKILL])


def test_a_yield_right_after_a_restart_is_heard_by_the_new_ranks(lab: Any) -> None:
    attempt = train(lab, num_ranks=2)
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    os.kill(ranks(lab, attempt)[1], signal.SIGKILL)
    wait_for(lambda: len(generations(lab, attempt)) > 1, 30, "generation 2")
    lab.server.tell(attempt, "yield", 30.0, "preempted")
    report = lab.server.exit_of(attempt, 40)
    assert (report["left"], report["saved"], report["exit_codes"]) == ("yield", True, [75, 75]), logs(lab, attempt)


def test_the_server_may_be_away_all_the_while(lab: Any) -> None:
    attempt = train(lab, num_ranks=2)
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    first = ranks(lab, attempt)
    lab.server.stop()
    os.kill(first[0], signal.SIGKILL)
    exit_json = lab.folder(attempt) / "exit.json"
    wait_for(exit_json.exists, 60, "it goes through")
    assert json.loads(exit_json.read_text())["generations"] == 2
    lab.server.start()
    assert check_as_undisturbed(lab, attempt, 2)["generations"] == 2


def plain(lab: Any, text: str, **fields: Any) -> str:
    return str(lab.run(lab.script(text, "plain.py"), **fields))


def test_a_script_that_cannot_resume_is_not_started_again(lab: Any) -> None:
    attempt = plain(lab, "import time; print('up', flush=True)\nwhile True: time.sleep(0.01)\n")
    wait_for(lambda: "up" in lab.log(attempt))
    os.kill(ranks(lab, attempt)[0], signal.SIGKILL)
    report = lab.server.exit_of(attempt)
    assert (report["exit_codes"], report["generations"]) == ([-signal.SIGKILL], 1)


@pytest.mark.parametrize("preload", [True, False])
def test_a_command_that_can_resume_is(lab: Any, preload: bool) -> None:
    text = """
import asyncio, os, pathlib, signal
seen = pathlib.Path(os.environ["OVERNIGHT_TRIAL_DIR"], "seen")
first = not seen.exists()
seen.touch()
print(os.environ["OVERNIGHT_GENERATION"], "first" if first else "again", flush=True)
if first: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(asyncio.sleep(0.01))
print("done", flush=True)
"""
    attempt = plain(lab, text, preload=preload, resume={"signal": "USR1", "exit_code": 42})
    report = lab.server.exit_of(attempt)
    assert (report["exit_codes"], report["generations"], report["killed"]) == ([0], 2, None), lab.log(attempt)
    assert [line for line in lab.log(attempt).splitlines() if "overnight" not in line] == ["1 first", "2 again", "done"]


def spares_of(lab: Any, attempt: str) -> Callable[[], list[int]]:
    """Children of the supervisor that are no rank."""

    def look() -> list[int]:
        pids = lab.pids(attempt)
        supervisor, found = pids["supervisor"]["pid"], {one["pid"] for one in pids["ranks"].values()}
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return [int(pid) for pid in children if int(pid) not in found]

    return look


def test_a_supervisor_killed_after_a_restart_is_buried_whole(lab: Any) -> None:
    attempt = train(lab, num_ranks=2)
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    os.kill(ranks(lab, attempt)[0], signal.SIGKILL)
    ranks(lab, attempt, 2)
    wait_for(spares_of(lab, attempt), 30, "spares for the next start")
    spares = spares_of(lab, attempt)()
    os.kill(lab.pids(attempt)["supervisor"]["pid"], signal.SIGKILL)
    assert lab.server.wait_ended(attempt)["vanished"] is True
    assert lab.alive(attempt) == []
    assert [Path(f"/proc/{pid}/status").read_text() for pid in spares if is_alive(pid)] == []
    spooled = [json.loads(line) for line in (lab.folder(attempt) / "spool.jsonl").read_text().splitlines()]
    assert lab.server.events(attempt) == spooled and spooled[-1]["generation"] == 2


def test_the_daemon_may_die_and_come_back_in_the_middle(lab: Any) -> None:
    attempt = train(lab, num_ranks=2)
    wait_for(lambda: committed(lab, attempt), 60, "a checkpoint")
    lab.daemons[-1].kill()
    lab.daemons[-1].wait()
    os.kill(ranks(lab, attempt)[0], signal.SIGKILL)
    ranks(lab, attempt, 2)
    lab.daemon()
    check_as_undisturbed(lab, attempt, 2)
    assert lab.server.wait_ended(attempt)["vanished"] is False
