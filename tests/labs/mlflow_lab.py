"""What a real MLflow database holds, read with plain SQL, so that the tests do not ask the code they test."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MlflowDatabase:
    """MLflow's SQLite file."""

    path: Path

    def query(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=20)
        try:
            return connection.execute(sql, args).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise
        finally:
            connection.close()

    def runs(self) -> dict[str, tuple[str, str]]:
        """Run id and status by trial id. Fails when a trial has two."""
        rows = self.query(
            "select t.value, r.run_uuid, r.status from runs r join tags t on t.run_uuid = r.run_uuid "
            "where t.key = 'overnight.trial_id' and r.lifecycle_stage = 'active'"
        )
        assert len({row[0] for row in rows}) == len(rows), f"a trial has two runs: {rows}"
        return {trial: (run, status) for trial, run, status in rows}

    def points(self, trial_id: str) -> list[tuple[str, int, float, int]]:
        """key, step, value, milliseconds: every row of the history, in order of steps."""
        run = self.runs()[trial_id][0]
        return self.query(
            "select key, step, value, timestamp from metrics where run_uuid = ? order by key, step, timestamp", run
        )

    def tags(self, trial_id: str) -> dict[str, str]:
        return dict(self.query("select key, value from tags where run_uuid = ?", self.runs()[trial_id][0]))

    def params(self, trial_id: str) -> dict[str, str]:
        return dict(self.query("select key, value from params where run_uuid = ?", self.runs()[trial_id][0]))
