"""The writer: many requests in one commit, each with its own fate; busy, full and lost databases."""

import asyncio
import contextlib
import shutil
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from overnight.core.clock import SystemClock
from overnight.core.errors import (
    ConflictError,
    InvalidSpecError,
    NetworkFilesystemError,
    NotFoundError,
    SetupError,
    StoreBusyError,
    StoreFullError,
)
from overnight.core.ids import new_id
from overnight.store import backends, events, experiments, filesystems, leaders
from overnight.store.engine import Store, touch
from overnight.store.events import NewEvent
from overnight.store.writer import MAX_GROUP

WAIT_SECONDS = 30.0


def add(store: Store, name: str) -> Any:
    return lambda conn: experiments.ensure(conn, new_id, store.clock.now(), name)


def names(store: Store) -> set[str]:
    with store.read() as conn:
        return {experiment.name for experiment in experiments.list_(conn)}


def touch_one(topic: str, conn: sa.Connection) -> None:
    touch(conn, topic)


@contextlib.contextmanager
def paused(store: Store) -> Iterator[None]:
    """Holds the writer inside a request, so that what comes meanwhile shares the next commit."""
    entered, leave = threading.Event(), threading.Event()

    def wait(_conn: sa.Connection) -> None:
        entered.set()
        assert leave.wait(WAIT_SECONDS)

    future = store.submit(wait)
    assert entered.wait(WAIT_SECONDS)
    try:
        yield
    finally:
        leave.set()
        future.result(WAIT_SECONDS)


class TestGroupCommit:
    def test_a_failing_request_takes_nothing_down_with_it(self, store: Store) -> None:
        def fail(conn: sa.Connection) -> None:
            add(store, "half")(conn)
            raise ValueError("mine alone")

        def break_a_rule(conn: sa.Connection) -> None:
            add(store, "half")(conn)
            conn.execute(sa.text("INSERT INTO experiments (id) VALUES ('x')"))

        with paused(store):
            good = [store.submit(add(store, f"good-{index}")) for index in range(5)]
            bad = store.submit(fail)
            broken = store.submit(break_a_rule)
            good += [store.submit(add(store, f"good-{index}")) for index in range(5, 10)]
        assert {future.result(WAIT_SECONDS).name for future in good} == {f"good-{index}" for index in range(10)}
        with pytest.raises(ValueError, match="mine alone"):
            bad.result(WAIT_SECONDS)
        with pytest.raises(ConflictError):
            broken.result(WAIT_SECONDS)
        assert names(store) == {f"good-{index}" for index in range(10)}

    def test_waiting_requests_share_commits(self, store: Store) -> None:
        heard: list[frozenset[str]] = []
        store.subscribe(heard.append)
        with paused(store):
            futures = [store.submit(partial(touch_one, f"n{number}")) for number in range(MAX_GROUP + 10)]
        for future in futures:
            future.result(WAIT_SECONDS)
        assert [len(topics) for topics in heard] == [MAX_GROUP, 10]

    def test_event_numbers_have_no_gaps_when_requests_fail(self, store: Store) -> None:
        def fail(conn: sa.Connection) -> None:
            events.append(conn, store.clock.now(), NewEvent("test", "lost", "me"))
            raise ValueError

        def keep(conn: sa.Connection) -> int:
            return events.append(conn, store.clock.now(), NewEvent("test", "kept", "me"))

        with paused(store):
            futures: list[Future[Any]] = [store.submit(fail if index % 3 else keep) for index in range(30)]
        assert [future.result(WAIT_SECONDS) for future in futures[::3]] == list(range(1, 11))
        with store.read() as conn:
            assert [event.seq for event in events.page(conn).items] == list(range(1, 11))

    def test_a_lone_request_that_fails_leaves_nothing(self, store: Store) -> None:
        def fail(conn: sa.Connection) -> None:
            add(store, "half")(conn)
            raise NotFoundError("no")

        with pytest.raises(NotFoundError):
            store.write(fail)
        assert names(store) == set()
        store.write(add(store, "next"))
        assert names(store) == {"next"}


class TestSubscribers:
    def test_they_hear_before_the_caller_goes_on_and_see_the_commit(self, store: Store) -> None:
        seen: list[set[str]] = []
        store.subscribe(lambda topics: seen.append(names(store)))
        store.write(add(store, "digits"))
        assert seen == [{"digits"}]

    def test_they_do_not_hear_of_what_failed(self, store: Store) -> None:
        heard: list[frozenset[str]] = []
        store.subscribe(heard.append)

        def fail(conn: sa.Connection) -> None:
            touch(conn, "lost")
            raise ValueError

        with paused(store):
            futures = [store.submit(fail), store.submit(lambda conn: touch(conn, "kept"))]
        assert isinstance(futures[0].exception(WAIT_SECONDS), ValueError)
        futures[1].result(WAIT_SECONDS)
        assert heard == [frozenset({"kept"})]

    def test_a_failing_one_hurts_nobody(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        heard: list[frozenset[str]] = []

        def fail(_topics: frozenset[str]) -> None:
            raise ZeroDivisionError

        store.subscribe(fail)
        stop = store.subscribe(heard.append)
        store.write(lambda conn: touch(conn, "a"))
        stop()
        store.write(lambda conn: touch(conn, "b"))
        assert heard == [frozenset({"a"})]
        assert "ZeroDivisionError" in caplog.text

    def test_one_that_waits_for_a_write_is_told_so(self, store: Store) -> None:
        errors: list[Exception] = []

        def wait(_topics: frozenset[str]) -> None:
            try:
                store.write(lambda conn: None)
            except RuntimeError as error:
                errors.append(error)

        store.subscribe(wait)
        store.write(lambda conn: touch(conn, "a"))
        assert len(errors) == 1


class TestReadersAndLife:
    def test_a_reader_sees_one_moment(self, store: Store) -> None:
        store.write(add(store, "before"))
        with store.read() as conn:
            assert [row.name for row in experiments.list_(conn)] == ["before"]
            store.write(add(store, "after"))
            assert [row.name for row in experiments.list_(conn)] == ["before"]
        assert names(store) == {"before", "after"}

    def test_a_reader_cannot_write(self, store: Store) -> None:
        with pytest.raises((sa.exc.DBAPIError, SetupError)), store.read() as conn:
            add(store, "sneaked")(conn)
        assert names(store) == set()

    async def test_a_write_cancelled_before_its_turn_does_not_happen(self, store: Store) -> None:
        with paused(store):
            task = asyncio.ensure_future(store.awrite(add(store, "cancelled")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await store.awrite(add(store, "kept"))
        assert names(store) == {"kept"}

    def test_close_finishes_what_is_queued(self, store: Store, store_url: str) -> None:
        with paused(store):
            future = store.submit(add(store, "queued"))
            closer = threading.Thread(target=store.close)
            closer.start()
        closer.join(WAIT_SECONDS)
        assert future.result(0).name == "queued"
        with pytest.raises(StoreBusyError, match="closed"):
            store.write(add(store, "late"))
        with Store.open(store_url, SystemClock(), migrate=False) as again:
            assert names(again) == {"queued"}

    def test_a_whole_database_has_no_problems(self, store: Store) -> None:
        store.write(add(store, "digits"))
        assert store.check() == []

    def test_the_url_hides_a_password(self, store: Store) -> None:
        assert "secret" not in sa.make_url("postgresql://me:secret@/x").render_as_string()
        assert store.url.startswith(("sqlite:///", "postgresql"))


class TestSqlite:
    def test_a_lock_held_for_a_while_is_waited_for(self, sqlite_store: Store, tmp_path: Path) -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "overnight.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            future = sqlite_store.submit(add(sqlite_store, "waited"))
            with pytest.raises(TimeoutError):
                future.result(0.1)
            other.execute("ROLLBACK")
            assert future.result(WAIT_SECONDS).name == "waited"

    def test_a_lock_that_stays_fails_all_and_the_thread_lives_on(
        self, tmp_path: Path, sqlite_template: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends, "BUSY_TIMEOUT_SECONDS", 0.05)
        path = tmp_path / "overnight.db"
        shutil.copy(sqlite_template, path)
        with (
            Store.open(f"sqlite:///{path}", SystemClock(), migrate=False, retry_delays=(0.01,)) as store,
            contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
        ):
            with paused(store):
                futures = [store.submit(add(store, f"n{index}")) for index in range(3)]
            for future in futures:
                future.result(WAIT_SECONDS)
            other.execute("BEGIN IMMEDIATE")
            futures = [store.submit(add(store, f"m{index}")) for index in range(3)]
            errors = [future.exception(WAIT_SECONDS) for future in futures]
            assert all(isinstance(error, StoreBusyError) for error in errors)
            other.execute("ROLLBACK")
            store.write(add(store, "after"))
            assert names(store) == {"n0", "n1", "n2", "after"}

    def test_a_full_database_fails_all_and_works_again_with_space(self, sqlite_store: Store) -> None:
        sqlite_store.write(add(sqlite_store, "before"))

        def cap(conn: sa.Connection) -> None:
            pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
            conn.exec_driver_sql(f"PRAGMA max_page_count={pages + 2}")  # of this connection

        def fill(conn: sa.Connection) -> None:
            experiments.ensure(conn, new_id, sqlite_store.clock.now(), "big", description="x" * 1_000_000)

        sqlite_store.write(cap)
        with paused(sqlite_store):
            futures = [sqlite_store.submit(add(sqlite_store, "small")), sqlite_store.submit(fill)]
        for future in futures:
            assert isinstance(future.exception(WAIT_SECONDS), StoreFullError)
        assert names(sqlite_store) == {"before"}
        sqlite_store.write(fill)  # the writer has reconnected, without the cap
        assert names(sqlite_store) == {"before", "big"}
        assert sqlite_store.check() == []

    def test_a_full_disk(self, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True)
        if mount.returncode != 0:
            pytest.skip("mounting a small tmpfs needs root")
        try:
            with Store.open(f"sqlite:///{disk}/overnight.db", SystemClock(), retry_delays=(0.01,)) as store:
                store.write(add(store, "before"))
                ballast = disk / "ballast"
                with contextlib.suppress(OSError), ballast.open("wb") as file:
                    while True:
                        file.write(b"x" * 4096)
                        file.flush()
                with pytest.raises(StoreFullError):
                    for index in range(2_000):
                        store.write(add(store, f"more-{index}"))
                kept = names(store)
                with pytest.raises(StoreFullError):
                    Store.open(f"sqlite:///{disk}/other.db", SystemClock())
                ballast.unlink()
                store.write(add(store, "after"))
                assert names(store) == kept | {"after"}
                assert store.check() == []
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def test_what_is_no_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "overnight.db"
        path.write_bytes(b"this is no database" * 1_000)
        with pytest.raises(SetupError, match="damaged") as caught:
            Store.open(f"sqlite:///{path}", SystemClock())
        assert "db backup" in caught.value.hint and "db check" not in caught.value.hint, "that is what said it"

    def test_the_file_is_closed_to_others(self, tmp_path: Path) -> None:
        path = tmp_path / "home" / "overnight.db"
        Store.open(f"sqlite:///{path}", SystemClock()).close()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_durable_settings(self, sqlite_store: Store) -> None:
        def pragma(conn: sa.Connection, name: str) -> Any:
            return conn.exec_driver_sql(f"PRAGMA {name}").scalar_one()

        settings = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        assert sqlite_store.write(lambda conn: {name: pragma(conn, name) for name in settings}) == settings

    def test_a_network_file_system_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(f"server:/home {tmp_path} nfs4 rw 0 0\n")
        monkeypatch.setattr(filesystems, "MOUNTS", mounts)
        with pytest.raises(NetworkFilesystemError, match="nfs4") as caught:
            Store.open(f"sqlite:///{tmp_path}/home/overnight.db", SystemClock())
        assert "OVERNIGHT_HOME" in caught.value.hint
        assert "postgresql://" in caught.value.hint
        assert not (tmp_path / "home").exists()

    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "nonsense"])
    def test_a_url_that_cannot_hold_a_store(self, url: str) -> None:
        with pytest.raises(InvalidSpecError):
            Store.open(url, SystemClock())


@pytest.mark.postgres
class TestPostgres:
    @pytest.fixture
    def database(self, postgres: Any, postgres_template: str) -> Iterator[str]:
        name = postgres.create(postgres_template)
        yield name
        postgres.drop(name)

    def test_a_lost_connection_is_made_again(self, postgres: Any, database: str) -> None:
        with Store.open(postgres.url(database), SystemClock(), migrate=False, retry_delays=(0.01, 0.1, 1.0)) as store:
            store.write(add(store, "before"))
            with store.read() as conn:
                conn.execute(sa.text("SELECT 1"))
            with postgres.connect() as admin:
                query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                assert len(admin.execute(query, (database,)).fetchall()) == 2
            store.write(add(store, "after"))
            assert names(store) == {"before", "after"}

    def test_a_commit_whose_answer_was_lost_is_not_done_twice(self, postgres: Any, database: str) -> None:
        with AnswerEater(postgres.socket_dir) as proxy:
            url = f"postgresql://{postgres.user}@/{database}?host={proxy.directory}"
            with Store.open(url, SystemClock(), migrate=False, retry_delays=(0.01, 0.1, 1.0)) as store:
                store.write(lambda conn: leaders.acquire(conn, holder="me", now=store.clock.now(), seen=None))
                proxy.eat_next_commit()
                assert store.write(lambda conn: leaders.renew(conn, holder="me", now=store.clock.now()))
                assert proxy.num_eaten == 1
                with store.read() as conn:
                    found = leaders.read(conn)
                assert found is not None
                assert found.counter == 2

    def test_no_server(self, tmp_path: Path) -> None:
        with pytest.raises(StoreBusyError):
            Store.open(f"postgresql://me@/x?host={tmp_path}", SystemClock())

    def test_idle_transactions_are_ended(self, postgres: Any, database: str) -> None:
        with Store.open(postgres.url(database), SystemClock(), migrate=False) as store:
            query = sa.text("SHOW idle_in_transaction_session_timeout")
            assert store.write(lambda conn: conn.scalar(query)) == "1min"


class AnswerEater:
    """A proxy before PostgreSQL that lets a COMMIT through and breaks the connection instead of passing the answer."""

    def __init__(self, upstream: Path) -> None:
        self.directory = upstream / "proxy"
        self._upstream = upstream / ".s.PGSQL.5432"
        self._armed = threading.Event()
        self.num_eaten = 0

    def eat_next_commit(self) -> None:
        self._armed.set()

    def __enter__(self) -> "AnswerEater":
        self.directory.mkdir(exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / ".s.PGSQL.5432"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self.directory)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._upstream))
                eating = threading.Event()
                threading.Thread(target=self._forward, args=(client, server, eating), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client, eating), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, eating: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._armed.is_set() and b"COMMIT" in data:
                    self._armed.clear()
                    eating.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _answer(self, server: socket.socket, client: socket.socket, eating: threading.Event) -> None:
        with contextlib.suppress(OSError), client, server:
            while data := server.recv(65536):
                if eating.is_set() and b"COMMIT" in data:
                    self.num_eaten += 1
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
