"""Attempts that are cut off and come back: nothing that they then say counts, and their devices wait for their end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from house_lab import STEPS_PER_EPOCH, House, running_house, wait_for

from overnight.core.enums import DeviceState, LeaseState, Outcome, TrialState
from overnight.core.models.api import Trial
from overnight.platform.identity import Holder as Announced

pytestmark = pytest.mark.timeout(400)  # deadlines are inside; a busy machine must not matter
LONG = {"epochs": 9, "every": 6}
NUM_LONG_STEPS = 9 * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    with running_house(folder, "fake:2", lease_seconds=3, heartbeat_seconds=0.3) as made:
        made.completed([made.submit("plain.py", {"steps": 1}, objective=None)])  # everything is warm from now on
        yield made
        made.check_leases()


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """SIGSTOP, and at the end SIGCONT to those that are still there."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)


def gone(pids: dict[str, Any]) -> bool:
    return not any(one.alive() for one in (pids["supervisor"], *pids["ranks"]))


def post_as(house: House, trial: Trial, kind: str, data: dict[str, Any]) -> httpx.Response:
    """What the first attempt's supervisor would say now, said by us: its next event."""
    found = Announced.parse(house.home.server_file.read_bytes())
    assert found is not None
    event = {"seq": 1_000_000, "kind": kind, "generation": 1, "at": time.time(), "data": data}
    body = {"counter": 1_000_000, "generation": 1, "events": [event]}
    return httpx.post(
        f"{found.facts['url']}/v1/attempts/{trial.attempts[0].id}/spool",
        json=body, headers={"Authorization": f"Bearer {house.home.token_file.read_text().strip()}"}, trust_env=False,
    )  # fmt: skip


def check_refused(house: House, trial: Trial) -> None:
    """The first attempt can report nothing, and finish nothing."""
    row = ["loss", 1_000, 5.0, time.time()]
    for kind, data in (
        ("metrics", {"rows": [row]}),
        ("report", {"step": 1_000, "values": {"score": 1e9}}),
        ("checkpoint", {"step": 1_000, "uri": "x", "bytes": 1}),
        ("exit", {"exit_codes": [0], "seconds": 1.0}),
    ):
        answer = post_as(house, trial, kind, data)
        assert answer.status_code == 409, f"{kind}: {answer.text}"
        assert answer.json()["error"]["code"] == "stale_attempt"


def test_a_stopped_supervisor_loses_its_trial_and_ends_when_it_comes_back(house: House) -> None:
    trial_id = house.submit(params=LONG, seed=1)
    first = house.until_saved(trial_id)
    pids = house.pids(first)
    with stopped(pids["supervisor"].pid):
        again = house.until(trial_id, lambda t: t.attempts_made == 2 and t.state is TrialState.RUNNING, "it moved")
        lost, present = again.attempts
        assert (lost.outcome, lost.lease_state) == (Outcome.VANISHED, LeaseState.RELEASING), house.story(again)
        assert not gone(pids), "the test proves nothing: the zombie is dead already"
        assert set(lost.devices).isdisjoint(present.devices)
        waiting = house.submit("plain.py", {"steps": 2}, objective=None)
        assert house.trial(waiting).state is TrialState.QUEUED, "the only other device is not clean"
        check_refused(house, again)
    wait_for(lambda: gone(pids), "supervisor and rank are gone", 60)
    house.completed([waiting])
    house.check_as_undisturbed([trial_id], NUM_LONG_STEPS)


def test_a_node_and_a_supervisor_that_were_cut_off_start_clean(house: House) -> None:
    trial_id = house.submit(params=LONG, seed=2)
    first = house.until_saved(trial_id)
    pids, daemon = house.pids(first), house.pid("node")
    assert daemon is not None
    with stopped(daemon):
        with stopped(pids["supervisor"].pid):
            lost = house.until(trial_id, lambda t: t.state is TrialState.QUEUED, "its lease has expired")
            assert lost.attempts[0].outcome is Outcome.VANISHED, house.story(lost)
            wait_for(lambda: all(d.state is DeviceState.LOST for d in house.client.devices()), "the devices are lost")
            check_refused(house, lost)
        # Nobody tells the supervisor but the server, which calls it stale.
        wait_for(lambda: gone(pids), "supervisor and rank have ended by themselves", 60)
        unclean = house.trial(trial_id)
        assert unclean.state is TrialState.QUEUED
        assert unclean.attempts[0].lease_state is LeaseState.RELEASING, "only its node can say that it is clean"
    house.check_as_undisturbed([trial_id], NUM_LONG_STEPS)


def test_a_stopped_server_costs_nobody_a_lease(house: House) -> None:
    trial_id = house.submit(params=LONG, seed=3)
    house.until_saved(trial_id)
    server = house.pid("server")
    assert server is not None
    with stopped(server):
        time.sleep(1.5 * house.settings.lease_seconds)  # the length of the stop is the test's input
    (trial,) = house.completed([trial_id])
    assert trial.attempts_made == 1, house.story(trial)
    house.check_training(trial, NUM_LONG_STEPS)
