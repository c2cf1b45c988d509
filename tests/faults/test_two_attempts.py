"""Two attempts of one trial that live and save at the same time: only what the newer one commits is gone on from.

This is what a partition makes: the server takes a node for dead and starts the trial elsewhere, while on the node it
goes on. Nobody kills the older attempt here; the fence in the place alone must stop it.
"""

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from store_lab import Store
from waiting import wait_for
from writing_lab import Memory, client_of, committed, finish, name_of, order, state_of, strikes

from overnight.core.errors import FencedError
from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.place import LocalPlace, Place, Token
from overnight.trainer.checkpoint.reader import newest_good
from overnight.trainer.checkpoint.reading.source import open_source
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.writing.client import WriterClient

ELDER, HEIR = Token(2), Token(3)
SAVES_OF_THE_HEIR = 4
NUMBERS = itertools.count(1)


def content(token: Token, step: int) -> bytes:
    """What a token saves at a step: no two save the same."""
    return bytes([token.attempt, step % 256]) * 3000


@dataclass
class Attempt:
    """One that saves at each step, as fast as it can.

    Attributes:
        saved: Steps that it was told are committed.
        refused: Why it had to stop.
        after_the_claim: Steps whose saves began when the place was its heir's already.
    """

    token: Token
    client: WriterClient
    memory: Memory = field(default_factory=lambda: Memory({"w": content(ELDER, 0)}))
    saved: list[int] = field(default_factory=list)
    refused: Exception | None = None
    after_the_claim: list[int] = field(default_factory=list)

    def save(self, step: int, claimed: threading.Event) -> None:
        data = content(self.token, step)
        self.memory.bytes[: len(data)] = data
        is_late = claimed.is_set()
        ticket = finish(self.client, self.client.submit(order(step, step, self.memory), self.memory))
        if ticket.error is not None:
            self.refused = ticket.error
            return
        self.saved.append(step)
        if is_late:
            self.after_the_claim.append(step)

    def go_on(self, first: int, claimed: threading.Event) -> None:
        """Saves until it is refused, or should have been for long."""
        for step in itertools.count(first):
            self.save(step, claimed)
            if self.refused is not None or len(self.after_the_claim) > SAVES_OF_THE_HEIR:
                return


def race(place: Place, folder: Path, num_saves: int, delay_seconds: float) -> None:
    """The heir comes when the elder has saved so often, and then a moment later; both save at once from then on."""
    all_of_them = Retention(keep=100)
    claimed = threading.Event()
    claim(place, ELDER, None)
    with (
        client_of(place, folder / "elder", ELDER, claims=False, retention=all_of_them) as first,
        client_of(place, folder / "heir", HEIR, claims=False, retention=all_of_them) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        elder, heir = Attempt(ELDER, first), Attempt(HEIR, second)
        running = pool.submit(elder.go_on, 1, claimed)
        wait_for(lambda: len(elder.saved) >= num_saves or running.done(), "the elder's saves")
        threading.Event().wait(delay_seconds)
        found = newest_good(place, lambda line: None)
        assert found is not None
        parent, _ = found
        claim(place, HEIR, parent)
        claimed.set()
        for step in range(parent.step + 1, parent.step + 1 + SAVES_OF_THE_HEIR):
            heir.save(step, claimed)
            newest = newest_good(place, lambda line: None)
            assert newest is not None and newest[0] == name_of(step, HEIR), "the elder's are hidden at once"
        running.result(60)
    assert heir.refused is None and len(heir.saved) == SAVES_OF_THE_HEIR
    assert isinstance(elder.refused, FencedError)
    assert elder.after_the_claim == [], "no save that begins behind the claim is committed"
    require_whole(place, elder, heir)


def require_whole(place: Place, *attempts: Attempt) -> None:
    """What anybody was told is committed is there, and everything that is there is good and its writer's own."""
    told = {name_of(step, attempt.token) for attempt in attempts for step in attempt.saved}
    there = set(place.checkpoints())
    assert told == there
    for name in there:
        assert content(name.token, name.step) in open_source(place, name).read_all("__0_0.distcp")


@settings(  # what fails here fails by chance: another try with smaller numbers says nothing
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num_saves=st.integers(1, 5), delay_ms=st.floats(0.0, 30.0))
def test_two_that_save_at_once_in_a_folder(tmp_path: Path, num_saves: int, delay_ms: float) -> None:
    folder = tmp_path / str(next(NUMBERS))
    race(LocalPlace(folder / "checkpoints"), folder, num_saves, delay_ms / 1000)


def test_two_that_save_at_once_in_a_store(store: Store, tmp_path: Path) -> None:
    race(store.place("two/checkpoints"), tmp_path, num_saves=1, delay_seconds=0.05)


def test_what_a_zombie_publishes_late_in_a_store_is_gone_on_from_by_nobody(store: Store, tmp_path: Path) -> None:
    """It has looked for newer fences and sleeps before the manifest: a store has no rename that could fail."""
    place = store.place("zombie/checkpoints")
    claim(place, ELDER, None)
    memory = Memory({"w": content(ELDER, 1)})
    manifest = strikes("writing.destination:RemoteDestination.add", 3, "stop", tmp_path / "mark")
    with client_of(place, tmp_path / "zombie", ELDER, claims=False) as client:
        assert finish(client, client.submit(order(1, 1, memory), memory)).committed
    with client_of(place, tmp_path / "zombie", ELDER, claims=False, arguments=manifest) as zombie:
        late = zombie.submit(order(2, 9, memory), memory)
        wait_for(lambda: state_of(zombie.pid or 0) == "T", "the zombie to stop")
        assert [file for file in place.sizes("step-9.attempt-2.1") if "manifest" in file] == []
        with client_of(place, tmp_path / "heir", HEIR, parent=name_of(1, ELDER)) as client:
            assert finish(client, client.submit(order(1, 2, memory), memory)).committed
        os.kill(zombie.pid or 0, signal.SIGCONT)
        assert finish(zombie, late).committed, "it published behind the claim: nothing in a store could stop it"
        again = finish(zombie, zombie.submit(order(3, 10, memory), memory))
        assert isinstance(again.error, FencedError)
    assert set(committed(place)) == {"step-1.attempt-2.1", "step-2.attempt-3.1", "step-9.attempt-2.1"}
    lines: list[str] = []
    found = newest_good(place, lines.append)
    assert found is not None and found[0] == name_of(2, HEIR)
    assert [line for line in lines if "step-9.attempt-2.1" in line and "stale attempt" in line], lines
