"""SIGKILL of the writing process: what was acknowledged is there, what was not is whole or absent."""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from overnight.core.clock import SystemClock
from overnight.store.engine import Store

FLOOD = Path(__file__).with_name("store_flood.py")
DEADLINE_SECONDS = 60.0


def run_until_killed(url: str, acknowledged: Path, first: int, num_lines: int) -> None:
    """Floods the store and kills the process as soon as that many trials have been acknowledged."""
    already = len(acknowledged.read_bytes().splitlines()) if acknowledged.exists() else 0
    process = subprocess.Popen([sys.executable, str(FLOOD), url, str(acknowledged), str(first)])
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not acknowledged.exists() or len(acknowledged.read_bytes().splitlines()) < already + num_lines:
            assert process.poll() is None, "the flood ended by itself"
            assert time.monotonic() < deadline, "the flood is too slow"
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()


def test_nothing_acknowledged_is_lost_and_nothing_is_half(store_url: str, tmp_path: Path) -> None:
    acknowledged = tmp_path / "acknowledged"
    dice = random.Random(5)
    for first in (0, 1_000_000):
        run_until_killed(store_url, acknowledged, first, dice.randrange(20, 200))
    told = [line for line in acknowledged.read_text().splitlines() if line]
    with Store.open(store_url, SystemClock()) as store:
        assert store.check() == []
        with store.read() as conn:
            trials = conn.execute(sa.text("SELECT id, number, proposal_id, seq FROM trials ORDER BY number")).all()
            found = {row.id for row in trials}
            assert set(told) <= found
            assert [row.number for row in trials] == list(range(1, len(trials) + 1))
            assert _column(conn, "SELECT trial_id FROM events WHERE kind = 'trial.created'") == found
            assert _column(conn, "SELECT trial_id FROM outbox") == found
            per_proposal = conn.execute(sa.text("SELECT count(*) FROM trials GROUP BY proposal_id")).scalars().all()
            assert set(per_proposal) == {2}
            assert len(per_proposal) == conn.scalar(sa.text("SELECT count(*) FROM proposals"))
            seqs = conn.execute(sa.text("SELECT seq FROM events ORDER BY seq")).scalars().all()
            assert seqs == list(range(1, len(seqs) + 1))
            assert conn.scalar(sa.text("SELECT trials_made FROM experiments")) == len(trials)


def _column(conn: sa.Connection, query: str) -> set[Any]:
    return set(conn.execute(sa.text(query)).scalars())
