"""Trials with optimizers of every kind end with the bits of undisturbed ones, from saves made behind their training."""

import json
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab

SCRIPT = Path(__file__).with_name("trainer_kinds.py")
KINDS = [
    "AdamW fused", "AdamW tensor lr", "LBFGS", "Rprop", "own kind", "own step", "bfloat16", "scaler", "in backward",
    "two optimizers", "sparse", "compiled",
]  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


def final(folder: Path) -> dict[str, Any]:
    newest = max((folder / ".overnight" / "trainer_kinds").glob("*/attempts/*/final.json"))
    result: dict[str, Any] = json.loads(newest.read_text())
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_and_a_yield_change_no_bit(lab: Lab, tmp_path: Path, kind: str) -> None:
    argv = ("--kind", kind)
    imports = ["torch._inductor.compile_fx"] if kind == "compiled" else []
    whole = lab.run(SCRIPT, tmp_path / "undisturbed", *argv, imports=imports)
    assert whole == [0], (tmp_path / "undisturbed" / "log").read_text()
    folder = tmp_path / "disturbed"
    for at, number, code in ((6, signal.SIGKILL, -signal.SIGKILL), (9, signal.SIGTERM, 75)):
        env = {"AT": str(at), "SIGNAL": str(int(number))}
        assert lab.run(SCRIPT, folder, *argv, env=env) == [code], (folder / "log").read_text()
    assert lab.run(SCRIPT, folder, *argv) == [0], (folder / "log").read_text()
    log = (folder / "log").read_text()
    first = "4" if kind == "two optimizers" else "3"  # a periodic save waits until no gradients are pending
    assert re.findall(r"resumed at step (\d+)", log) == [first, "9"]
    assert final(folder) == final(tmp_path / "undisturbed")
    assert "not tracked" not in log


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_kind_of_value_goes_through_a_checkpoint_on_disk(lab: Lab, tmp_path: Path, ranks: int) -> None:
    script = SCRIPT.with_name("trainer_everything.py")
    for resumed in (False, True):
        assert lab.run(script, tmp_path, ranks=ranks) == [0] * ranks, (tmp_path / "log").read_text()[-4000:]
        for rank in range(ranks):
            before = pickle.loads((tmp_path / f"seen-False-{rank}").read_bytes())
            assert pickle.loads((tmp_path / f"seen-{resumed}-{rank}").read_bytes()) == before
