"""Old databases upgrade and keep what is in them; the migrations make exactly the tables that the code expects."""

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from overnight.core.clock import SystemClock
from overnight.core.enums import TrialState
from overnight.core.errors import SetupError
from overnight.store import attempts, events, metrics, migrations, models, trials
from overnight.store.engine import Store

DATABASES = sorted(Path(__file__).with_name("databases").glob("*.sql"))

NEXT = '''
"""A migration such as may come: SQLite makes the table anew, others point to it."""
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "9999", "{head}", None, None

def upgrade():
    with op.batch_alter_table("trials", recreate="always") as batch:
        batch.add_column(sa.Column("extra", sa.Integer(), server_default="7", nullable=False))
    {then}
'''


def load(sql: Path, folder: Path) -> str:
    path = folder / "overnight.db"
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.executescript(sql.read_text())
    return f"sqlite:///{path}"


def dump(url: str) -> dict[str, list[Any]]:
    with contextlib.closing(sqlite3.connect(sa.make_url(url).database or "")) as conn:
        tables = [row[0] for row in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return {table: sorted(conn.execute(f"SELECT * FROM {table}"), key=repr) for table in tables}


@pytest.fixture
def next_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds one more migration, for this test."""

    def add(then: str) -> None:
        folder = tmp_path / "versions"
        folder.mkdir()
        (folder / "9999_next.py").write_text(NEXT.format(head=migrations.HEAD, then=then))
        made = migrations.config
        ours = Path(ScriptDirectory.from_config(made()).versions)

        def config(**attributes: Any) -> Any:
            found = made(**attributes)
            found.set_main_option("version_locations", f"{ours}:{folder}")
            return found

        monkeypatch.setattr(migrations, "config", config)
        monkeypatch.setattr(migrations, "HEAD", "9999")

    return add


@pytest.mark.parametrize("sql", DATABASES, ids=lambda path: path.stem)
def test_an_old_database_upgrades_and_keeps_its_data(sql: Path, tmp_path: Path) -> None:
    url = load(sql, tmp_path)
    before = dump(url)
    with Store.open(url, SystemClock()) as store, store.read() as conn:
        assert migrations.current(conn) == migrations.HEAD
        assert trials.counts(conn) == {TrialState.COMPLETED: 1, TrialState.STARTING: 1, TrialState.QUEUED: 1}
        done = trials.get(conn, "digits-1")
        assert (done.value, done.params["text"], len(done.checkpoints)) == (0.5, "[/bold]\x00é", 1)
        assert done.attempts[0].ledger == {"productive": 1.0, "count.batches": 2.0}
        assert [(p.key, p.step, p.text) for p in metrics.points(conn, done.id).items] == [
            ("accuracy", 1, None),
            ("loss", 1, "nan"),
            ("loss", 2, None),
        ]
        assert len(attempts.live(conn)) == 2
        assert events.last_seq(conn) == len(events.page(conn).items)
        assert store.check() == []
    after = dump(url)
    assert {table: len(rows) for table, rows in before.items() if rows} == {
        table: len(rows) for table, rows in after.items() if before.get(table)
    }


def test_every_schema_has_its_old_database() -> None:
    scripts = ScriptDirectory.from_config(migrations.config())
    assert [path.stem for path in DATABASES] == sorted(script.revision for script in scripts.walk_revisions())


def test_every_table_of_an_old_database_has_rows(tmp_path: Path) -> None:
    found = dump(load(DATABASES[-1], tmp_path))
    assert [table for table in models.metadata.tables if not found[table]] == []


def test_head_is_the_newest_script() -> None:
    assert ScriptDirectory.from_config(migrations.config()).get_current_head() == migrations.HEAD


def test_a_table_made_anew_keeps_rows_that_others_point_to(tmp_path: Path, next_migration: Any) -> None:
    url = load(DATABASES[-1], tmp_path)
    before = dump(url)
    next_migration("pass")
    Store.open(url, SystemClock()).close()
    after = dump(url)
    assert [row[-1] for row in after["trials"]] == [7, 7, 7]
    assert [row[:-1] for row in after["trials"]] == before["trials"]
    assert {t: r for t, r in after.items() if t not in {"trials", "alembic_version"}} == {
        t: r for t, r in before.items() if t not in {"trials", "alembic_version"}
    }


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, next_migration: Any) -> None:
    url = load(DATABASES[-1], tmp_path)
    before = dump(url)
    next_migration('raise RuntimeError("half way")')
    with pytest.raises(RuntimeError, match="half way"):
        Store.open(url, SystemClock())
    assert dump(url) == before


def test_one_that_breaks_references_is_undone(tmp_path: Path, next_migration: Any) -> None:
    url = load(DATABASES[-1], tmp_path)
    before = dump(url)
    next_migration('op.execute("DELETE FROM trials WHERE number = 1")')
    with pytest.raises(SetupError, match="rows that are not there"):
        Store.open(url, SystemClock())
    assert dump(url) == before


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    url = load(DATABASES[-1], tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "overnight.db")) as conn, conn:
        conn.execute("UPDATE alembic_version SET version_num = 'future'")
    with pytest.raises(SetupError, match="future"):
        Store.open(url, SystemClock())
    with pytest.raises(SetupError, match="schema future"):
        Store.open(url, SystemClock(), migrate=False)


def test_an_empty_database_is_not_used_without_migration(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="schema none"):
        Store.open(f"sqlite:///{tmp_path}/new.db", SystemClock(), migrate=False)


def test_many_threads_open_new_databases_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def open_one(index: int) -> None:
        try:
            Store.open(f"sqlite:///{tmp_path}/{index % 3}.db", SystemClock()).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=open_one, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
