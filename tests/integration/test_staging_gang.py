"""Ranks agree on what one of them alone knows: a writer that lags, a save that failed, a state that changed."""

import json
from pathlib import Path

import pytest
from trainer_ranks import Lab, shared_lab

SCRIPT = """
import json, os, resource, signal, sys, time
import torch
from overnight import trainer

MODE = sys.argv[1]

def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def idle(run):
    run._saver.pipeline.poll()
    return not run._saver.pipeline.writing

with trainer.run(every=None, keep=20) as run:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    last = run.rank == run.world_size - 1
    begun = []
    begin = run._saver.pipeline.begin
    run._saver.pipeline.begin = lambda moment, *rest: (begun.append(moment.step), begin(moment, *rest))[1]
    for step in run.steps(14):
        pid = run._saver.pipeline._writer.pid
        model(torch.ones(1, 64)).sum().backward()
        if MODE == "changes" and step == 5 and last:
            model.weight.data.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
        if MODE == "lags" and step == 3 and last:
            os.kill(pid, signal.SIGSTOP)
        if MODE == "lags" and step in (4, 6, 8):
            run.save()
        if MODE == "lags" and step == 10 and last:
            os.kill(pid, signal.SIGCONT)
        if MODE == "lags" and step == 10:
            wait_for(lambda: idle(run))
        if MODE == "fails" and step == 3 and last:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        if MODE == "fails" and step in (4, 8):
            run.save()
        if MODE == "fails" and step == 6:
            wait_for(lambda: idle(run))
        if MODE == "changes" and step == 4:
            if last:
                import threading
                gate = threading.Event()
                run._saver._stager._worker.do(lambda: (gate.wait(60), None)[1])
                threading.Timer(0.3, gate.set).start()
            run.save()
        if MODE == "changes" and step == 7:
            wait_for(lambda: idle(run))
    with open(f"begun-{run.rank}.json", "w") as file:
        json.dump(begun, file)
"""


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def steps(folder: Path) -> set[int]:
    found = folder.glob(".overnight/*/*/checkpoints/step-*")
    return {int(path.name.split(".")[0].removeprefix("step-")) for path in found if not path.name.endswith(".partial")}


def run(lab: Lab, folder: Path, mode: str) -> list[int]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return lab.run(script, folder, mode, ranks=2)


def begun(folder: Path) -> list[list[int]]:
    return [json.loads((folder / f"begun-{rank}.json").read_text()) for rank in range(2)]


def test_a_rank_whose_writer_lags_puts_all_off_alike(lab: Lab, tmp_path: Path) -> None:
    assert run(lab, tmp_path, "lags") == [0, 0], (tmp_path / "log").read_text()[-3000:]
    first, second = begun(tmp_path)
    assert first == second
    assert first[0] == 4 and 6 not in first and 8 not in first and first[1] > 8


def test_a_save_that_fails_on_one_rank_is_raised_on_all(lab: Lab, tmp_path: Path) -> None:
    """C8."""
    codes = run(lab, tmp_path, "fails")
    log = (tmp_path / "log").read_text()
    assert codes == [1, 1], log[-3000:]
    assert log.count("SaveFailedError") >= 2 and "RanksDisagreeError" not in log
    assert steps(tmp_path) == set()


def test_a_state_that_changed_on_one_rank_is_saved_again_on_all(lab: Lab, tmp_path: Path) -> None:
    assert run(lab, tmp_path, "changes") == [0, 0], (tmp_path / "log").read_text()[-3000:]
    first, second = begun(tmp_path)
    assert first == second and first[0] == 4 and len(first) >= 2 and first[1] < 14
    assert 4 not in steps(tmp_path) and first[1] in steps(tmp_path)
