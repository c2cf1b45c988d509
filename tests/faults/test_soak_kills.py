"""Trainings that were killed at random moments end as if nothing had happened; and the soak would see it if not."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak_lab import Soak
from soak_plan import KINDS
from soak_processes import Warm

NUM_KILLS = int(os.environ.get("SOAK_KILLS", "1000"))


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    """Its undisturbed trainings serve all tests of this file."""
    return Soak(tmp_path_factory.mktemp("soak"), int(os.environ.get("SOAK_SEED", "20")), kills_per_round=5)


def test_thirty_kills_of_one_and_two_ranks_change_nothing(warm: Warm, soak: Soak) -> None:
    print(soak.run(warm, 30).text())
    assert soak.summary.kills >= 30
    counts = soak.summary.counts
    assert all(counts[f"{kind} on {ranks}"] for kind in KINDS for ranks in (1, 2))
    assert counts["loader workers killed"] and counts["yields"]
    assert any(name.startswith("zombie") and number for name, number in counts.items())
    assert not soak.summary.failures, soak.summary.text()


@pytest.mark.parametrize(
    ("sabotage", "expected"),
    [
        ("ema", "the weights differ"),
        ("random", "the losses of rank 0 differ"),
        ("position", "the order of samples"),
        ("checkpoints", "began at step 0, below the good one of"),
    ],
)
def test_a_training_that_forgets_something_is_seen(warm: Warm, tmp_path: Path, sabotage: str, expected: str) -> None:
    soak = Soak(tmp_path, 1, ranks=(1,), kills_per_round=8)
    problems = soak.run_round(warm, 0, sabotage=sabotage)
    assert any(expected in problem for problem in problems), problems
    assert "--seed 1 --round 0" in (tmp_path / "round-1-0" / "failure.json").read_text()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills_of_up_to_three_ranks_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """``SOAK_KILLS``, ``SOAK_SEED``; with ``SOAK_FOLDER`` it goes on where a soak in that folder was stopped."""
    folder = Path(os.environ.get("SOAK_FOLDER", ".soak"))
    known = [int(path.stem.removeprefix("summary-")) for path in sorted(folder.glob("summary-*.json"))]
    seed = int(os.environ.get("SOAK_SEED") or (known[-1] if known else random.SystemRandom().randrange(1_000_000)))
    soak = Soak(folder, seed, ranks=(1, 2, 3))

    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"\r{line}", end="", flush=True)

    with Warm() as warm:
        soak.run(warm, NUM_KILLS, tell)
    with capsys.disabled():
        print(f"\n{soak.summary.text()}")
    assert not soak.summary.failures, soak.summary.text()
