"""Run by a test as a process of its own: submits trials from several threads and says which were acknowledged."""

import os
import sys
import threading
from functools import partial

import sqlalchemy as sa

from overnight.core.clock import SystemClock
from overnight.core.ids import new_id
from overnight.core.models.api import Proposal, ProposalIn
from overnight.core.models.spec import Command, TrialConfig
from overnight.store import proposals
from overnight.store.engine import Store

url, acknowledged, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = TrialConfig(experiment="flood", run=Command.model_validate({"kind": "script", "target": "a.py"}))
store = Store.open(url, SystemClock(), migrate=False)
out = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def accept(conn: sa.Connection, asked: ProposalIn) -> Proposal:
    """One proposal."""
    return proposals.accept(conn, ids=new_id, now=store.clock.now(), actor="flood", proposal=asked)


def flood(lane: int) -> None:
    """Submits for ever; one line per trial, after the commit."""
    number = first
    while True:
        asked = ProposalIn(config=config, params={"lane": lane, "number": number}, replicates=2)
        answer = store.write(partial(accept, asked=asked))
        os.write(out, "".join(f"{trial.id}\n" for trial in answer.trials).encode())
        number += 1


for lane in range(4):
    threading.Thread(target=flood, args=(lane,)).start()
