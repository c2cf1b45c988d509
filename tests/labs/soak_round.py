"""One training of a soak: started, disturbed, and started again until it is through, as a supervisor would."""

import contextlib
import dataclasses
import json
import random
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_plan import Config, Disturbance, draw_disturbance
from soak_processes import Warm, command_of, descendants, send
from trainer_supervisor import Supervisor

from overnight.trainer.checkpoint.fence import read_fences
from overnight.trainer.checkpoint.place import PARTIAL, LocalPlace
from overnight.trainer.checkpoint.place import Token as FencingToken
from overnight.trainer.checkpoint.reading.finding import newest_good

SCRIPT = Path(__file__).with_name("soak_script.py")
EXIT_YIELDED = 75
START_SECONDS = 60.0
"""A start that takes longer hangs."""
PEERS_SECONDS = 2.0
"""So long may the rest of a gang take to find out that a rank is gone; then it is killed, as a supervisor does."""

Token = tuple[int, int]
"""(attempt, generation)."""


@dataclass
class Start:
    """One start of a training under one token: its processes, its supervisor, and what is known about it."""

    token: Token
    ranks: int
    pids: list[int]
    folder: Path
    supervisor: Supervisor
    least_step: int
    """The newest good checkpoint when it was started: results are equal too if it begins below, but work is lost."""
    begun_at: float = field(default_factory=time.monotonic)
    codes: dict[int, int] = field(default_factory=dict)
    disturbed: bool = False
    peers_end_at: float | None = None
    """When the rest is killed; known once a rank has ended."""
    lets_peers_end: bool = True
    ended_by_us: bool = False

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended."""
        return len(self.codes) == len(self.pids)

    @property
    def exit_codes(self) -> list[int | None]:
        """Of the ranks, in their order."""
        return [self.codes.get(pid) for pid in self.pids]

    def processes(self) -> list[int]:
        """The ranks that live and everything below them."""
        alive = [pid for pid in self.pids if pid not in self.codes]
        return alive + [below for pid in alive for below in descendants(pid)]

    def num_updates(self) -> int:
        """Micro-batches that rank 0 wrote down."""
        path = self.folder / f"notes-{self.token[0]}.{self.token[1]}-0.jsonl"
        try:
            return path.read_bytes().count(b"\n")
        except OSError:
            return 0

    def saves(self) -> tuple[int, int]:
        """Saves of this token that have begun, and those of them that are published and still there."""
        with contextlib.suppress(OSError):
            listed = [path.name for path in (self.folder / "checkpoints").iterdir()]
            names = [name for name in listed if f".attempt-{self._token_text}" in name]
            published = [name for name in names if not name.endswith(PARTIAL)]
            return len(names), len(published)
        return 0, 0

    @property
    def _token_text(self) -> str:
        return f"{self.token[0]}.{self.token[1]}"


class Round:
    """Runs one training to its end.

    Args:
        warm: Starts ranks.
        config: The training.
        folder: Empty; becomes the trial's.
        dice: Decides all that is random.
        num_kills: After so many SIGKILLs it is left alone.
        sabotage: What the script forgets on purpose.
        opening: Disturbances that come first.
    """

    def __init__(
        self,
        warm: Warm,
        config: Config,
        folder: Path,
        dice: random.Random,
        num_kills: int,
        sabotage: str = "",
        opening: Sequence[Disturbance] = (),
    ) -> None:
        self._opening = list(opening)
        self._sabotage = sabotage
        self._warm, self._config, self._dice = warm, config, dice
        self.folder = folder
        self._num_kills = num_kills
        self._place = LocalPlace(folder / "checkpoints")
        self.counts: Counter[str] = Counter()
        self.history: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.heard: dict[Token, list[tuple[str, dict[str, Any]]]] = {}
        self._sockets = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # a socket's path is short
        self._token: Token = (0, 1)
        self._starts: list[Start] = []
        self._zombies: list[tuple[Start, float]] = []

    def run(self) -> None:
        """Starts it again and again until all ranks ran through."""
        try:
            while not self.problems:
                start = self._begin()
                self._watch(start)
                self._end(start)
                self._judge_beginning(start)
                if start.exit_codes == [0] * start.ranks:
                    break
                self._judge(start)
                if len(self.history) > 40 + 4 * self._num_kills:
                    self.problems.append("it makes no progress")
        finally:
            self._sweep([])
            for zombie, _ in self._zombies:
                zombie.supervisor.close()
            shutil.rmtree(self._sockets)

    def _next_token(self) -> Token:
        attempt, generation = self._token
        in_place = attempt and self._dice.random() < 0.25
        self._token = (attempt, generation + 1) if in_place else (attempt + 1, 1)
        return self._token

    def _begin(self) -> Start:
        config, token = self._config, self._next_token()
        ranks = self._dice.choice([1, 2, 3]) if config.elastic else config.ranks
        attempt_dir = self.folder / "attempts" / f"{token[0]:04d}"
        attempt_dir.mkdir(parents=True, exist_ok=True)
        supervisor = Supervisor(self._sockets / f"{token[0]}.{token[1]}")
        self.heard[token] = supervisor.received
        params = {"kind": config.kind, "epochs": config.epochs, "save_every": config.save_every}
        env = {
            "OVERNIGHT_TRIAL_ID": "soak",
            "OVERNIGHT_TRIAL_NAME": "soak",
            "OVERNIGHT_EXPERIMENT": "soak",
            "OVERNIGHT_ATTEMPT_ID": f"soak-{token[0]}",
            "OVERNIGHT_ATTEMPT": str(token[0]),
            "OVERNIGHT_GENERATION": str(token[1]),
            "OVERNIGHT_TRIAL_DIR": str(self.folder),
            "OVERNIGHT_ATTEMPT_DIR": str(attempt_dir),
            "OVERNIGHT_CHECKPOINTS": str(self.folder / "checkpoints"),
            "OVERNIGHT_PARAMS": json.dumps({**params, "workers": config.workers}),
            "OVERNIGHT_SEED": "11",
            "OVERNIGHT_SUPERVISOR": supervisor.path,
            "SOAK_EVERY": config.every,
            "SOAK_KEEP": str(config.keep),
            "SOAK_SABOTAGE": self._sabotage,
        }
        log = str(self.folder / "log")
        order = {"script": str(SCRIPT), "argv": [], "cwd": str(self.folder), "env": env, "ranks": ranks, "log": log}
        self.counts["starts"] += 1
        least_step = self._newest_step()
        start = Start(token, ranks, self._warm.start(order), self.folder, supervisor, least_step)
        self._starts.append(start)
        return start

    def _newest_step(self) -> int:
        newest = newest_good(self._place, lambda line: None)
        return newest[0].step if newest is not None else 0

    def _watch(self, start: Start) -> None:
        """Disturbs a start until it is over, or until it has become a zombie."""
        while not start.is_over:
            if self.counts["kills"] >= self._num_kills:
                self._wait(start, lambda: False)
                return
            disturbance = self._opening.pop(0) if self._opening else draw_disturbance(self._dice)
            if self._wait_for_moment(start, disturbance):
                self._disturb(start, disturbance)
                if disturbance.what == "zombie":
                    return

    def _wait_for_moment(self, start: Start, disturbance: Disturbance) -> bool:
        """Waits for it; returns whether the start still runs then."""
        amount, before = disturbance.amount, start.num_updates()
        begun_before, published_before = start.saves()
        seconds = amount if disturbance.when == "start" else 3.0
        due_at = (start.begun_at if disturbance.when == "start" else time.monotonic()) + seconds
        seen = [begun_before, published_before, 0, 0]

        def has_come() -> bool:
            if time.monotonic() >= due_at:
                return True
            if disturbance.when == "update":
                return start.num_updates() - before >= amount
            if disturbance.when in ("save", "commit"):
                begun, published = start.saves()
                seen[2] += begun > seen[0]
                seen[3] += published > seen[1]
                seen[0], seen[1] = begun, published
                return seen[2 if disturbance.when == "save" else 3] >= amount
            return False

        if not self._wait(start, has_come):
            return False
        time.sleep(disturbance.delay_seconds)
        return True

    def _wait(self, start: Start, condition: Callable[[], bool]) -> bool:
        """Polls until the condition holds (True) or every rank has ended (False)."""
        while True:
            if self._warm.hears_of_an_end():
                self._reap()
            if start.is_over:
                return False
            if condition():
                return True
            self._wake_zombies()
            if time.monotonic() - start.begun_at > START_SECONDS:
                self.problems.append(f"start {start.token} hangs")
                self._sweep([])
            self._end_peers(start)
            self._warm.hears_of_an_end(0.001)

    def _end_peers(self, start: Start) -> None:
        if not start.codes:
            return
        if start.peers_end_at is None:
            start.peers_end_at = time.monotonic() + (PEERS_SECONDS if start.lets_peers_end else 0.0)
        if time.monotonic() >= start.peers_end_at and (left := start.processes()):
            for pid in left:
                send(pid, signal.SIGKILL)
            self.counts["gangs ended for a lost rank"] += not start.ended_by_us
            start.ended_by_us = True

    def _reap(self) -> None:
        for pid, code in self._warm.reap().items():
            for one in self._starts:
                if pid in one.pids:
                    one.codes[pid] = code
        self._starts = [one for one in self._starts if not one.is_over]

    def _disturb(self, start: Start, disturbance: Disturbance) -> None:
        ranks = [pid for pid in start.pids if pid not in start.codes]
        group = start.processes()
        what, hit = disturbance.what, 0
        if not ranks:
            return
        start.disturbed = True
        if what in ("rank", "helper", "worker", "any", "two", "all"):
            helpers = [pid for pid in group if pid not in ranks]
            workers = [pid for pid in helpers if command_of(pid) == command_of(ranks[0])]  # forked, not executed
            victims = {
                "rank": lambda: [self._dice.choice(ranks)],
                "helper": lambda: [self._dice.choice(helpers or group)],
                "worker": lambda: [self._dice.choice(workers or helpers or group)],
                "any": lambda: [self._dice.choice(group)],
                "two": lambda: self._dice.sample(group, min(2, len(group))),
                "all": lambda: group,
            }[what]()
            start.lets_peers_end &= disturbance.lets_peers_end
            hit = sum([send(pid, signal.SIGKILL) for pid in victims])
            self.counts["kills"] += hit
            self.counts["loader workers killed"] += len(set(victims) & set(workers))
        elif what == "yield":
            hit = send(self._dice.choice(ranks), signal.SIGTERM)
        elif what == "stop":
            victim = self._dice.choice(group)
            hit = send(victim, signal.SIGSTOP)
            time.sleep(disturbance.pause_seconds)
            send(victim, signal.SIGCONT)
        else:
            hit = sum([send(pid, signal.SIGSTOP) for pid in group])
            self._zombies.append((start, time.monotonic() + disturbance.pause_seconds))
        self.counts[f"{what} at {disturbance.when}"] += bool(hit)
        self.history.append({"token": start.token, **dataclasses.asdict(disturbance), "hit": hit})

    def _wake_zombies(self) -> None:
        for zombie, due_at in self._zombies:
            if time.monotonic() >= due_at:
                for pid in zombie.processes():
                    send(pid, signal.SIGCONT)

    def _end(self, start: Start) -> None:
        """What a supervisor does at the end of an attempt: nothing of it is left. Zombies keep their supervisors."""
        if not start.is_over:
            return
        self._sweep([pid for zombie, _ in self._zombies for pid in zombie.processes()])
        start.supervisor.close()
        over = [zombie for zombie, _ in self._zombies if zombie.is_over]
        for zombie in over:
            zombie.supervisor.close()
        self._zombies = [(zombie, at) for zombie, at in self._zombies if zombie not in over]

    def _sweep(self, spared: list[int]) -> None:
        """Kills everything below the warm process but what is spared, and reaps it."""
        deadline = time.monotonic() + 10
        while True:
            self._reap()
            left = [pid for pid in descendants(self._warm.pid) if pid not in spared]
            if not left:
                return
            for pid in left:
                send(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} do not end")
            select.select([], [], [], 0.002)

    def _judge_beginning(self, start: Start) -> None:
        """A start goes on from the newest checkpoint, or from one that a zombie has published meanwhile."""
        fence = read_fences(self._place).get(FencingToken(*start.token))
        if fence is None:
            return  # killed before it claimed the place
        step = fence.parent.step if fence.parent is not None else 0
        self.counts["starts behind step 0"] += step > 0
        if step < start.least_step:
            self.problems.append(f"start {start.token} began at step {step}, below the good one of {start.least_step}")

    def _judge(self, start: Start) -> None:
        """A start that nobody disturbed must not end by itself."""
        codes = start.exit_codes
        self.counts["yields"] += codes == [EXIT_YIELDED] * start.ranks
        if not start.disturbed:
            self.problems.append(f"start {start.token} ended with {codes} although nothing was done to it")
