"""The rules of ``trainer.run`` on a real run, over its attempts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from place_lab import begin, lay, steps
from trainer_ranks import shared_lab
from waiting import wait_for
from writing_lab import Memory, client_of, finish, order

from overnight.trainer.checkpoint.pins import pin
from overnight.trainer.checkpoint.place import PARTIAL, CheckpointName, LocalPlace, Token
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.survey import survey

BASE = "base-" + "0f" * 16
SCRIPT = """
import os
import signal
import torch
from overnight import trainer

losses = [0.9, 0.3, 0.5, 0.2, 0.6, 0.7, 0.8, 0.9]
with trainer.run(every=1, keep=1, keep_every=5, keep_best=("loss", "min", 2)) as run:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    saved = None
    for step in run.steps(int(os.environ["STEPS"])):
        if saved is not None:
            saved.result()
        if step == int(os.environ.get("KILLED_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(3)).sum().backward()
        optimizer.step(); optimizer.zero_grad()
        run.report(loss=losses[(step - 1) % 8])
        saved = run.save()
"""


def train(folder: Path, num_steps: int, *words: str, killed_at: int = -1) -> None:
    env = {"STEPS": str(num_steps), "KILLED_AT": str(killed_at)}
    codes = shared_lab().run(folder / "train.py", folder, *words, env=env)
    assert codes == [0 if killed_at < 0 else -signal.SIGKILL], (folder / "log").read_text()[-3000:]


def unfinished(place: LocalPlace) -> list[str]:
    return [entry for entry in place.entries() if PARTIAL in entry]


def test_what_a_run_says_stays_of_all_its_attempts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    train(tmp_path, 3)
    [root] = tmp_path.glob(".overnight/train/*/checkpoints")
    place = LocalPlace(root)
    assert steps(place) == [(1, 2), (1, 3)]
    train(tmp_path, 8)
    assert steps(place) == [(1, 2), (2, 4), (2, 5), (2, 8)]
    reasons = {row.name.step: row.reason for row in survey(place).rows}
    best = {2: "best 2 by loss (0.3)", 4: "best 1 by loss (0.2)"}
    assert reasons == best | {5: "first from step 5 on", 8: "newest 1"}
    done = subprocess.run(
        [sys.executable, "-m", "overnight", "checkpoints", "prune", "--yes", str(root)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "nothing to delete" in done.stdout, done.stderr
    assert steps(place) == [(1, 2), (2, 4), (2, 5), (2, 8)]
    found = newest_good(place)
    assert found is not None and found[0].step == 8


def test_what_killed_attempts_leave_does_not_pile_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace('keep_every=5, keep_best=("loss", "min", 2)', "keep_best=None"))
    for attempt in range(1, 4):
        train(tmp_path, 9, killed_at=3 * attempt)  # so that each but the first tidies before its second commit
        [root] = tmp_path.glob(".overnight/train/*/checkpoints")
        place = LocalPlace(root)
        place.partial(CheckpointName(99, Token(attempt))).mkdir(exist_ok=True)
        assert len(steps(place)) <= 3, "what is kept, what was being deleted, and from where the attempt went on"
        assert {entry.partition(".attempt-")[2][0] for entry in unfinished(place)} == {str(attempt)}
    train(tmp_path, 10)
    assert steps(place) == [(4, 10)]
    assert unfinished(place) == []


def test_what_came_before_a_new_beginning_is_somebody_elses_to_delete(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    train(tmp_path, 3)
    [root] = tmp_path.glob(".overnight/train/*/checkpoints")
    train(tmp_path, 2, "--fresh")
    assert [row for row in steps(LocalPlace(root)) if row[0] == 1] == [(1, 2), (1, 3)]


@pytest.fixture
def left(tmp_path: Path) -> LocalPlace:
    """Attempt 1 was killed after its third checkpoint, attempt 2 goes on from the second."""
    place = LocalPlace(tmp_path / "checkpoints")
    begin(place, Token(1))
    for step in (10, 20, 30):
        lay(place, step, bases=[BASE] if step == 30 else [])
    place.partial(CheckpointName(40, Token(1))).mkdir()
    return place


def go_on(place: LocalPlace, tmp_path: Path, *, tidies: bool) -> list[tuple[int, int]]:
    """Attempt 2 commits once; what is there by then."""
    parent, memory = CheckpointName(20, Token(1)), Memory({"w": torch.ones(3)})
    facts = {"versions": {}, "threads": 1, "retention": Retention(keep=1).to_json()}
    with client_of(
        place, tmp_path, Token(2), parent=parent, retention=Retention(keep=1), tidies=tidies, stall_seconds=30.0
    ) as client:
        finish(client, client.submit(order(1, 25, memory, facts=facts), memory))
        if tidies:
            wait_for(lambda: not unfinished(place) and (1, 30) not in steps(place), "the tidying")
        else:
            finish(client, client.submit(order(2, 26, memory, facts=facts), memory))  # after the first one's tidying
        return list(steps(place))


def test_a_run_that_goes_on_spares_its_origin_until_it_ends(left: LocalPlace, tmp_path: Path) -> None:
    assert (1, 20) in go_on(left, tmp_path, tidies=True)
    assert steps(left) == [(2, 25)]
    assert left.bases() == []


def test_a_pinned_checkpoint_of_an_earlier_attempt_stays(left: LocalPlace, tmp_path: Path) -> None:
    with pin(left, CheckpointName(10, Token(1)), "an evaluation"):
        go_on(left, tmp_path, tidies=True)
    assert steps(left) == [(1, 10), (2, 25)]


def test_where_somebody_else_tidies_an_attempt_deletes_nothing_but_its_own(left: LocalPlace, tmp_path: Path) -> None:
    go_on(left, tmp_path, tidies=False)
    assert [row for row in steps(left) if row[0] == 1] == [(1, 10), (1, 20), (1, 30)]
    assert unfinished(left) == ["step-40.attempt-1.1.partial"] and left.bases() == [BASE]


def test_a_run_that_has_been_overtaken_deletes_nothing_of_others(left: LocalPlace, tmp_path: Path) -> None:
    memory = Memory({"w": torch.ones(3)})
    with client_of(left, tmp_path, Token(2), parent=CheckpointName(20, Token(1)), tidies=True) as client:
        finish(client, client.submit(order(1, 25, memory), memory))
        wait_for(lambda: not unfinished(left), "the tidying")
        begin(left, Token(3), CheckpointName(25, Token(2)))
        left.partial(CheckpointName(30, Token(3))).mkdir()
        before = steps(left)
    assert steps(left) == before and unfinished(left) == ["step-30.attempt-3.1.partial"]
