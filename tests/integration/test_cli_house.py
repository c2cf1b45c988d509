"""The command line and the client against a real house: `up`, a node, real processes, a server that is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from overnight import Client
from overnight.agents.connect import read_identity
from overnight.core.enums import TrialState
from overnight.core.errors import HomeHeldError, NotFoundError, from_dict
from overnight.core.settings import Settings

SCRIPT = """
import argparse, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()
print("lr is", args.lr, flush=True)
print("\\x1b]0;owned\\x07[/bold] acc=%.3f" % args.lr, flush=True)
if args.fail:
    raise ValueError("on [purpose]")
"""

SPEC = """
experiment: search
run: python train.py
objective: {metric: acc, mode: max, source: pattern, pattern: 'acc=([0-9.]+)'}
sweep:
  planner: random
  trials: 3
  parallel: 2
  params: {lr: {range: [0.1, 0.9]}}
"""


class House:
    """A home with a running ``overnight up``, and the command line in it."""

    def __init__(self, root):
        self.root = root
        self.settings = Settings(home=root / "home", pool="cpu:2")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
        more = {"OVERNIGHT_HOME": str(root / "home"), "OVERNIGHT_POOL": "cpu:2", "OVERNIGHT_GRACE_SECONDS": "5"}
        self.env = clean | more
        (root / "code").mkdir()
        (root / "code" / "train.py").write_text(SCRIPT)
        (root / "code" / "search.yaml").write_text(SPEC)

    def cli(self, *words, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "overnight", *words],
            cwd=self.root / "code", env=self.env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback (most recent call last)" not in done.stderr
        return done

    def json(self, *words, code=0):
        """The data of a command's envelope, or its error."""
        envelope = json.loads(self.cli(*words, "-o", "json", code=code).stdout)
        assert envelope["v"] == 1
        return envelope.get("data", envelope.get("error"))


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    made = House(tmp_path_factory.mktemp("house"))
    made.cli("up", "-d")
    yield made
    made.cli("down")
    assert made.cli("status", code=3).stderr.count("overnight up") == 1


def submitted(house, *words):
    return json.loads(house.cli("submit", "-o", "json", *words).stdout)["data"]["trials"][0]["name"]


@pytest.mark.timeout(150)
def test_a_trial_from_submit_to_its_log(house):
    done = house.cli("submit", "--follow", "train.py", "--lr", "3e-1")
    assert "lr is 0.3\n" in done.stdout
    assert "\x1b" not in done.stdout
    assert "[/bold] acc=0.300" in done.stdout
    name = done.stdout.split()[0]
    trial = house.json("show", name)
    assert trial["state"] == "completed"
    assert trial["params"] == {"lr": 0.3}
    assert house.json("logs", "-n", "1", name)["text"].endswith("acc=0.300\n")
    assert name in house.cli("ls").stdout
    assert house.json("wait", name)[0]["name"] == name


@pytest.mark.timeout(150)
def test_a_trial_that_raises_shows_why(house):
    done = house.cli("submit", "--wait", "train.py", "--lr", "1", "--", "--fail", code=1)
    name = done.stdout.split()[0]
    page = house.cli("show", name).stdout
    assert "ValueError: on [purpose]" in page
    assert "lr is 1.0" in page
    assert page.count("Traceback (most recent call last)") == 1
    assert "failed" in house.cli("wait", name, code=1).stdout


@pytest.mark.timeout(150)
def test_a_program_that_knows_nothing_of_overnight(house):
    program = house.root / "code" / "anything"
    program.write_text('#!/bin/sh\necho "words: $*"\n')
    program.chmod(0o755)
    done = house.cli("submit", "--follow", "--", "./anything", "--flag", "--gpus", "7")
    assert "words: --flag --gpus 7\n" in done.stdout
    assert house.json("show", done.stdout.split()[0])["config"]["run"]["kind"] == "command"


@pytest.mark.timeout(150)
def test_what_runs_is_what_was_submitted(house):
    source = house.root / "code" / "late.py"
    source.write_text("print('as submitted')")
    name = submitted(house, "--hold", "late.py")
    source.write_text("print('changed afterwards')")
    house.cli("unhold", name)
    house.cli("wait", name)
    assert house.cli("logs", name).stdout == "as submitted\n"


def test_the_same_key_is_the_same_trial_and_another_body_is_refused(house):
    first = submitted(house, "--hold", "--key", "once", "train.py", "--lr", "0.5")
    assert submitted(house, "--hold", "--key", "once", "train.py", "--lr", "0.5") == first
    house.cli("submit", "--hold", "--key", "once", "train.py", "--lr", "0.6", code=6)
    again = house.cli("submit", "train.py", "--lr", "0.5")
    assert f"{first}: the same work was submitted before" in again.stdout
    assert house.cli("cancel", "--dry-run", first).stdout == f"would cancel {first}, which is held\n"
    assert house.json("hold", "--dry-run", first)["state"] == "held", "a dry run says what the command would"
    assert house.json("cancel", first)["state"] == "cancelled"
    assert house.json("cancel", "--dry-run", first)["state"] == "cancelled"
    assert house.json("unhold", "--dry-run", first, code=6)["code"] == "illegal_transition"


def test_unknown_names_and_impossible_sizes(house):
    for words in (["show"], ["why"], ["logs"], ["cancel"], ["report"], ["wait"]):
        assert house.json(*words, "nope-1", code=4)["code"] == "not_found"
    assert house.cli("submit", "--gpus", "64", "train.py", "--lr", "1", code=2).stderr.startswith("error: ")
    house.cli("devices", "drain", "nope", "--reason", "x", code=4)


@pytest.mark.timeout(150)
def test_a_sweep_is_watched_to_its_end(house):
    sweep = house.json("sweep", "search.yaml")
    assert sweep["state"] == "finished"
    assert sweep["trials_by_state"] == {"completed": 3}
    report = house.json("report", "search")
    values = [row["value"] for row in report["leaderboard"]["rows"]]
    assert values == sorted(values, reverse=True)
    assert len(values) == 3
    assert report["pointers"]["mlflow_uri"].startswith("sqlite:")
    assert "mlflow ui" in house.cli("report", "search").stdout


def test_a_second_up_says_who_holds_the_home(house):
    for words in (["up"], ["up", "-d"]):
        done = house.cli(*words, code=6)
        assert "is held by another" in done.stderr
        assert "overnight down" in done.stderr


def test_database_token_and_doctor(house, tmp_path):
    assert house.json("db", "check")["problems"] == []
    assert house.json("db", "info")["rows"]["experiments"] >= 1
    assert house.json("db", "backup", str(tmp_path / "copy.db"))["bytes"] > 0
    house.cli("db", "backup", str(tmp_path / "copy.db"), code=2)
    path = house.cli("token").stdout.strip()
    with open(path) as file:  # noqa: PTH123
        secret = file.read().strip()
    for words in (["token"], ["status"], ["doctor"], ["status", "-o", "json"]):
        assert secret not in house.cli(*words).stdout
    assert all(finding["level"] in ("ok", "warning") for finding in house.json("doctor"))


@pytest.mark.timeout(150)
def test_the_client_outlives_a_killed_server(house):
    with Client(house.settings) as client:
        before = client.health()["pid"]
        seen = iter(client.events())
        first = next(seen)
        os.kill(before, signal.SIGKILL)
        assert client.status().pid != before
        assert client.address.url == read_identity(house.settings.paths.server_file)["url"]
        name = submitted(house, "train.py", "--lr", "0.25")
        assert client.wait(name, timeout=60)[0].state is TrialState.COMPLETED
        deadline = time.monotonic() + 30
        last = first.seq
        for event in seen:
            assert event.seq == last + 1, "an event was lost or repeated over the restart"
            last = event.seq
            if event.after == "completed" and event.trial_id == client.trial(name).id:
                break
            assert time.monotonic() < deadline


def test_errors_cross_the_wire_as_they_are(house):
    with Client(house.settings) as client, pytest.raises(NotFoundError) as caught:
        client.trial("nope-1")
    assert caught.value.hint
    assert isinstance(from_dict(HomeHeldError("x").to_dict()), HomeHeldError)
