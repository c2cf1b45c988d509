"""Trainings whose checkpoints lie behind a URL: through an outage, killed in an upload, resumed, with the same bits.

Folders, script and URL have letters beyond ASCII, and such as URLs and shells give a meaning of their own.
"""

import itertools
import json
import shutil
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
import torch
from store_lab import Store
from trainer_ranks import Lab, shared_lab
from waiting import LIMIT_SECONDS, wait_for

from overnight import trainer
from overnight.trainer.checkpoint.multipart import uploads_below
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.remote import RemotePlace
from overnight.trainer.data.record import audit

SCRIPT = Path(__file__).with_name("trainer_exact.py")
NUMBERS = itertools.count()
NUM_UPDATES, GLOBAL_BATCH = 18, 8
DRIVER_TRIES = 6
"""The driver itself asks at most so often; whoever gives up then has no patience of their own."""


@pytest.fixture
def place(store: Store) -> RemotePlace:
    return store.place(f"größe 東京 +1 100%/{next(NUMBERS)}/checkpoints")


class Training:
    """A training in a folder of its own, and what is known of it from outside."""

    def __init__(self, lab: Lab, folder: Path, ranks: int) -> None:
        folder.mkdir()
        self._lab, self._folder, self.ranks = lab, folder, ranks
        self._script = Path(shutil.copy(SCRIPT, folder / "größe.py"))

    def run(self, **env: str) -> list[int]:
        return self._lab.run(self._script, self._folder, ranks=self.ranks, env=env)

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    @property
    def trial(self) -> Path:
        (trial,) = (self._folder / ".overnight" / "größe").iterdir()
        return trial

    @property
    def staged(self) -> list[str]:
        return sorted(path.name for path in self.trial.glob("staging/*"))

    def step(self) -> int:
        """How far rank 0 has come."""
        lines = (self.trial / "losses-0.jsonl").read_text().splitlines()
        return max((json.loads(line)[0] for line in lines), default=0)

    def result(self) -> tuple[Any, ...]:
        """The end, and all that was ever computed at each step by each rank."""
        final = max((self.trial / "attempts").glob("*/final.json"))
        losses = [set((self.trial / f"losses-{rank}.jsonl").read_text().splitlines()) for rank in range(self.ranks)]
        return json.loads(final.read_text()), losses


class Weather:
    """What the store does: it is away when the first save is sent, until training has got on, and slow at the second.

    Attributes:
        sent: A file that says that all ranks have begun to send the first save.
        sending: A file that says that a rank is in the middle of an upload of the second.
        killed: To be set when that upload need not be kept waiting any longer.
    """

    def __init__(self, training: Training, folder: Path) -> None:
        self._training = training
        self._num_tries: Counter[str] = Counter()
        self.sent, self.sending = folder / "sent", folder / "sending"
        self.killed = threading.Event()

    def __call__(self, method: str, path: str) -> bool:
        folder, _, file = path.rpartition("/")
        if method == "PUT" and folder.endswith("/step-4.attempt-1.1"):
            self._num_tries[file] += 1
            if {f"state-{rank}.json" for rank in range(self._training.ranks)} <= self._num_tries.keys():
                self.sent.touch()
            return self._training.step() < 8 or self._num_tries["state-0.json"] <= DRIVER_TRIES
        if method == "PUT" and folder.endswith("/step-8.attempt-1.1"):
            self.sending.touch()
            self.killed.wait(LIMIT_SECONDS)
        return False

    def kill(self, victim: int) -> str:
        """Wishes of a script: once its memory is free again it goes on, and dies in the middle of the next upload."""
        pause = {"step": 5, "rank": 0, "when": "start", "signal": 0, "after": str(self.sent)}
        death = {"step": 14, "rank": victim, "when": "middle", "signal": signal.SIGKILL, "after": str(self.sending)}
        return json.dumps([pause, death])


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1)])
def test_a_store_that_fails_and_a_kill_in_an_upload_change_no_bit(
    store: Store, place: RemotePlace, tmp_path: Path, ranks: int, victim: int
) -> None:
    undisturbed = Training(shared_lab(), tmp_path / "undisturbed", ranks)
    assert undisturbed.run() == [0] * ranks, undisturbed.log[-3000:]
    training = Training(shared_lab(), tmp_path / "größe 東京", ranks)
    env = {**store.credentials, "OVERNIGHT_CHECKPOINTS": place.url}

    store.failing = weather = Weather(training, tmp_path)
    codes = training.run(DISTURB=weather.kill(victim), **env)
    weather.killed.set()
    assert codes[victim] == -signal.SIGKILL and 0 not in codes, training.log[-3000:]
    assert training.step() >= 13, "training went on while the store was away"
    assert [str(name) for name in place.checkpoints()] == ["step-4.attempt-1.1"]
    assert f"step-8.attempt-1.1.rank-{victim}" in training.staged

    turns = itertools.count(1)
    store.failing = lambda method, path: next(turns) % 7 == 0
    assert training.run(**env) == [0] * ranks, training.log[-3000:]
    store.failing = lambda method, path: False
    assert f"resumed at step 4 from {place.url}/step-4.attempt-1.1" in training.log
    assert training.result() == undisturbed.result() and training.result()[0]["step"] == NUM_UPDATES
    counted = audit(training.trial, checkpoints=place)
    assert (counted.repeated, counted.skipped, counted.recorded) == (0, 0, NUM_UPDATES * GLOBAL_BATCH)
    newest = newest_good(place)
    assert newest is not None and newest[0].step == NUM_UPDATES
    assert training.staged == [] and place.unfinished() == {} and uploads_below(place.files, place.full("")) == []


class SlowStore:
    """Takes no file of a checkpoint before training has got to the next fifth update, or has ended.

    Attributes:
        num_held: Files that it has let wait.
        ended: Whether training has.
        staged: The largest number of saves that lay on the disk on their way.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._num_fifths = 0
        self.num_held, self.ended, self.staged = 0, False, 0

    def __call__(self, method: str, path: str) -> bool:
        if method == "PUT" and "/step-" in path:
            before = self._num_fifths
            self.num_held += 1
            wait_for(lambda: self.ended or self._num_fifths > before, "training to go on")
            self.staged = max(self.staged, len(list(self._staging.iterdir())))
        return False

    def fifth(self) -> None:
        """Training has done five more updates. It waits for files to come, so that it need not do thousands of them."""
        held = self.num_held
        self._num_fifths += 1
        wait_for(lambda: self.num_held > held, "the next file")


def test_before_a_slow_store_one_save_lies_on_the_disk_and_training_goes_on(
    store: Store, place: RemotePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setenv("OVERNIGHT_CHECKPOINTS", place.url)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": store.url, "key": "key", "secret": "secret"})
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer.run(every=1, keep=100) as run:
        run.track(model=model, optimizer=optimizer)
        staging = run.trial_dir / "staging"
        store.failing = slow = SlowStore(staging)
        for step in run.steps(100_000):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                slow.fifth()
            if run._ledger._counts["saves"] >= 3:
                break
        slow.ended = True
        num_coalesced, num_updates = run._ledger._counts["saves_coalesced"], run.step
    steps = [name.step for name in place.checkpoints()]
    assert slow.staged == 1 and list(staging.iterdir()) == []
    assert len(steps) >= 4 and steps[-1] == num_updates, "three while it trained, and the last"
    assert num_updates / 2 < num_coalesced < num_updates, "counted"
