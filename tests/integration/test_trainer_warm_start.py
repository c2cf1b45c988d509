"""A run that begins from another one has its weights, or all of its state, and nothing of its position."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab

from overnight.trainer.data.record import audit

SCRIPT = Path(__file__).with_name("trainer_warm.py")
NUM_STEPS, KILLED = 6, -9
Says = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


class Home:
    """Trials of one size, beside each other, as a node lays them."""

    def __init__(self, lab: Lab, root: Path, ranks: int) -> None:
        self.lab, self.root, self.ranks = lab, root, ranks

    def trial(self, name: str) -> Path:
        return self.root / "trials" / f"id-of-{name}"

    def run(
        self, name: str, *, seed: int, lr: float, warm: dict[str, Any] | None = None, kill_at: int = 0
    ) -> list[int]:
        folder = self.trial(name)
        (folder / "attempts" / "0001").mkdir(parents=True, exist_ok=True)
        order = {"trial_id": folder.name, "trial_name": name, "checkpoints": str(folder / "checkpoints")}
        (folder / "attempts" / "0001" / "order.json").write_text(json.dumps(order))
        env = {"OVERNIGHT_TRIAL_DIR": str(folder), "SEED": str(seed), "LR": str(lr), "KILL_AT": str(kill_at)}
        env["WARM"] = json.dumps(warm)
        codes: list[int] = self.lab.run(SCRIPT, self.root, ranks=self.ranks, env=env)
        return codes

    def says(self, name: str) -> list[Says]:
        """What each rank wrote down."""
        files = [self.trial(name) / f"said-{rank}.jsonl" for rank in range(self.ranks)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def final(self, name: str) -> dict[str, Any]:
        newest = max((self.trial(name) / "attempts").glob("*/final.json"))
        final: dict[str, Any] = json.loads(newest.read_text())
        return final

    def log(self) -> str:
        return (self.root / "log").read_text()


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def home(lab: Lab, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Home:
    """With a trial to begin from, and another one that began from nothing."""
    home = Home(lab, tmp_path_factory.mktemp("home"), request.param)
    for name, seed, lr in (("donor-1", 1, 0.01), ("cold-1", 2, 0.05)):
        assert home.run(name, seed=seed, lr=lr) == [0] * home.ranks, home.log()
    return home


def at(says: Says, step: int) -> dict[str, Any]:
    return next(said for said in says if said["step"] == step)


def require_begins_anew(home: Home, name: str) -> None:
    """Order of data and random numbers are those of a run with this seed that began from nothing; all from step 1."""
    for warm, cold in zip(home.says(name), home.says("cold-1"), strict=True):
        assert [said["step"] for said in warm] == list(range(NUM_STEPS + 1))
        assert not warm[0]["resumed"] and warm[0]["draw"] == cold[0]["draw"]
        assert [said["samples"] for said in warm[1:]] == [said["samples"] for said in cold[1:]]
    assert [said.get("samples") for said in home.says("cold-1")[0]] != [
        said.get("samples") for said in home.says("donor-1")[0]
    ], "another seed, another order"
    counted = audit(home.trial(name))
    assert (counted.repeated, counted.skipped, counted.recorded) == (0, 0, NUM_STEPS * 8)
    assert home.final(name)["step"] == NUM_STEPS


@pytest.mark.parametrize("step", [4, None])
def test_weights_of_a_step_and_of_the_newest(home: Home, step: int | None) -> None:
    name = f"weights-of-{step}"
    assert home.run(name, seed=2, lr=0.05, warm={"from_trial": "donor-1", "step": step}) == [0] * home.ranks, home.log()
    require_begins_anew(home, name)
    donor, cold = home.says("donor-1")[0], home.says("cold-1")[0]
    for said in home.says(name):
        assert said[0]["filled"] == ["model"]
        assert said[0]["model"] == at(donor, step or NUM_STEPS)["model"] != cold[0]["model"]
        assert (said[0]["moments"], said[0]["lr"], said[0]["state"]) == ([], 0.05, {})
    assert home.final(name) != home.final("cold-1")


WHOLE: dict[str, Callable[[Home], dict[str, Any]]] = {
    "trial": lambda home: {"from_trial": "id-of-donor-1", "step": 4, "what": "all"},
    "file": lambda home: {"path": str(home.root / "donor.pt"), "what": "all"},
}


@pytest.mark.parametrize("source", WHOLE)
def test_everything(home: Home, source: str) -> None:
    if source == "file":
        assert home.run("donor-1", seed=1, lr=0.01) == [0] * home.ranks, home.log()  # over at once: writes its file
        (home.root / "whole.pt").rename(home.root / "donor.pt")
    step = 4 if source == "trial" else NUM_STEPS
    warm = WHOLE[source](home)
    calm = f"calm-{source}"
    assert home.run(calm, seed=2, lr=0.05, warm=warm) == [0] * home.ranks, home.log()
    require_begins_anew(home, calm)
    names = ["model", "optimizer", "state"] if source == "trial" else ["model", "optimizer"]
    donor = home.says("donor-1")[0]
    for said in home.says(calm):
        assert sorted(said[0]["filled"]) == names and said[0]["lr"] == 0.01
        assert (said[0]["model"], said[0]["moments"]) == (at(donor, step)["model"], at(donor, step)["moments"])
        assert said[0]["state"] == ({"last": 4} if source == "trial" else {})


def test_no_second_time_behind_a_kill(home: Home) -> None:
    calm, killed, warm = "undisturbed", "killed", WHOLE["trial"](home)
    assert home.run(calm, seed=2, lr=0.05, warm=warm) == [0] * home.ranks, home.log()
    assert home.run(killed, seed=2, lr=0.05, warm=warm, kill_at=4)[-1] == KILLED
    assert home.run(killed, seed=2, lr=0.05, warm=warm) == [0] * home.ranks, home.log()
    for said, undisturbed in zip(home.says(killed), home.says(calm), strict=True):
        begun, again = [one for one in said if "filled" in one]
        assert begun["step"] == 0 and not begun["resumed"]
        assert (again["resumed"], again["step"], again["filled"]) == (True, 2, [])
        assert (again["model"], again["moments"]) == (at(said, 2)["model"], at(said, 2)["moments"])
        assert said[-1] == undisturbed[-1]
    assert home.final(killed) == home.final(calm)
    assert audit(home.trial(killed)).repeated == 0


def test_a_source_that_is_not_there_ends_all_ranks(home: Home) -> None:
    assert home.run("lost", seed=2, lr=0.05, warm={"from_trial": "donor-1", "step": 5}) == [1] * home.ranks
    assert "holds no checkpoint of step 5" in home.log() and "It has steps [2, 4, 6]" in home.log()
    assert not list(home.trial("lost").glob("checkpoints/step-*"))
