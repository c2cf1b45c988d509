"""Real signals at bad moments: nothing of an attempt stays alive, nothing that it said is lost or said twice."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import node_lab
import pytest
from node_lab import Lab, wait_for

from overnight.platform.node.restarts import MAX_RESTARTS

CHATTY = """
import http.client, json, os, socket, subprocess, sys, time
class Line(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect(os.environ["OVERNIGHT_SUPERVISOR"])
line = Line("localhost")
line.request("POST", "/v1/hello", json.dumps({"rank": 0, "pid": os.getpid(), "trainer": True}))
line.getresponse().read()
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
for step in range(STEPS):
    line.request("POST", "/v1/push", json.dumps({"rank": 0, "step": step, "metrics": [["loss", step, 0.5, 1.0]]}))
    line.getresponse().read()
    time.sleep(0.002)
print("DONE", flush=True)
while FOREVER: time.sleep(0.01)
"""

# Leaves a grandchild of its own session that ignores TERM, and one that hops: forks a successor every 2 ms.
# All of them end by themselves some time after the test should have: a test run that is killed must not leave them.
STUBBORN = """
import os, signal, sys, time
end = time.monotonic() + 90
def daemonize(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid() if os.getpid() != os.getsid(0) else None
            for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)
            work()
        os._exit(0)
def stay():
    while time.monotonic() < end: time.sleep(0.01)
def hop():
    while time.monotonic() < end:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.002)
        else:
            os._exit(0)
def scrub():
    os.execve("/bin/sleep", ["sleep", "91.25"], {})
for work in (stay, hop, scrub): daemonize(work)
time.sleep(0.3)
print("UP", flush=True)
MORE
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return node_lab.bare_python(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def lab(bare: str) -> Iterator[Lab]:
    with node_lab.lab(bare) as made:
        yield made


@pytest.fixture(scope="module")
def shared(bare: str) -> Iterator[Lab]:
    with node_lab.warm_lab(bare) as made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file without which no warm process of an order with the environment ``gated`` gets further than its start."""
    wait = "while time.monotonic() < end and not pathlib.Path(__file__).with_name('open').exists(): time.sleep(0.01)\n"
    (tmp_path / "sitecustomize.py").write_text(
        f"import pathlib, sys, time\nend = time.monotonic() + 120\nif 'zygote' in sys.orig_argv:\n    {wait}"
    )
    return tmp_path / "open"


def gated(lab: Lab, gate: Path) -> dict[str, str]:
    env: dict[str, str] = lab.order("train.py")["env"]
    return {**env, "PYTHONPATH": str(gate.parent)}


def chatty(lab: Lab, steps: int = 100_000, forever: bool = True, **fields: Any) -> str:
    return str(lab.run(lab.script(CHATTY.replace("STEPS", str(steps)).replace("FOREVER", str(forever))), **fields))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def check_clean(lab: Lab, attempt_id: str) -> None:
    """Nothing lives, the end was said once, the spool arrived whole."""
    assert lab.alive(attempt_id) == []
    assert [one["attempt_id"] for one in lab.server.ended].count(attempt_id) == 1
    spooled = [json.loads(line) for line in (lab.folder(attempt_id) / "spool.jsonl").read_text().splitlines()]
    assert lab.server.events(attempt_id) == spooled
    assert [event["seq"] for event in spooled] == list(range(1, len(spooled) + 1))
    assert [event["kind"] for event in spooled].count("exit") <= 1
    assert lab.server.problems == []


def kill_every_start(lab: Any, attempt_id: str) -> None:
    """Kills the rank, and the rank of each restart, until it is not started any more."""
    wait_for(lambda: lab.server.events(attempt_id, "metrics"), 30, "it trains")
    for number in range(1 + MAX_RESTARTS):
        wait_for(lambda: len(lab.server.events(attempt_id, "generation")) >= number, 30, f"restart {number}")  # noqa: B023
        os.kill(lab.pids(attempt_id)["ranks"]["0"]["pid"], signal.SIGKILL)


@pytest.mark.parametrize("victim", ["rank", "supervisor"])
def test_sigkill_of_rank_or_supervisor(shared: Lab, victim: str) -> None:
    dice = random.Random(victim)
    for _ in range(3):
        attempt_id = chatty(shared)
        pids = shared.pids(attempt_id)
        time.sleep(dice.uniform(0, 0.2))  # the moment is the test's input, not a wait for something
        if victim == "supervisor":
            os.kill(pids["supervisor"]["pid"], signal.SIGKILL)
        else:
            kill_every_start(shared, attempt_id)
        ended = shared.server.wait_ended(attempt_id)
        assert ended["vanished"] is (victim == "supervisor")
        if victim == "rank":
            report = shared.server.exit_of(attempt_id)
            assert (report["exit_codes"], report["killed"]) == ([-signal.SIGKILL], None)
            assert report["restarts"] == ["rank 0 was ended by SIGKILL"] * MAX_RESTARTS
        check_clean(shared, attempt_id)


def test_sigkill_of_the_daemon_and_its_successor(lab: Lab) -> None:
    first = lab.daemon(cold=True)
    attempt_id = chatty(lab, steps=600, forever=False)
    pids = lab.pids(attempt_id)
    wait_for(lambda: len(lab.server.events(attempt_id, "metrics")) > 2)
    first.kill()
    first.wait()
    assert is_alive(pids["ranks"]["0"]["pid"])
    lab.daemon(cold=True)
    report = lab.server.exit_of(attempt_id)
    assert report["exit_codes"] == [0] and report["killed"] is None
    assert lab.server.wait_ended(attempt_id)["vanished"] is False
    assert lab.pids(attempt_id)["supervisor"] == pids["supervisor"]
    check_clean(lab, attempt_id)


def test_sigkill_of_the_daemon_during_a_launch_costs_nothing(lab: Lab, gate: Path) -> None:
    first = lab.daemon()
    attempt_id = lab.run(lab.script("print('up')"), env=gated(lab, gate))
    # The order waits for the warm process, and so do we to strike.
    wait_for(lambda: (lab.folder(attempt_id) / "order.json").exists())
    first.kill()
    first.wait()
    assert not (lab.folder(attempt_id) / "pids.json").exists(), "struck too late"
    gate.touch()
    lab.daemon(cold=True)
    assert lab.server.exit_of(attempt_id, 60)["exit_codes"] == [0]
    assert lab.server.wait_ended(attempt_id)["vanished"] is False
    assert len(lab.server.events(attempt_id, "started")) == 1
    check_clean(lab, attempt_id)


def test_a_launch_taken_back_cannot_happen_and_one_that_happened_is_not_taken_back(tmp_path: Path) -> None:
    from overnight.platform.node import launch_lock
    from overnight.platform.node.held import take_back_launch

    assert not take_back_launch(tmp_path / "gone")
    late = launch_lock.stamp(tmp_path).token
    assert late and take_back_launch(tmp_path)
    assert launch_lock.hold(tmp_path, late) is None
    token = launch_lock.stamp(tmp_path).token
    assert token is not None
    lock = launch_lock.hold(tmp_path, token)
    assert lock is not None
    launch_lock.mark_held(lock, token)
    assert not take_back_launch(tmp_path)
    (tmp_path / launch_lock.PIDS).write_text("{}")
    os.close(lock)
    assert not take_back_launch(tmp_path)


def test_sigkill_of_daemon_and_supervisor_together(lab: Lab) -> None:
    first = lab.daemon(cold=True)
    attempt_id = chatty(lab)
    pids = lab.pids(attempt_id)
    wait_for(lambda: lab.server.events(attempt_id, "metrics"))
    first.kill()
    os.kill(pids["supervisor"]["pid"], signal.SIGKILL)
    first.wait()
    lab.daemon(cold=True)
    assert lab.server.wait_ended(attempt_id, 60) == {
        "attempt_id": attempt_id, "vanished": True, "cause": "its supervisor was killed",
    }  # fmt: skip
    check_clean(lab, attempt_id)


def test_sigkill_of_the_zygote_at_random(lab: Lab) -> None:
    lab.daemon()
    lab.script("print('ready')", "warmup.py")
    lab.server.exit_of(lab.run("warmup.py"), 60)
    dice = random.Random(5)
    for _ in range(2):
        warm = zygotes(lab)  # before the launch: a supervisor whose zygote is gone looks just like one
        attempt_id = chatty(lab, steps=50, forever=False)
        time.sleep(dice.uniform(0, 0.04))  # again the test's input
        for pid in warm:
            os.kill(pid, signal.SIGKILL)
        assert lab.server.exit_of(attempt_id, 60)["exit_codes"] == [0], lab.log(attempt_id)
        lab.server.wait_ended(attempt_id)
        assert len(lab.server.events(attempt_id, "started")) == 1
        check_clean(lab, attempt_id)


def test_a_warm_process_for_which_many_wait_fails_once(lab: Lab, gate: Path) -> None:
    lab.daemon()
    env = gated(lab, gate)
    waiting = [lab.run(lab.script("print('up')", "waiting.py"), env=env) for _ in range(5)]
    wait_for(lambda: all((lab.folder(attempt_id) / "order.json").exists() for attempt_id in waiting))

    def all_ended_under_fire() -> bool:
        for pid in zygotes(lab):
            os.kill(pid, signal.SIGKILL)
        return all(lab.server.events(attempt_id, "exit") for attempt_id in waiting)

    wait_for(all_ended_under_fire, 120)
    for attempt_id in waiting:
        assert lab.server.exit_of(attempt_id)["exit_codes"] == [0], lab.log(attempt_id)
        assert lab.server.events(attempt_id, "started")[0]["data"]["warm"] is False, "nobody waited for it"
    gate.touch()
    later = lab.run(lab.script("print('up')", "later.py"), env=env)
    assert lab.server.exit_of(later, 60)["exit_codes"] == [0]
    assert lab.server.events(later, "started")[0]["data"]["warm"] is True


def zygotes(lab: Lab) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "cmdline").exists():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"zygote" in words and parent in [daemon.pid for daemon in lab.daemons]:
                found.append(int(entry.name))
    return found


STAGING = """
import os, pathlib, signal
staging = pathlib.Path(os.environ["OVERNIGHT_TRIAL_DIR"], "staging")
for name in ("step-9.attempt-1.1.rank-0", "step-9.attempt-1.2.rank-0", "step-9.attempt-1.1.rank-7",
             "step-9.attempt-2.1.rank-0"):
    (staging / name).mkdir(parents=True)
    (staging / name / "__0_0.distcp").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_attempt_was_sending_to_a_store_goes_and_nothing_else(shared: Lab) -> None:
    attempt = shared.run(shared.script(STAGING, "staging.py"))
    shared.server.wait_ended(attempt)
    staging = shared.folder(attempt).parent.parent / "staging"
    left = {"step-9.attempt-1.1.rank-7", "step-9.attempt-2.1.rank-0"}
    assert {staged.name for staged in staging.iterdir()} == left, "of other nodes' ranks and of other attempts"


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_stubborn_grandchildren_do_not_survive(shared: Lab, end: str) -> None:
    more = "sys.exit(3)" if end == "exit" else "while True: time.sleep(0.01)"
    attempt_id = shared.run(shared.script(STUBBORN.replace("MORE", more)))
    pids = shared.pids(attempt_id)
    if end == "killed":
        wait_for(lambda: "UP" in shared.log(attempt_id))
        os.kill(pids["supervisor"]["pid"], signal.SIGKILL)
    shared.server.wait_ended(attempt_id)
    check_clean(shared, attempt_id)
    sleepers = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _cmdline(p) == b"sleep\x0091.25\x00"]
    assert sleepers == []


def _cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_one_that_ignores_every_signal_is_killed_after_the_grace(shared: Lab) -> None:
    attempt_id = shared.run(
        shared.script(
            "import signal, time\nfor n in (signal.SIGTERM, signal.SIGINT): signal.signal(n, signal.SIG_IGN)\n"
            "print('up', flush=True)\nwhile True: time.sleep(0.01)\n"
        )
    )
    wait_for(lambda: "up" in shared.log(attempt_id))
    shared.server.tell(attempt_id, "yield", 0.2, "preempted")
    report = shared.server.exit_of(attempt_id, 30)
    assert (report["exit_codes"], report["killed"], report["left"]) == ([-signal.SIGKILL], "grace", None)
    shared.server.wait_ended(attempt_id)
    check_clean(shared, attempt_id)


def test_the_daemons_kill_is_at_once(shared: Lab) -> None:
    attempt_id = chatty(shared)
    shared.pids(attempt_id)
    wait_for(lambda: shared.server.events(attempt_id, "metrics"))
    shared.server.kill.add(attempt_id)
    shared.server.version += 1
    assert shared.server.wait_ended(attempt_id, 5)
    assert shared.server.exit_of(attempt_id)["killed"] == "killed"
    check_clean(shared, attempt_id)


def test_what_the_server_does_not_know_is_stopped_and_what_the_node_does_not_know_is_ended(shared: Lab) -> None:
    attempt_id = chatty(shared)
    shared.pids(attempt_id)
    wait_for(lambda: shared.server.events(attempt_id, "metrics"))
    shared.server.keep.discard(attempt_id)
    shared.server.version += 1
    shared.server.wait_ended(attempt_id, 5)
    check_clean(shared, attempt_id)
    shared.server.kill.add("att-never-here")
    shared.server.version += 1
    shared.server.wait_ended("att-never-here", 5)


def test_the_server_may_be_away_and_move(shared: Lab) -> None:
    attempt_id = chatty(shared, steps=400, forever=False)
    wait_for(lambda: shared.server.events(attempt_id, "metrics"))
    shared.server.stop(forget_address=True)
    wait_for(lambda: "DONE" in shared.log(attempt_id))
    wait_for(lambda: (shared.folder(attempt_id) / "exit.json").exists())
    shared.server.start()
    assert shared.server.exit_of(attempt_id)["exit_codes"] == [0]
    shared.server.wait_ended(attempt_id)
    assert len([row for e in shared.server.events(attempt_id, "metrics") for row in e["data"]["rows"]]) == 400
    check_clean(shared, attempt_id)


def test_double_orders_and_racing_daemons_launch_once(lab: Lab) -> None:
    racing = [lab.daemon(cold=True) for _ in range(4)]
    order = lab.order(lab.script("import os; open(os.environ['OVERNIGHT_TRIAL_DIR'] + '/ran', 'a').write('x')"))
    lab.server.order(order)
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            lab.server.launches[order["attempt_id"]] = order
            lab.server.version += 1
            stop.wait(0.003)

    noise = threading.Thread(target=again)
    noise.start()
    try:
        lab.server.exit_of(order["attempt_id"], 60)
        wait_for(lambda: lab.server.ended)
    finally:
        stop.set()
        noise.join()
    assert (Path(order["trial_dir"]) / "ran").read_text() == "x"
    assert len(lab.server.events(order["attempt_id"], "started")) == 1
    wait_for(lambda: sum(daemon.poll() is None for daemon in racing) == 1)
    assert {daemon.wait(5) for daemon in racing if daemon.poll() is not None} == {3}


def test_a_flood_of_output_stays_bounded(shared: Lab) -> None:
    attempt_id = shared.run(
        shared.script(
            "import os\nprint('FIRST', flush=True)\nblock = (b'y' * 79 + b'\\n') * 13000\n"
            "for _ in range(200): os.write(1, block)\nprint('LAST', flush=True)\n"
        )
    )
    largest = 0
    path = shared.folder(attempt_id) / "out.log"

    def ended() -> bool:
        nonlocal largest
        largest = max(largest, path.stat().st_blocks * 512 if path.exists() else 0)
        return bool(shared.server.events(attempt_id, "exit"))

    wait_for(ended, 120)
    report = shared.server.exit_of(attempt_id)
    assert path.stat().st_size > 200_000_000
    assert path.stat().st_blocks * 512 < 20 * 1024 * 1024
    assert report["last_lines"][-1] == "LAST"
    with path.open() as file:
        assert file.readline() == "FIRST\n"


def test_one_line_of_100_mb_is_bounded_and_usable(shared: Lab) -> None:
    objective = {"metric": "val", "mode": "min", "reduce": "best", "source": "json", "pattern": None, "evaluator": None}
    attempt_id = shared.run(
        shared.script(
            "import os\nfor _ in range(100): os.write(1, b'z' * 1_000_000)\nos.write(1, b'\\n')\n"
            'print(\'{"val": 0.5, "step": 1}\')\nraise SystemExit(3)\n'
        ),
        objective=objective,
    )
    report = shared.server.exit_of(attempt_id)
    assert report["exit_codes"] == [3]
    assert shared.server.events(attempt_id, "report")[0]["data"]["values"] == {"val": 0.5}
    assert max(map(len, report["last_lines"])) < 10_000
    shared.server.wait_ended(attempt_id)
    check_clean(shared, attempt_id)


def test_a_spool_that_cannot_be_written_ends_the_attempt_with_that_cause(lab: Lab) -> None:
    lab.daemon(cold=True)
    attempt_id = chatty(lab)
    pids = lab.pids(attempt_id)
    wait_for(lambda: lab.server.events(attempt_id, "metrics"), 60)
    import resource

    # A file size limit is the disk that is full for this one process.
    size = (lab.folder(attempt_id) / "spool.jsonl").stat().st_size
    resource.prlimit(pids["supervisor"]["pid"], resource.RLIMIT_FSIZE, (size, size))
    lab.server.wait_ended(attempt_id)
    assert "spool cannot be written" in (lab.folder(attempt_id) / "supervisor.log").read_text()
    assert lab.alive(attempt_id) == []


def test_stop_yields_the_workers_and_leaves(lab: Lab) -> None:
    daemon = lab.daemon(cold=True)
    attempt_id = chatty(lab, grace_seconds=0.3)
    wait_for(lambda: lab.server.events(attempt_id, "metrics"), 60)
    from overnight.platform.node.client import ask, find_daemon

    assert find_daemon(lab.home) is not None
    assert ask(lab.home, {"op": "ping"})["attempts"] == [attempt_id]
    ask(lab.home, {"op": "stop"})
    report = lab.server.exit_of(attempt_id)
    assert report["directive"]["action"] == "yield" and report["directive"]["reason"] == "shutdown"
    assert daemon.wait(15) == 0
    lab.server.wait_ended(attempt_id)
    assert lab.alive(attempt_id) == [] and find_daemon(lab.home) is None


def test_the_daemon_leaves_when_its_home_is_gone_or_nobody_needs_it(lab: Lab) -> None:
    daemon = lab.daemon(cold=True)
    attempt_id = chatty(lab)
    pids = lab.pids(attempt_id)
    wait_for(lambda: lab.server.events(attempt_id, "metrics"), 60)
    moved = lab.root.with_name(lab.root.name + "-moved")
    lab.root.rename(moved)
    try:
        assert daemon.wait(30) == 0
        assert not is_alive(pids["supervisor"]["pid"]) and not is_alive(pids["ranks"]["0"]["pid"])
        assert lab.alive(attempt_id) == []
    finally:
        moved.rename(lab.root)
    lab.server.stop(forget_address=True)
    assert lab.daemon(cold=True, idle_seconds="1").wait(20) == 0


def test_spawning_twice_gives_one_daemon_of_its_own_session(lab: Lab) -> None:
    from overnight.core.settings import Settings
    from overnight.platform.node.client import ask, find_daemon, spawn_daemon

    settings = Settings(home=lab.root, pool="fake:2")
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(spawn_daemon(settings))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({identity.pid for identity in found}) == 1
    pid = found[0].pid
    assert os.getsid(pid) == pid
    wait_for(lambda: lab.server.hellos)
    assert [device["kind"] for device in lab.server.hellos[0]["devices"]] == ["fake", "fake"]
    ask(lab.home, {"op": "stop"})
    wait_for(lambda: find_daemon(lab.home) is None)


def test_a_daemon_that_cannot_start_says_why(lab: Lab) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overnight.platform.node", "--home", str(lab.root), "--pool", "cpu:none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "cpu:none" in done.stderr and "Traceback" not in done.stderr
