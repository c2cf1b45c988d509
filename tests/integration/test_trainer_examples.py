"""The examples run as their first lines say; importing the trainer leaves a process fit to fork."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_ranks import Lab, shared_lab

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits.py"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    hidden = ("OVERNIGHT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=150)


def last_value(text: str, name: str) -> float:
    return float(re.findall(rf"{name} ([0-9.]+)", text)[-1])


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def test_digits_alone_then_again_then_for_longer(lab: Lab, tmp_path: Path) -> None:
    first = run(sys.executable, str(DIGITS), "--epochs", "1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert 0.5 < last_value(first.stdout, "val_accuracy") <= 1
    log = tmp_path / "log"
    assert lab.run(DIGITS, tmp_path, "--epochs", "1") == [0]
    assert "no update was left to do" in log.read_text() and "val_accuracy" not in log.read_text()
    assert lab.run(DIGITS, tmp_path, "--epochs", "6") == [0], log.read_text()
    assert last_value(log.read_text(), "val_accuracy") >= 0.95
    assert len(list(tmp_path.glob(".overnight/digits/*"))) == 2


def test_digits_with_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*torchrun, str(DIGITS), "--epochs", "1", "--width", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("val_accuracy") == 1
    (trial,) = tmp_path.glob(".overnight/digits/*")
    assert len(list(trial.glob("checkpoints/step-44.attempt-1.1/state-*.json"))) == 2
    assert len(list(trial.glob("attempts/0001/samples/rank-*.bin"))) == 2


def test_chargpt_learns(lab: Lab, tmp_path: Path) -> None:
    small = ["--samples", "512", "--width", "32", "--depth", "1", "--context", "32", "--warmup", "5"]
    assert lab.run(EXAMPLES / "chargpt.py", tmp_path, *small) == [0], (tmp_path / "log").read_text()
    lines = re.findall(r"^(?!overnight:).*val_loss ([0-9.]+)", (tmp_path / "log").read_text(), re.MULTILINE)
    losses = [float(value) for value in lines]
    assert len(losses) == 8 and losses[-1] < losses[0] < 5.6


def test_a_bad_flag_is_one_clear_error(lab: Lab, tmp_path: Path) -> None:
    assert lab.run(DIGITS, tmp_path, "--lr", "fast") == [1]
    assert "--lr 'fast' is not a number" in (tmp_path / "log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_warm_process_can_import_all_that_a_script_needs(tmp_path: Path) -> None:
    code = f"""
import importlib, os, runpy, sys, time, warnings
warnings.simplefilter("ignore")
from overnight.platform.node.zygote import PRELOAD
import torch, torch.distributed
before = torch.default_generator.get_state()
started = time.process_time()
import overnight.trainer.execution
seconds = time.process_time() - started
for name in ("pydantic", "sqlalchemy", "mlflow", "fastapi", "httpx", "torch.distributed.checkpoint"):
    assert name not in sys.modules, name
assert seconds < 0.5, seconds
for name in PRELOAD:
    importlib.import_module(name)
assert torch.equal(before, torch.default_generator.get_state())
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert not torch.cuda.is_initialized()

loaded = set(sys.modules)
sys.argv = ["digits.py", "--epochs", "1", "--width", "2"]
runpy.run_path({str(DIGITS)!r}, run_name="__main__")
late = set(sys.modules) - loaded
assert not [name for name in late if name.startswith("overnight")] and len(late) < 10, late
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
