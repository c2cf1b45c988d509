"""What a soak tries: trainings, and disturbances at random moments. All of it follows from the dice alone."""

import random
from dataclasses import dataclass
from typing import Any

KINDS = ("mlp", "cnn", "gpt")


@dataclass(frozen=True)
class Config:
    """One training and how it is started."""

    kind: str
    ranks: int
    epochs: int = 6
    every: str = "4"
    keep: int = 2
    save_every: int = 5
    workers: int = 0
    elastic: bool = False
    """The number of ranks differs from start to start: the order of samples must not, the last bits may."""

    @property
    def reference(self) -> tuple[Any, ...]:
        """What decides the undisturbed training."""
        return self.kind, self.ranks, self.epochs


@dataclass(frozen=True)
class Disturbance:
    """What is done, and when.

    Attributes:
        what: ``rank`` ``helper`` ``worker`` ``any`` ``two`` ``all`` (SIGKILL of a rank, of a process below one, such as
            a writer or a loader's worker, of such a worker, of any of these, of two at once, of all), ``yield``
            (SIGTERM to a rank), ``stop`` (SIGSTOP of any process, SIGCONT ``pause_seconds`` later), ``zombie`` (all
            are stopped, the next start begins, and then they go on).
        when: ``start`` (seconds after it), ``update`` (after so many), ``save`` (the so-many-th save begins),
            ``commit`` (the so-many-th is published).
        amount: Of ``when``.
        delay_seconds: After that moment.
        pause_seconds: Length of a ``stop``.
        lets_peers_end: Whether the rest of a gang may find out by itself, or is killed as a supervisor does.
    """

    what: str
    when: str
    amount: float
    delay_seconds: float
    pause_seconds: float
    lets_peers_end: bool


def draw_config(dice: random.Random, number: int, ranks: tuple[int, ...], *, elastic: bool = False) -> Config:
    """A training; the rounds take each kind at each number of ranks in turn, and the first pictures have workers."""
    kind = KINDS[number % len(KINDS)]
    workers = 2 if number == KINDS.index("cnn") else dice.choice([0, 0, 2])
    return Config(
        kind=kind,
        ranks=ranks[number // len(KINDS) % len(ranks)],
        every=dice.choice(["2", "3", "4", "7", "0.05s", "epoch"]),
        keep=dice.choice([1, 2, 3]),
        save_every=dice.choice([2, 5, 9]),
        workers=workers if kind == "cnn" else 0,
        elastic=elastic and dice.random() < 0.15,
    )


def opening(number: int, config: Config) -> tuple[Disturbance, ...]:
    """What comes before anything that the dice say, so that even a short soak has had it."""
    what = "worker" if config.workers else {0: "yield", 2: "zombie"}.get(number)
    return (Disturbance(what, "update", 8.0, 0.0, 0.1, lets_peers_end=True),) if what else ()


def draw_disturbance(dice: random.Random) -> Disturbance:
    """A disturbance."""
    whats = {"rank": 25, "helper": 15, "any": 15, "two": 10, "all": 15, "yield": 10, "stop": 10, "zombie": 5}
    what = dice.choices(list(whats), weights=list(whats.values()))[0]
    when = dice.choices(["start", "update", "save", "commit"], weights=[25, 30, 30, 15])[0]
    amount = {"start": dice.uniform(0, 0.4), "update": dice.randint(1, 14)}.get(when, dice.randint(1, 4))
    return Disturbance(
        what=what,
        when=when,
        amount=float(amount),
        delay_seconds=dice.choice([0.0, dice.uniform(0, 0.004), dice.uniform(0, 0.03)]),
        pause_seconds=dice.choice([0.02, 0.1, 0.4]),
        lets_peers_end=dice.random() < 0.5,
    )
