"""Ranks that split a model get the same samples, whatever happens; each sample counts once."""

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab
from trainer_supervisor import Supervisor

from overnight.trainer.data.record import Audit, audit

SCRIPT = Path(__file__).with_name("trainer_mesh.py")
KILL, YIELD = int(signal.SIGKILL), int(signal.SIGTERM)
WHOLE = Audit(expected=96, recorded=96, repeated=0, skipped=0, updates=12)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "s")
    yield supervisor
    supervisor.close()


def train(lab: Lab, folder: Path, dp: int, tp: int, *, ranks: int | None = None, **env: str) -> list[int]:
    ranks = dp * tp if ranks is None else ranks
    return lab.run(SCRIPT, folder, ranks=ranks, env={"DP": str(dp), "TP": str(tp), **env})


def disturb(step: int, rank: int, number: int) -> str:
    return json.dumps({"step": step, "rank": rank, "signal": number})


def trial_of(folder: Path) -> Path:
    (trial,) = (folder / ".overnight" / "trainer_mesh").iterdir()
    return trial


def given(trial: Path, dp: int, tp: int) -> dict[int, list[Any]]:
    """What a rank was given at each step, by the last process that did it."""
    steps: dict[int, list[Any]] = defaultdict(list)
    num_micro_batches = 4 // max(1, len(list(trial.glob("rank-*-0.jsonl"))))
    for line in (trial / f"rank-{dp}-{tp}.jsonl").read_text().splitlines():
        step, *values = json.loads(line)
        steps[step].append(values)
    return {step: values[-num_micro_batches:] for step, values in steps.items()}


def failure(folder: Path) -> str:
    return (folder / "log").read_text()[-4000:]


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(lab, folder, 2, 2) == [0] * 4, failure(folder)
    return trial_of(folder)


def test_peers_are_given_the_same_and_draw_the_same(undisturbed: Path) -> None:
    assert audit(undisturbed) == WHOLE
    first, second = given(undisturbed, 0, 0), given(undisturbed, 1, 0)
    assert given(undisturbed, 0, 1) == first and given(undisturbed, 1, 1) == second
    assert sorted(first) == list(range(1, 13))
    for step in first:
        indices = [index for rank in (first, second) for values in rank[step] for index in values[0]]
        assert len(set(indices)) == 8
        assert {values[2] for values in first[step]}.isdisjoint(values[2] for values in second[step])


def test_a_killed_peer_costs_and_repeats_no_sample(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    for step, rank, number in ((7, 3, KILL), (10, 1, YIELD)):
        train(lab, tmp_path, 2, 2, DISTURB=disturb(step, rank, number))
    assert train(lab, tmp_path, 2, 2) == [0] * 4, failure(tmp_path)
    trial = trial_of(tmp_path)
    assert audit(trial) == WHOLE
    for dp in range(2):
        for tp in range(2):
            assert given(trial, dp, tp) == given(undisturbed, dp, tp)
    weights = [json.loads(max(one.glob("attempts/*/final.json")).read_text()) for one in (trial, undisturbed)]
    assert weights[0] == weights[1]


def test_another_mesh_goes_on_with_the_same_samples(lab: Lab, undisturbed: Path, tmp_path: Path) -> None:
    for dp, tp, step in ((2, 2, 3), (4, 1, 7), (1, 2, 10)):
        codes = train(lab, tmp_path, dp, tp, DISTURB=disturb(step, 0, YIELD))
        assert codes == [75] * dp * tp, failure(tmp_path)
        if dp == 4:
            lines = [(trial_of(tmp_path) / f"rank-{rank}-0.jsonl").read_text().splitlines()[-1] for rank in range(4)]
            assert len({json.loads(line)[3] for line in lines}) == 4, "ranks 0 and 1 were peers, and drew the same"
    assert train(lab, tmp_path, 1, 1, ONE_DIMENSION="1") == [0], failure(tmp_path)
    assert audit(trial_of(tmp_path)) == WHOLE
    assert samples(trial_of(tmp_path)) == samples(undisturbed)


def samples(trial: Path) -> set[tuple[int, str, str]]:
    """Each micro-batch with its augmentation, as (step, indices, hash)."""
    lines = [json.loads(line) for path in trial.glob("rank-*.jsonl") for line in path.read_text().splitlines()]
    return {(step, str(indices), noise) for step, indices, noise, _ in lines}


def test_sums_count_peers_once(lab: Lab, supervisor: Supervisor, tmp_path: Path) -> None:
    env = {
        "OVERNIGHT_ATTEMPT": "1",
        "OVERNIGHT_TRIAL_DIR": str(tmp_path / "trial"),
        "OVERNIGHT_ATTEMPT_DIR": str(tmp_path / "trial" / "attempts" / "0001"),
        "OVERNIGHT_PARAMS": "{}",
        "OVERNIGHT_SUPERVISOR": supervisor.path,
        "ONE_DIMENSION": "1",
        "WORKERS": "1",
    }
    assert train(lab, tmp_path, 2, 2, **env) == [0] * 4, failure(tmp_path)
    assert [row[2] for row in supervisor.rows if row[0] == "samples"] == [4.0] * 24
    assert [body["values"] for body in supervisor.of("/v1/report")] == [{"samples": 2.0}, {"rank": 3.0}]
    assert audit(tmp_path / "trial") == WHOLE


def test_sizes_that_do_not_fit_are_refused_on_all_ranks(lab: Lab, tmp_path: Path) -> None:
    assert train(lab, tmp_path, 3, 2, ranks=4) == [1] * 4
    log = (tmp_path / "log").read_text()
    assert "a mesh of dp=3, tp=2 needs 6 rank(s), this run has 4" in log
    assert "Sizes that fit 4 rank(s): dp=2, tp=2; dp=4, tp=1" in log
