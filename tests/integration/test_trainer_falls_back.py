"""Runs over damaged checkpoints: the newest good one is taken and said, and none is never the same as no checkpoint."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer_ranks import Lab, shared_lab

from overnight.trainer.checkpoint.place import LocalPlace
from overnight.trainer.data.record import audit

SCRIPT = Path(__file__).with_name("trainer_exact.py")
YIELD_AT_9 = {"DISTURB": json.dumps({"step": 9, "rank": 0, "when": "end", "signal": int(signal.SIGTERM)})}
KINDS = {1: "mlp", 2: "cnn"}
NUM_UPDATES = 18


@pytest.fixture(scope="module")
def lab() -> Lab:
    return shared_lab()


class Trial:
    """A training of so many ranks in a folder of its own, which saves every four updates and keeps two."""

    def __init__(self, lab: Lab, folder: Path, ranks: int) -> None:
        self._lab, self._folder, self._ranks = lab, folder, ranks

    def start(self, *argv: str, env: dict[str, str] | None = None) -> tuple[set[int], str]:
        """Exit codes of the ranks, and what this start said."""
        log = self._folder / "log"
        before = len(log.read_text()) if log.exists() else 0
        argv = ("--kind", KINDS[self._ranks], *argv)
        codes = self._lab.run(SCRIPT, self._folder, *argv, ranks=self._ranks, env=env)
        return set(codes), log.read_text()[before:]

    @property
    def folder(self) -> Path:
        (trial,) = (self._folder / ".overnight" / "trainer_exact").iterdir()
        return trial

    @property
    def place(self) -> LocalPlace:
        return LocalPlace(self.folder / "checkpoints")

    def steps(self) -> list[int]:
        """Of all checkpoints, damaged ones too."""
        return sorted(name.step for name in self.place.checkpoints())

    def damage(self, step: int) -> str:
        """Flips one bit in the middle of what the last rank has saved of a step; returns the file's name."""
        (name,) = [name for name in self.place.checkpoints() if name.step == step]
        path = self.place.path(name) / f"__{self._ranks - 1}_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
        return path.name

    def losses(self) -> list[dict[int, set[tuple[Any, ...]]]]:
        """By rank and step, all that was ever computed there."""
        found: list[dict[int, set[tuple[Any, ...]]]] = [{} for _ in range(self._ranks)]
        for rank, steps in enumerate(found):
            for line in (self.folder / f"losses-{rank}.jsonl").read_text().splitlines():
                step, *values = json.loads(line)
                steps.setdefault(step, set()).add(tuple(values))
        return found

    def final(self) -> dict[str, Any]:
        newest = max((self.folder / "attempts").glob("*/final.json"))
        final: dict[str, Any] = json.loads(newest.read_text())
        return final

    def everything(self) -> dict[Path, bytes]:
        """Every file of the trial and its content."""
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_checkpoints_are_named_and_never_end_in_a_silent_start_from_nothing(
    lab: Lab, tmp_path: Path, ranks: int
) -> None:
    """C3 and C4, as a whole run meets them."""
    undisturbed, trial = Trial(lab, tmp_path / "undisturbed", ranks), Trial(lab, tmp_path / "disturbed", ranks)
    assert undisturbed.start()[0] == {0}
    assert trial.start(env=YIELD_AT_9)[0] == {75}
    *_, older, newest = trial.steps()
    assert 4 <= older < newest in (9, 10)  # gangs leave a boundary later

    damaged = trial.damage(newest)
    codes, said = trial.start()
    assert codes == {0}, said
    assert re.findall(r"passed over (\S+): (\S+) ", said) == [(f"step-{newest}.attempt-1.1", damaged)]
    assert re.findall(r"resumed at step (\d+)", said) == [str(older)]
    assert trial.final() == undisturbed.final() and trial.final()["step"] == NUM_UPDATES
    assert trial.losses() == undisturbed.losses()
    counted = audit(trial.folder)
    assert (counted.repeated, counted.skipped, counted.recorded) == (0, 0, NUM_UPDATES * 8)

    for step in set(trial.steps()) - {newest}:
        trial.damage(step)
    before = trial.everything()
    codes, said = trial.start()
    assert codes == {1}
    assert "NoUsableCheckpointError" in said and "--fresh" in said and "resumed" not in said
    assert trial.everything() == before, "it claimed the place, trained or changed something"

    codes, said = trial.start("--fresh")
    assert codes == {0} and "resumed" not in said
    assert trial.final() == undisturbed.final()
    assert trial.losses() == undisturbed.losses()
    assert trial.start()[1].count(f"resumed at step {NUM_UPDATES}") == 1, "what lies before --fresh is hidden"
