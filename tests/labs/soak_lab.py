"""Kills trainings at random moments until they are through, and compares them with undisturbed ones.

    python tests/labs/soak_lab.py --kills 30 --seed 1 [--ranks 1 2] [--round N] [--json]

A round is one training. What is tried in it (kind, ranks, intervals, which disturbances and when) follows from the seed
and the round's number; the microsecond at which a signal arrives does not. The soak plays the supervisor: it sets what
ranks see, gives each start the next token, keeps the metrics as the tracking store would, and kills what a rank leaves
behind. A round that differs from the undisturbed training keeps its folder with ``failure.json``.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_outcome import Outcome, differences, read_outcome
from soak_plan import KINDS, Config, draw_config, opening
from soak_processes import Warm
from soak_round import Round


@dataclass
class Summary:
    """Counts over all rounds."""

    seed: int
    rounds: int = 0
    kills: int = 0
    starts: int = 0
    mismatches: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, one: Round, problems: list[str], where: str) -> None:
        """Takes in a round."""
        self.rounds += 1
        self.kills += one.counts["kills"]
        self.starts += one.counts["starts"]
        for name in one.counts.keys() - {"kills", "starts"}:
            self.counts[name] = self.counts.get(name, 0) + one.counts[name]
        if problems:
            self.mismatches += 1
            self.failures.append({"where": where, "problems": problems})

    def text(self) -> str:
        """For people."""
        lines = [
            f"soak, seed {self.seed}: {self.rounds} trainings, {self.starts} starts, {self.kills} SIGKILLs, "
            f"{self.mismatches} mismatches, {self.seconds:.0f} s"
        ]
        lines += [f"  {name}: {number}" for name, number in sorted(self.counts.items())]
        lines += [f"  MISMATCH {failure['where']}: {'; '.join(failure['problems'])}" for failure in self.failures]
        return "\n".join(lines)


class Soak:
    """Rounds until enough was killed.

    Args:
        folder: Of all rounds; those that went well are removed. A soak that is given the folder of an earlier one with
            the same seed goes on behind its last round.
        seed: Decides what is tried.
        ranks: Numbers of ranks to draw from.
        kills_per_round: SIGKILLs in one training.
    """

    def __init__(self, folder: Path, seed: int, ranks: tuple[int, ...] = (1, 2), kills_per_round: int = 6) -> None:
        folder = folder.resolve()  # scripts run elsewhere
        self._folder, self._ranks, self._kills_per_round = folder, ranks, kills_per_round
        self._references: dict[tuple[Any, ...], Outcome] = {}
        self._state = folder / f"summary-{seed}.json"
        self.summary = Summary(seed)
        if self._state.exists():
            self.summary = Summary(**json.loads(self._state.read_text()))

    def run(self, warm: Warm, num_kills: int, tell: Callable[[str], None] = lambda line: None) -> Summary:
        """Runs rounds until there were ``num_kills`` SIGKILLs in all, and each kind at each number of ranks."""
        while self.summary.kills < num_kills or self.summary.rounds < len(KINDS) * len(self._ranks):
            left = num_kills - self.summary.kills
            self.run_round(warm, self.summary.rounds, left if left > 0 else self._kills_per_round)
            tell(self.summary.text().splitlines()[0])
        return self.summary

    def run_round(self, warm: Warm, number: int, most_kills: int = 1_000_000, sabotage: str = "") -> list[str]:
        """One training; returns what was wrong with it.

        Args:
            warm: Starts ranks.
            number: Which round.
            most_kills: SIGKILLs at most.
            sabotage: What the training forgets on purpose (see the script), so that the soak itself can be tested.
        """
        began = time.monotonic()
        dice = random.Random(f"{self.summary.seed}/{number}")
        config = draw_config(dice, number, self._ranks, elastic=max(self._ranks) > 2)
        reference = self._reference(warm, config)
        folder = self._folder / f"round-{self.summary.seed}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        most = min(self._kills_per_round, most_kills)
        one = Round(warm, config, folder, dice, most, sabotage, opening(number, config))
        one.counts[f"{config.kind} on {'any' if config.elastic else config.ranks}"] += 1
        one.run()
        problems = one.problems or differences(read_outcome(one.folder, one.heard, config.ranks), reference, config)
        self.summary.add(one, problems, str(folder))
        self.summary.seconds += time.monotonic() - began
        if problems:
            self._explain(folder, number, config, one, problems)
        else:
            shutil.rmtree(folder)
        self._state.write_text(json.dumps(dataclasses.asdict(self.summary), indent=1))
        return problems

    def _reference(self, warm: Warm, config: Config) -> Outcome:
        if config.reference not in self._references:
            folder = self._folder / f"reference-{'-'.join(map(str, config.reference))}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            calm = Config(config.kind, config.ranks, config.epochs, every="epoch", save_every=1000)
            one = Round(warm, calm, folder, random.Random(0), 0)
            one.run()
            assert not one.problems, f"{one.problems}\n{(folder / 'log').read_text()[-3000:]}"
            self._references[config.reference] = read_outcome(one.folder, one.heard, config.ranks)
            shutil.rmtree(folder)
        return self._references[config.reference]

    def _explain(self, folder: Path, number: int, config: Config, one: Round, problems: list[str]) -> None:
        ranks = " ".join(map(str, self._ranks))
        again = f"{sys.executable} {Path(__file__)} --seed {self.summary.seed} --round {number} --ranks {ranks}"
        body = {
            "problems": problems,
            "seed": self.summary.seed,
            "round": number,
            "again": again,
            "config": dataclasses.asdict(config),
            "history": one.history,
        }
        (folder / "failure.json").write_text(json.dumps(body, indent=1))


def main() -> int:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--seed", type=int, default=None, help="decides what is tried; random by default")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--round", type=int, default=None, help="one round alone")
    options.add_argument("--folder", type=Path, default=None, help="of all rounds; an earlier soak in it is continued")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, seed, tuple(given.ranks))
    with Warm() as warm:
        if given.round is not None:
            soak.run_round(warm, given.round)
        else:
            soak.run(warm, given.kills, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(dataclasses.asdict(soak.summary)) if given.json else soak.summary.text())
    if not soak.summary.mismatches and given.folder is None:
        shutil.rmtree(folder)
    return 1 if soak.summary.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
