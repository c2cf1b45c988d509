"""The examples run as their first lines say; importing the trainer leaves a process fit to fork."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    hidden = ("OVERNIGHT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, timeout=150)


def last_value(text: str, name: str) -> float:
    return float(re.findall(rf"{name} ([0-9.]+)", text)[-1])


def test_digits_alone_then_again_then_in_full(tmp_path: Path) -> None:
    script = str(EXAMPLES / "digits.py")
    first = run(sys.executable, script, "--epochs", "1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert 0.5 < last_value(first.stdout, "val_accuracy") <= 1
    again = run(sys.executable, script, "--epochs", "1", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout == "" and "nothing was left to do" in again.stderr
    whole = run(sys.executable, script, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert last_value(whole.stdout, "val_accuracy") >= 0.97
    assert len(list(tmp_path.glob(".overnight/digits/*"))) == 2


def test_digits_with_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*torchrun, str(EXAMPLES / "digits.py"), "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("val_accuracy") == 1
    (trial,) = tmp_path.glob(".overnight/digits/*")
    assert len(list(trial.glob("checkpoints/step-44.attempt-1.1/rank-*.json"))) == 2
    assert len(list(trial.glob("attempts/0001/samples/rank-*.bin"))) == 2


def test_chargpt_learns(tmp_path: Path) -> None:
    small = ["--samples", "512", "--width", "32", "--depth", "1", "--context", "32", "--warmup", "5"]
    done = run(sys.executable, str(EXAMPLES / "chargpt.py"), *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"val_loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 8 and losses[-1] < losses[0] < 5.6


def test_a_bad_flag_is_one_clear_error(tmp_path: Path) -> None:
    done = run(sys.executable, str(EXAMPLES / "digits.py"), "--lr", "fast", cwd=tmp_path)
    assert done.returncode == 1
    assert "--lr 'fast' is not a number" in done.stderr
    assert not list(tmp_path.iterdir())


def test_importing_the_trainer_is_safe_before_a_fork(tmp_path: Path) -> None:
    code = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed
before = torch.default_generator.get_state()
started = time.process_time()
import overnight.trainer.execution
seconds = time.process_time() - started
assert torch.equal(before, torch.default_generator.get_state())
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert not torch.cuda.is_initialized()
for name in ("pydantic", "sqlalchemy", "mlflow", "fastapi", "httpx", "torch.distributed.checkpoint"):
    assert name not in sys.modules, name
assert seconds < 0.5, seconds
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_warm_process_has_imported_what_a_script_needs(tmp_path: Path) -> None:
    code = f"""
import importlib, runpy, sys
from overnight.platform.node.zygote import PRELOAD
for name in PRELOAD:
    importlib.import_module(name)
before = set(sys.modules)
sys.argv = ["digits.py", "--epochs", "1", "--width", "2"]
runpy.run_path({str(EXAMPLES / "digits.py")!r}, run_name="__main__")
late = [name for name in set(sys.modules) - before if name.startswith("overnight")]
late += [name for name in set(sys.modules) - before if name.startswith("torch.") and "distributed" in name]
assert not late, late
assert len(set(sys.modules) - before) < 10, set(sys.modules) - before
"""
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
