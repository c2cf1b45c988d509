"""Writes a small database of the current schema as SQL text: ``python tests/migration/make_database.py > NNNN.sql``.

Run once for each released schema; what it wrote is kept for ever, and must upgrade.
"""

import contextlib
import sqlite3
import sys
import tempfile
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from overnight.core.clock import SystemClock
from overnight.core.enums import Outcome, TrialState
from overnight.core.models.api import ProposalIn, SweepIn
from overnight.core.models.node import DeviceReport, NodeHello, SpoolEvent
from overnight.core.models.spec import Command, Objective, SweepConfig, TrialConfig
from overnight.store import attempts, leaders, nodes, proposals, spool, sweeps
from overnight.store.engine import Store

NOW = datetime(2026, 1, 1, tzinfo=UTC)
_numbers = count(1)


def make_id(kind: str) -> str:
    """Ids that are the same each time."""
    return f"{kind}-{next(_numbers)}"


def fill(store: Store) -> None:
    """One row or more in each table: a finished trial, a running one with two attempts, a queued one."""
    common: dict[str, Any] = {"ids": make_id, "now": NOW}
    run = Command.model_validate({"kind": "script", "target": "train.py"})
    objective = Objective.model_validate({"metric": "accuracy", "mode": "max"})
    config = TrialConfig(experiment="digits", run=run, objective=objective)
    space = {"lr": {"kind": "log", "low": 1e-4, "high": 1.0}}
    sweep_in = SweepIn(config=config, sweep=SweepConfig.model_validate({"space": space}), key="sweep")
    sweep = store.write(partial(sweeps.add, **common, actor="me", sweep=sweep_in))
    asked = [
        ProposalIn(config=config, params={"lr": lr, "text": "[/bold]\x00é"}, sweep_id=sweep.id, key=f"k{lr}")
        for lr in (0.1, 0.2, 0.3)
    ]
    answers = store.write(partial(proposals.accept_many, **common, actor="me", proposals=asked))
    done, running, _ = [answer.trials[0] for answer in answers if not isinstance(answer, Exception)]
    reports = tuple(DeviceReport(index=i, kind="fake", type="fake", memory_bytes=1, uuid=f"u{i}") for i in range(2))
    hello = NodeHello(name="box", pid=1, boot_id="boot", version="1", devices=reports)
    node = store.write(partial(nodes.hello, **common, hello=hello))
    start = partial(attempts.begin, **common, node_id=node.id, cause="free")
    finished = store.write(partial(start, trial_id=done.id, expected_attempt=0, device_ids=["box:0"]))
    spooled = [
        {"seq": 1, "kind": "started", "data": {"trainer": True}},
        {"seq": 2, "kind": "report", "data": {"step": 1, "values": {"accuracy": 0.5}}},
        {"seq": 3, "kind": "metrics", "data": {"rows": [["loss", 1, "nan", 1.0], ["loss", 2, 0.1, 2.0]]}},
        {"seq": 4, "kind": "checkpoint", "data": {"step": 2, "uri": "/c/step-2", "bytes": 3}},
        {"seq": 5, "kind": "ledger", "data": {"seconds": {"productive": 1.0}, "counts": {"batches": 2}}},
        {"seq": 6, "kind": "exit", "data": {"exit_codes": [0]}},
    ]
    events = [SpoolEvent.model_validate({"generation": 1, "at": 1.0, **event}) for event in spooled]
    store.write(partial(spool.ingest, attempt_id=finished.id, generation=1, events=events, now=NOW))
    end = partial(attempts.end, now=NOW, cause="test")
    store.write(
        partial(end, attempt_id=finished.id, outcome=Outcome.COMPLETED, next_state=TrialState.COMPLETED, exit_codes=[0])
    )
    store.write(partial(attempts.clean, attempt_id=finished.id, now=NOW))
    first = store.write(partial(start, trial_id=running.id, expected_attempt=0, device_ids=["box:0"]))
    store.write(partial(end, attempt_id=first.id, outcome=Outcome.VANISHED, next_state=TrialState.QUEUED))
    store.write(partial(start, trial_id=running.id, expected_attempt=1, device_ids=["box:1"]))
    store.write(partial(leaders.acquire, holder="one", now=NOW, seen=None))


def main() -> None:
    """Writes the dump to stdout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overnight.db"
        with Store.open(f"sqlite:///{path}", SystemClock()) as store:
            fill(store)
        with contextlib.closing(sqlite3.connect(path)) as conn:
            sys.stdout.write("\n".join(conn.iterdump()) + "\n")


if __name__ == "__main__":
    main()
