"""A trial that was killed and pre-empted at any step ends with the bits of one that never was."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab

from overnight.trainer.data.record import audit

SCRIPT = Path(__file__).with_name("trainer_exact.py")
KILL, YIELD = int(signal.SIGKILL), int(signal.SIGTERM)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def trial_of(folder: Path) -> Path:
    (trial,) = (folder / ".overnight" / "trainer_exact").iterdir()
    return trial


def losses(trial: Path, rank: int) -> dict[int, set[tuple[Any, ...]]]:
    """All that was ever computed at each step: recomputed steps must give the same."""
    found: dict[int, set[tuple[Any, ...]]] = {}
    for line in (trial / f"losses-{rank}.jsonl").read_text().splitlines():
        step, *values = json.loads(line)
        found.setdefault(step, set()).add(tuple(values))
    return found


def final(trial: Path) -> dict[str, Any]:
    newest = max((trial / "attempts").glob("*/final.json"))
    result: dict[str, Any] = json.loads(newest.read_text())
    return result


def disturbed(
    lab: Lab, folder: Path, argv: list[str], ranks: int, disturbances: list[dict[str, Any]]
) -> list[list[int]]:
    codes = [lab.run(SCRIPT, folder, *argv, ranks=ranks, env={"DISTURB": json.dumps(one)}) for one in disturbances]
    codes.append(lab.run(SCRIPT, folder, *argv, ranks=ranks))
    assert codes[-1] == [0] * ranks, (folder / "log").read_text()[-3000:]
    return codes


def wish(step: int, when: str = "middle", number: int = KILL, rank: int = 0) -> dict[str, Any]:
    return {"step": step, "when": when, "signal": number, "rank": rank}


SCENARIOS = {
    "before the first save": [wish(2)],
    "at a save": [wish(4, "end"), wish(5, "start")],
    "end of an epoch": [wish(6, "end", YIELD), wish(12, "end")],
    "yields": [wish(3, "start", YIELD), wish(4, "end", YIELD), wish(11, "middle", YIELD)],
    "last step": [wish(18, "end"), wish(18, "start", YIELD)],
    "many": [wish(5), wish(7, "end"), wish(9, "middle", YIELD), wish(10, "start"), wish(17)],
}


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[tuple[Any, ...], Path] = {}

    def get(argv: list[str], ranks: int) -> Path:
        key = (*argv, ranks)
        if key not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            assert lab.run(SCRIPT, folder, *argv, ranks=ranks) == [0] * ranks, (folder / "log").read_text()[-3000:]
            done[key] = trial_of(folder)
        return done[key]

    return get


def assert_same(trial: Path, reference: Path, ranks: int, num_updates: int = 18) -> None:
    assert final(trial) == final(reference)
    assert final(trial)["step"] == num_updates
    for rank in range(ranks):
        assert losses(trial, rank) == losses(reference, rank)
    counted = audit(trial)
    assert (counted.repeated, counted.skipped) == (0, 0)
    assert counted.recorded == counted.expected == num_updates * 8


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_one_rank_ends_with_the_same_bits(lab: Lab, undisturbed: Any, tmp_path: Path, kind: str, name: str) -> None:
    argv = ["--kind", kind]
    codes = disturbed(lab, tmp_path, argv, 1, SCENARIOS[name])
    expected = [[-KILL] if w["signal"] == KILL else [75] for w in SCENARIOS[name]]
    assert codes[:-1] == expected
    assert_same(trial_of(tmp_path), undisturbed(argv, 1), 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_with_nested_loops_and_accumulation(lab: Lab, undisturbed: Any, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    argv = ["--kind", dice.choice(["mlp", "cnn"]), "--nested", "--micro-batch", "2"]
    wishes = [
        wish(step, dice.choice(["start", "middle", "end"]), dice.choice([KILL, KILL, YIELD]))
        for step in sorted(dice.sample(range(1, 19), 5))
    ]
    disturbed(lab, tmp_path, argv, 1, wishes)
    assert_same(trial_of(tmp_path), undisturbed(argv, 1), 1)


@pytest.mark.parametrize(
    ("kind", "wishes"),
    [
        ("mlp", [wish(3, rank=1), wish(9, "end"), wish(11, "middle", YIELD, rank=1)]),
        ("cnn", [wish(6, "end", YIELD), wish(13, "start", rank=1), wish(18, "middle")]),
    ],
)
def test_two_ranks_end_with_the_same_bits(
    lab: Lab, undisturbed: Any, tmp_path: Path, kind: str, wishes: list[dict[str, Any]]
) -> None:
    argv = ["--kind", kind]
    codes = disturbed(lab, tmp_path, argv, 2, wishes)
    for code, asked in zip(codes, wishes, strict=False):
        assert asked["signal"] == KILL or code == [75, 75]
    assert_same(trial_of(tmp_path), undisturbed(argv, 2), 2)


def test_other_numbers_of_ranks_see_every_sample_once(lab: Lab, tmp_path: Path) -> None:
    for ranks, step in ((1, 5), (2, 9), (1, 13)):
        stop = {"DISTURB": json.dumps(wish(step, "end", YIELD))}
        assert lab.run(SCRIPT, tmp_path, ranks=ranks, env=stop) == [75] * ranks, (tmp_path / "log").read_text()[-3000:]
    assert lab.run(SCRIPT, tmp_path, ranks=2) == [0, 0]
    counted = audit(trial_of(tmp_path))
    assert (counted.repeated, counted.skipped, counted.recorded) == (0, 0, 144)
    assert "saved by 1 rank(s), this run has 2" in (tmp_path / "log").read_text()


def test_a_finished_run_has_nothing_left_to_do_and_fresh_starts_anew(lab: Lab, tmp_path: Path) -> None:
    assert lab.run(SCRIPT, tmp_path) == [0]
    trial = trial_of(tmp_path)
    first = final(trial)
    assert lab.run(SCRIPT, tmp_path) == [0]
    assert final(trial) == first
    assert "no update was left to do after step 18" in (tmp_path / "log").read_text()
    num_lines = len((trial / "losses-0.jsonl").read_text().splitlines())
    assert lab.run(SCRIPT, tmp_path, "--fresh", env={"DISTURB": json.dumps(wish(2))}) == [-KILL]
    assert lab.run(SCRIPT, tmp_path) == [0]
    assert len((trial / "losses-0.jsonl").read_text().splitlines()) == num_lines + 2 + 18 - 1
    assert final(trial) == first
    assert audit(trial).repeated == 0


def test_ctrl_c_saves_and_leaves_with_130(lab: Lab, undisturbed: Any, tmp_path: Path) -> None:
    interrupt = wish(7, "start", int(signal.SIGINT))
    assert lab.run(SCRIPT, tmp_path, env={"DISTURB": json.dumps(interrupt)}) == [130]
    assert "the same command goes on from there" in (tmp_path / "log").read_text()
    assert lab.run(SCRIPT, tmp_path) == [0]
    assert_same(trial_of(tmp_path), undisturbed(["--kind", "mlp"], 1), 1)
