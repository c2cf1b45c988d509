"""A whole house for fault tests: ``overnight up`` as a user starts it, real trials, and a look at its processes."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mlflow_lab import MlflowDatabase

from overnight.agents.client import Client
from overnight.core.enums import LeaseState, Mode, RunKind, TrialState
from overnight.core.errors import UnavailableError
from overnight.core.inherited import inherited
from overnight.core.models.api import Event, ProposalIn, Trial
from overnight.core.models.spec import Command, Objective, TrialConfig
from overnight.core.settings import Settings
from overnight.platform.identity import holder
from overnight.platform.node import reaper
from overnight.platform.node.identity import Identity, read_stat
from overnight.trainer.data.audit import audit

SCRIPTS = Path(__file__).parent / "house_scripts"
STEPS_PER_EPOCH = BATCH = 16
NUM_STEPS = 4 * STEPS_PER_EPOCH
SCORE = Objective(metric="score", mode=Mode.MAX, reduce="last")
PRINTED = Objective(
    metric="score", mode=Mode.MAX, reduce="last", source="pattern", pattern=r"step (?P<step>\d+) score=(?P<value>\S+)"
)
DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.1

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str, seconds: float = DEADLINE_SECONDS) -> T:
    """Polls until the condition is true; a server that is away is asked again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if value := look():
                return value
        except UnavailableError:
            pass
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_SECONDS)


class House:
    """A home with ``overnight up``.

    Args:
        root: An empty folder.
        pool: Its devices.
        **settings: More fields of the settings, such as ``lease_seconds=2``.
    """

    def __init__(self, root: Path, pool: str = "fake:4", **settings: Any) -> None:
        values = {"heartbeat_seconds": 0.5, "probe_seconds": 0.5, "grace_seconds": 5.0, **settings}
        self.settings = Settings(home=root / "home", pool=pool, **values)
        self.home = self.settings.paths
        self.home.root.mkdir(parents=True)
        self.claims = root / "claims"
        self.claims.mkdir()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
        clean |= {"PYTHONUNBUFFERED": "1"}  # as many images have it; no trial takes it along
        named = {f"OVERNIGHT_{name.upper()}": str(value) for name, value in (values | {"pool": pool}).items()}
        self.env = {**clean, **named, "OVERNIGHT_HOME": str(self.home.root)}
        self.process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None

    # -- life

    def up(self) -> None:
        """``overnight up`` in a terminal of its own; returns once its devices can be leased."""
        self.home.logs.mkdir(exist_ok=True)
        with (self.home.logs / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "overnight", "up"],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_for(lambda: self._is_ready(), f"the house is up:\n{self.log('up')}")

    def _is_ready(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log("up")
        return holder(self.home.server_lock) is not None and bool(self.client.status().devices)

    def interrupt(self) -> int:
        """Ctrl-C; the exit code of ``up``."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def down(self) -> None:
        """``overnight down``, as a user says it, and the look for whatever it left."""
        self.cli("down")
        assert self.process is not None
        self.process.wait(30)
        self.close_client()
        wait_for(lambda: not self.processes(), "no process of the home is left", 30)
        assert not self.recorded_alive(), f"processes of attempts live: {self.recorded_alive()}"
        assert self.claimed() == []

    def destroy(self) -> None:
        """Ends what is left after a test that failed."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.close_client()
        for pid in [*self.processes(), *self.recorded_alive()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cli(self, *words: str, cwd: Path | None = None) -> str:
        """Runs a command of the command line, which must succeed; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "overnight", *words],
            cwd=cwd or self.home.root, env=self.env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def log(self, name: str) -> str:
        """A log of the home."""
        path = self.home.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- what the server says

    @property
    def client(self) -> Client:
        """A client that waits for a server that is being restarted."""
        if self._client is None:
            self._client = Client(self.settings)
        return self._client

    def close_client(self) -> None:
        """Closes its connections."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def submit(self, script: str = "tiny.py", params: dict[str, Any] | None = None, **config: Any) -> str:
        """Proposes a trial of one of the lab's scripts; returns its id."""
        values = {
            "experiment": "house",
            "run": Command(kind=RunKind.SCRIPT, target=script),
            "python": sys.executable,
            "workdir": str(SCRIPTS),
            "objective": SCORE,
            "max_retries": 100,
            "env": {**inherited(self.env), "HOUSE_CLAIMS": str(self.claims)},
            **config,
        }
        answer = self.client.propose(ProposalIn(config=TrialConfig(**values), params=params or {}))
        return answer.trials[0].id

    def twin(self, trial_id: str) -> str:
        """Proposes the same training once more, fast and without saves on the way, for nobody to disturb.

        Trials that differ in their pause alone have one twin: the same work is not done twice.
        """
        trial = self.trial(trial_id)
        fast = {"pause": 0.0, "every": 1_000_000, "deaf_at": 0}
        answer = self.client.propose(ProposalIn(config=trial.config, params={**trial.params, **fast}))
        return answer.trials[0].id

    def trial(self, trial_id: str) -> Trial:
        """With attempts and checkpoints."""
        return self.client.trial(trial_id)

    def until(
        self, trial_id: str, condition: Callable[[Trial], Any], what: str, seconds: float = DEADLINE_SECONDS
    ) -> Trial:
        """Waits for something about a trial."""
        seen: list[Trial] = []

        def look() -> Trial | None:
            seen[:] = [self.trial(trial_id)]
            return seen[0] if condition(seen[0]) else None

        try:
            return wait_for(look, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story(seen[0]) if seen else ''}") from None

    def until_saved(self, trial_id: str, seconds: float = DEADLINE_SECONDS) -> Trial:
        """Waits until it runs and its present attempt has committed a checkpoint."""

        def is_saved(trial: Trial) -> bool:
            at_work = trial.state is TrialState.RUNNING
            return at_work and any(one.attempt == trial.attempts_made for one in trial.checkpoints)

        return self.until(trial_id, is_saved, "it has saved", seconds)

    def completed(self, trial_ids: Iterable[str], seconds: float = DEADLINE_SECONDS) -> list[Trial]:
        """Waits until trials have ended; all of them must be COMPLETED."""
        trial_ids = list(trial_ids)
        ended = {trial.id: trial for trial in self.client.wait(trial_ids, timeout=seconds)}
        for trial_id in trial_ids:
            trial = self.trial(trial_id)
            assert trial_id in ended and trial.state is TrialState.COMPLETED, self.story(trial)
        return [self.trial(trial_id) for trial_id in trial_ids]

    def story(self, trial: Trial) -> str:
        """What happened to a trial, for the message of a test that fails."""
        lines = [f"{trial.name} is {trial.state}: {trial.state_cause}; step {trial.step}; {trial.error}"]
        lines += [
            f"  attempt {one.number} on {one.devices}: {one.outcome}, {one.cause}, lease {one.lease_state}, "
            f"{one.created_at:%X.%f} to {one.ended_at}"
            for one in trial.attempts
        ]
        return "\n".join([*lines, self.log("node")[-3000:], self.log("server")[-3000:]])

    def events(self) -> list[Event]:
        """All of the home, oldest first."""
        found: list[Event] = []
        while True:
            page = self.client.event_page(after=found[-1].seq if found else 0, limit=1000)
            found.extend(page.items)
            if page.cursor is None or not page.items:
                return found

    # -- processes

    def pid(self, lock: str) -> int | None:
        """Pid of who holds ``node``, ``server`` or ``up``."""
        identity = holder(getattr(self.home, f"{lock}_lock"))
        return identity.pid if identity is not None else None

    def zygotes(self) -> list[int]:
        """Pids of the warm processes."""
        daemon = self.pid("node")
        return [pid for pid in reaper.children(daemon) if b"zygote" in cmdline(pid)] if daemon else []

    def pids(self, trial: Trial) -> dict[str, Any]:
        """What the supervisor of a trial's newest attempt has recorded, as identities."""
        path = self.home.attempt_dir(trial.id, trial.attempts_made) / "pids.json"
        data = wait_for(lambda: path.exists() and json.loads(path.read_text()), f"{path} exists")
        ranks = [Identity.from_dict(data["ranks"][rank]) for rank in sorted(data["ranks"])]
        return {"supervisor": Identity.from_dict(data["supervisor"]), "ranks": ranks}

    def processes(self) -> list[int]:
        """Living processes that name the home in their command line or first environment, but for clients."""
        root = os.fsencode(self.home.root)
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid() or not is_alive(int(entry.name)):
                continue
            if root in read(entry / "environ") or root in read(entry / "cmdline"):
                found.append(int(entry.name))
        return found

    def recorded_alive(self) -> list[int]:
        """Living processes that some ``pids.json`` names."""
        found = []
        for path in self.home.root.glob("trials/*/attempts/*/pids.json"):
            data = json.loads(path.read_text())
            known = [Identity.from_dict(one) for one in (data["supervisor"], *data["ranks"].values())]
            known += [Identity(pid, start, data["boot"]) for pid, start in data["census"]]
            found += [one.pid for one in known if one.alive()]
        return found

    def claimed(self) -> list[str]:
        """Devices of which some process still holds the claim."""
        found = []
        for path in sorted(self.claims.iterdir()):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(f"{path.name}: {path.read_text()}")
        return found

    # -- what must hold after anything

    def check_leases(self) -> None:
        """No device was ever leased while its last lease was not clean; none is leased now."""
        holders: dict[str, str | None] = {}
        for event in self.events():
            if event.kind == "trial.state" and event.after == TrialState.STARTING:
                for device in event.data["devices"]:
                    assert device not in holders, f"{device} is leased to {holders[device]} and to {event.attempt_id}"
                    holders[device] = event.attempt_id
            elif event.kind == "lease.clean":
                for device in event.data["devices"]:
                    assert holders.pop(device) == event.attempt_id
        wait_for(lambda: not any(d.attempt_id for d in self.client.devices()), "all devices are free", 60)

    def check_ends(self, trials: Iterable[Trial]) -> None:
        """Each was completed once, by its last attempt, and every attempt is closed and clean."""
        completions = Counter(event.trial_id for event in self.events() if event.after == TrialState.COMPLETED)
        for trial in trials:
            assert completions[trial.id] == 1, self.story(trial)
            assert [one.number for one in trial.attempts] == list(range(1, trial.attempts_made + 1))
            assert all(one.outcome is not None for one in trial.attempts), self.story(trial)
            done = [one.number for one in trial.attempts if one.outcome == "completed"]
            assert done == [trial.attempts_made], self.story(trial)
            assert f"attempt {trial.attempts[-1].id} is killed" not in self.log("node"), "killed while it finished"
            wait_for(lambda trial=trial: self._is_clean(trial), f"{trial.name} is clean", 60)  # type: ignore[misc]

    def _is_clean(self, trial: Trial) -> bool:
        return all(one.lease_state is LeaseState.CLEAN for one in self.trial(trial.id).attempts)

    def check_training(self, trial: Trial, num_steps: int = NUM_STEPS) -> None:
        """Every sample once, every metric once per step."""
        assert trial.dir is not None
        counts = audit(Path(trial.dir))
        assert (counts.repeated, counts.skipped) == (0, 0), self.story(trial)
        assert counts.recorded == counts.expected == num_steps * BATCH
        assert counts.updates == num_steps
        assert trial.step == num_steps, self.story(trial)
        assert self.weights(trial)["step"] == num_steps

    def check_as_undisturbed(self, trial_ids: Iterable[str], num_steps: int = NUM_STEPS) -> None:
        """The trials ended as ones that nobody disturbed: in weights, value, samples, metrics and MLflow."""
        trials = self.completed(trial_ids)
        twins = self.completed([self.twin(trial.id) for trial in trials])
        self.check_ends([*trials, *twins])
        for trial, twin in zip(trials, twins, strict=True):
            assert twin.attempts_made == 1 and twin.id != trial.id, self.story(twin)
            self.check_training(trial, num_steps)
            assert self.weights(trial) == self.weights(twin), self.story(trial)
            assert trial.value == twin.value is not None
        self.check_mlflow([*trials, *twins])

    def weights(self, trial: Trial) -> dict[str, Any]:
        """``final.json`` of the attempt that completed the trial."""
        return json.loads((self.home.attempt_dir(trial.id, trial.attempts_made) / "final.json").read_text())

    def check_mlflow(self, trials: Iterable[Trial]) -> None:
        """MLflow says what the store says: one run each, FINISHED, every (key, step) once."""
        wait_for(lambda: self.client.status().mlflow_lag_rows == 0, "MLflow has heard everything")
        mlflow = MlflowDatabase(self.home.root / "mlflow.db")
        runs = mlflow.runs()
        for trial in trials:
            assert runs[trial.id][1] == "FINISHED", trial.name
            stored = sorted((p.key, p.step, p.value) for p in self.points(trial))
            told = sorted((key, step, value) for key, step, value, _ in mlflow.points(trial.id))
            assert [point[:2] for point in stored] == sorted({point[:2] for point in stored}), trial.name
            assert told == stored, f"{trial.name}: MLflow and the store differ\n{self.story(trial)}"

    def points(self, trial: Trial) -> list[Any]:
        """All metric points of the trial's present lineage."""
        found, cursor = [], None
        while True:
            page = self.client.metrics(trial.id, cursor=cursor)
            found += page.items
            cursor = page.cursor
            if cursor is None:
                return found


@contextmanager
def running_house(root: Path, pool: str = "fake:4", **settings: Any) -> Iterator[House]:
    """A house that is up; afterwards it is down and nothing of it is left, which is checked when the test passed."""
    house = House(root, pool, **settings)
    try:
        house.up()
        yield house
        house.down()
    finally:
        house.destroy()


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def cmdline(pid: int) -> bytes:
    """Words of its command line, NUL between them."""
    return read(Path(f"/proc/{pid}/cmdline"))


def read(path: Path) -> bytes:
    """A file of /proc; empty when the process is gone or is not ours."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
