"""The janitor of a real server: what it deletes, when it must not, and that it ends with the server."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from place_lab import begin, lay, steps
from waiting import wait_for

from overnight.testing.server import RunningServer, ScriptedNode
from overnight.trainer.checkpoint.pins import pin
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.retention import Retention

T = TypeVar("T")
KEEP_ONE = Retention(keep=1).to_json()


class Lab:
    """A server, its scripted node, and trials with places."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.node = ScriptedNode(server.client)
        self.number = 0

    @property
    def client(self) -> httpx.Client:
        """A client of the server, wherever that listens by now."""
        return self.server.client

    def go_on(self) -> None:
        """Has a server that knows the node, whatever the test before did to it."""
        assert self.server.process is not None
        if self.server.process.poll() is not None:
            self.server.start()
        self.node.client = self.client
        self.node.hello()

    def submit(self, experiment: str = "digits", **config: Any) -> str:
        """Queues a trial; its id."""
        self.number += 1
        body = {
            "config": {"experiment": experiment, "run": {"kind": "script", "target": "train.py"}, **config},
            "params": {"number": self.number},
        }
        response = self.client.post("/v1/proposals", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["trials"][0]["id"])

    def begin(self, trial_id: str) -> str:
        """Waits until the trial is launched; the attempt's id."""

        def look() -> str | None:
            found = [one for one in self.node.work()["launches"] if one["trial_id"] == trial_id]
            return found[0]["attempt_id"] if found else None

        attempt_id = wait_for(look, "the launch")
        self.node.start(attempt_id)
        return attempt_id

    def ran(self, fill: Callable[[LocalPlace], object], **config: Any) -> str:
        """A trial that has run and left what ``fill`` makes; its id."""
        trial_id = self.submit(**config)
        attempt_id = self.begin(trial_id)
        fill(self.place(trial_id))
        self.node.exit(attempt_id)
        return trial_id

    def place(self, trial_id: str) -> LocalPlace:
        return LocalPlace(self.server.home.checkpoints(trial_id))

    def deletions(self, trial_id: str) -> list[dict[str, Any]]:
        """The trial's record, oldest first."""
        items = self.client.get("/v1/events", params={"limit": "1000", "trial": trial_id}).json()["items"]
        return [item for item in items if item["kind"] == "checkpoint.deleted"]

    def prune(self, trial_id: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/v1/trials/{trial_id}/checkpoints/prune", json=body, timeout=60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    home = tmp_path_factory.mktemp("janitor") / "home"
    with RunningServer(home, OVERNIGHT_LEASE_SECONDS="300", OVERNIGHT_JANITOR_SECONDS="0.3") as server:
        yield Lab(server)


@pytest.fixture
def lab(shared: Lab) -> Lab:
    """The lab of all tests, in which none leaves an attempt at work."""
    shared.go_on()
    return shared


def forked(place: LocalPlace) -> None:
    """Attempt 1 reached step 40; attempt 2 went on from step 20."""
    begin(place, Token(1))
    for step in (10, 20, 30, 40):
        lay(place, step)
    begin(place, Token(2), CheckpointName(20, Token(1)))
    lay(place, 25, Token(2))


def test_it_waits_for_the_lease_and_records_every_deletion(lab: Lab) -> None:
    running = lab.submit()
    attempt_id = lab.begin(running)
    forked(lab.place(running))
    witness = lab.ran(forked)
    wait_for(lambda: len(steps(lab.place(witness))) == 3, "the place of a trial that is over is tidied")
    assert len(steps(lab.place(running))) == 5, "nothing goes while the trial is live"
    lab.node.exit(attempt_id, ended=False)
    wait_for(lambda: lab.client.get(f"/v1/trials/{running}").json()["state"] == "completed", "the trial is over")
    other = lab.ran(forked)
    wait_for(lambda: len(steps(lab.place(other))) == 3, "another trial is tidied")
    assert len(steps(lab.place(running))) == 5, "nothing goes before the lease is clean"
    lab.node.report(ended=[{"attempt_id": attempt_id}])
    wait_for(lambda: len(lab.deletions(running)) == 2, "its place is tidied")
    assert steps(lab.place(running)) == [(1, 10), (1, 20), (2, 25)]
    for event, step in zip(lab.deletions(running), (30, 40), strict=True):
        assert event["actor"] == "janitor" and "hidden" in event["cause"]
        assert event["data"]["entry"] == f"step-{step}.attempt-1.1" and event["data"]["bytes"] > 0


def test_a_server_that_starts_tidies_what_was_left(lab: Lab) -> None:
    trial_id = lab.ran(lambda place: None)
    wait_for(lambda: lab.client.get(f"/v1/trials/{trial_id}").json()["attempts"][0]["ended_at"], "it is over")
    lab.server.stop()
    forked(lab.place(trial_id))
    (lab.place(trial_id).root / ".trash-step-1.attempt-1.1-00").mkdir()
    lab.server.start()
    wait_for(lambda: len(steps(lab.place(trial_id))) == 3, "the place is tidied")
    wait_for(lambda: not [e for e in lab.place(trial_id).entries() if e.startswith(".trash")], "the trash is empty")


def sweepers(server_pid: int) -> list[int]:
    """Children of the server that sweep."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            is_one = parent == server_pid and b"checkpoint.sweeper" in (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if is_one:
            found.append(int(stat.parent.name))
    return found


def test_it_ends_with_the_server_even_if_that_is_killed(lab: Lab) -> None:
    lab.ran(forked)
    assert lab.server.process is not None
    server_pid = lab.server.process.pid
    [pid] = wait_for(lambda: sweepers(server_pid), "the sweeper runs")
    os.kill(server_pid, signal.SIGKILL)
    lab.server.process.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), "the sweeper is gone")


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_sweeper_that_is_killed_costs_nothing(lab: Lab) -> None:
    lab.ran(forked)
    assert lab.server.process is not None
    server_pid = lab.server.process.pid
    [pid] = wait_for(lambda: sweepers(server_pid), "the sweeper runs")
    os.kill(pid, signal.SIGKILL)
    trial_id = lab.ran(forked)
    wait_for(lambda: len(steps(lab.place(trial_id))) == 3, "the next one tidies")


def test_what_is_pinned_goes_when_it_is_no_longer(lab: Lab) -> None:
    trial_id = lab.submit()
    attempt_id = lab.begin(trial_id)
    place = lab.place(trial_id)
    forked(place)
    with pin(place, CheckpointName(40, Token(1)), "evaluation"):
        lab.node.exit(attempt_id)
        wait_for(lambda: (1, 30) not in steps(place), "the place is tidied")
        rows = lab.client.get(f"/v1/trials/{trial_id}/checkpoints").json()["items"]
        assert [(row["step"], row["role"], row["pinned_by"]) for row in rows] == [
            (10, "lineage", ""), (20, "lineage", ""), (40, "hidden", "evaluation"), (25, "newest", ""),
        ]  # fmt: skip
    wait_for(lambda: (1, 40) not in steps(place), "what was pinned goes")


def test_a_quota_takes_the_oldest_but_neither_the_best_nor_the_last_good_of_a_trial(lab: Lab) -> None:
    best = Retention(keep=9, best=("loss", "min", 1)).to_json()

    def fill(place: LocalPlace) -> None:
        begin(place, Token(1))
        for number, loss in enumerate((0.5, 0.1, 0.7), 1):
            lay(place, number, num_bytes=30_000, metrics={"loss": loss}, retention=best)

    def ran(quota_bytes: int, fill: Callable[[LocalPlace], object] = fill) -> str:
        return lab.ran(fill, experiment="quota", checkpoint_quota_bytes=quota_bytes)

    first, second = ran(140_000), ran(140_000)
    deletions = lambda: lab.deletions(first) + lab.deletions(second)  # noqa: E731
    wait_for(lambda: len(deletions()) == 2, "the quota holds")
    assert steps(lab.place(first)) == [(1, 2), (1, 3)]
    assert steps(lab.place(second)) == [(1, 2), (1, 3)]
    assert "quota is 140 kB" in deletions()[0]["cause"]
    third = ran(1)
    wait_for(
        lambda: all(steps(lab.place(trial_id)) == [(1, 3)] for trial_id in (first, second, third)),
        "only the last good one of each trial is left",
    )
    kinds = lambda: [e["kind"] for e in lab.client.get("/v1/events?limit=1000").json()["items"]]  # noqa: E731
    wait_for(lambda: "experiment.over_quota" in kinds(), "it is told that the quota cannot hold")
    ran(10**9, lambda place: None)
    wait_for(lambda: "experiment.within_quota" in kinds(), "it is told that it holds again")
    assert kinds().count("experiment.over_quota") == 1


def test_rows_agree_with_the_files_of_live_and_of_resting_trials(lab: Lab) -> None:
    trial_id = lab.submit()
    attempt_id = lab.begin(trial_id)
    place = lab.place(trial_id)
    begin(place, Token(1))

    def commit(step: int) -> None:
        name = lay(place, step)
        lab.node.spool(attempt_id, ("checkpoint", {"step": step, "uri": f"{place}/{name}", "bytes": 1}))

    def shown() -> list[int]:
        return [one["step"] for one in lab.client.get(f"/v1/trials/{trial_id}").json()["checkpoints"]]

    for step in (10, 20, 30):
        commit(step)
    assert shown() == [10, 20, 30]
    place.remove("step-10.attempt-1.1")  # the run's own retention, after its commit
    wait_for(lambda: shown() == [20, 30], "a live trial's rows follow its place soon after a commit")
    place.remove("step-20.attempt-1.1")
    listed = lab.client.get(f"/v1/trials/{trial_id}/checkpoints").json()["items"]
    assert [row["step"] for row in listed] == shown() == [30], "who lists sees what is there, and so does everybody"
    commit(40)
    commit(50)
    lab.node.exit(attempt_id)
    wait_for(lambda: ok(lab.prune(trial_id, entries=["step-40.attempt-1.1"])), "the lease is clean")
    assert shown() == [30, 50]
    begin(place, Token(2), CheckpointName(30, Token(1)))
    lay(place, 35, Token(2))
    assert ok(lab.prune(trial_id)) is not None
    assert shown() == [30] and steps(place) == [(1, 30), (2, 35)], "nobody has told the server of the one at 35"
    assert [event["data"]["entry"] for event in lab.deletions(trial_id)][-1] == "step-50.attempt-1.1"


def test_pruning_through_the_api(lab: Lab) -> None:
    running = lab.submit()
    attempt_id = lab.begin(running)
    place = lab.place(running)
    begin(place, Token(1))
    for step in (10, 20, 30):
        lay(place, step)
    refused = lab.prune(running)
    assert refused.status_code == 409 and "at work" in refused.text
    lab.node.exit(attempt_id)
    rehearsed = wait_for(lambda: ok(lab.prune(running, keep=1, dry_run=True)), "the lease is clean")
    assert [d["entry"] for d in rehearsed["deleted"]] == ["step-10.attempt-1.1", "step-20.attempt-1.1"]
    assert len(steps(place)) == 3 and lab.deletions(running) == []
    assert lab.prune(running, entries=["step-30.attempt-1.1"]).status_code == 409
    assert lab.prune(running, entries=["step-99.attempt-1.1"]).status_code == 404
    assert lab.prune(running, entries=["../../x"]).status_code == 404
    assert lab.prune(running, keep=0).status_code == 422
    assert lab.prune("nothing-1").status_code == 404
    done = lab.prune(running, entries=["step-10.attempt-1.1"], reason="not needed")
    assert done.status_code == 200, done.text
    assert steps(place) == [(1, 20), (1, 30)]
    [event] = lab.deletions(running)
    assert event["cause"] == "not needed" and event["actor"] != "janitor"


def ok(response: httpx.Response) -> dict[str, Any] | None:
    return json.loads(response.text) if response.status_code == 200 else None


def test_a_trial_that_never_ran_has_an_empty_place(lab: Lab) -> None:
    attempt_id = lab.begin(lab.submit(compute={"gpus": 4}))
    other = lab.submit()
    answer = lab.client.get(f"/v1/trials/{other}/checkpoints").json()
    assert answer["items"] == [] and answer["place"].endswith(f"{other}/checkpoints")
    assert ok(lab.prune(other)) == {"place": answer["place"], "dry_run": False, "deleted": []}
    assert ok(lab.client.post(f"/v1/trials/{other}/cancel", json={}))
    lab.node.exit(attempt_id)
