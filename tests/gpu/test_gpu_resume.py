"""On a GPU: a training that was killed and pre-empted ends with the bits of one that never was.

``python -m pytest -m gpu`` runs all tests that need one.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.trainer.data.record import audit

SCRIPT = Path(__file__).with_name("gpu_training.py")
KILL, YIELD = int(signal.SIGKILL), int(signal.SIGTERM)
NUM_STEPS = 24
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def train(folder: Path, kind: str, stop: dict[str, int] | None = None) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1", "STOP": json.dumps(stop)}
    with (folder / "log").open("a") as log:
        command = [sys.executable, str(SCRIPT), "--kind", kind]
        return subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, timeout=120).returncode


def trial_of(folder: Path) -> Path:
    (trial,) = (folder / ".overnight" / "gpu_training").iterdir()
    return trial


def losses(trial: Path) -> dict[int, set[tuple[Any, ...]]]:
    """All that was ever computed at each step: recomputed steps must give the same."""
    found: dict[int, set[tuple[Any, ...]]] = {}
    for line in (trial / "losses.jsonl").read_text().splitlines():
        step, *values = json.loads(line)
        found.setdefault(step, set()).add(tuple(values))
    return found


def final(trial: Path) -> dict[str, Any]:
    newest = max((trial / "attempts").glob("*/final.json"))
    result: dict[str, Any] = json.loads(newest.read_text())
    return result


def require_same_bits(tmp_path: Path, kind: str) -> None:
    calm, stopped = tmp_path / "calm", tmp_path / "stopped"
    calm.mkdir()
    stopped.mkdir()
    assert train(calm, kind) == 0, (calm / "log").read_text()
    for step, number, code in ((7, KILL, -KILL), (12, YIELD, 75), (17, KILL, -KILL)):
        assert train(stopped, kind, {"step": step, "signal": number}) == code, (stopped / "log").read_text()
    assert train(stopped, kind) == 0, (stopped / "log").read_text()
    said = (stopped / "log").read_text()
    assert re.findall(r"resumed at step (\d+)", said) == ["6", "12", "14"], said
    assert final(trial_of(stopped)) == final(trial_of(calm))
    assert final(trial_of(calm))["step"] == NUM_STEPS
    assert losses(trial_of(stopped)) == losses(trial_of(calm))
    assert (audit(trial_of(stopped)).repeated, audit(trial_of(stopped)).skipped) == (0, 0)
    if kind == "scaler":
        scales = {value[2] for values in losses(trial_of(calm)).values() for value in values}
        assert len(scales) > 2, "the scale moved, as it does where updates are skipped"


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_gpu) for kind in ("eager", "scaler", "graph")])
def test_a_gpu_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    require_same_bits(tmp_path, kind)
