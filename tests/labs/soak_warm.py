"""A warm process for the soak: forks the ranks of a start, and reaps whatever has ended, only when it is asked to.

Commands are lines of JSON on stdin, each answered by one line on stdout:

* ``{"start": order}`` with an order of :mod:`trainer_lab`: answers the pids of the ranks at once.
* ``{"reap": true}``: answers ``{pid: exit code}`` of all that ended since the last time, negative for a signal.

Since nothing is reaped unasked, a pid stays the name of the same process until the soak has heard of its end. Like a
supervisor, this process is a subreaper: what outlives its rank stays below it, where it can be found and killed.
"""

import ctypes
import gc
import json
import os
import socket
import sys
import threading
from typing import Any

from trainer_lab import child

PR_SET_CHILD_SUBREAPER = 36


def start(order: dict[str, Any]) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(order["ranks"]):
        if (pid := os.fork()) == 0:
            os._exit(child(order, rank, port) & 0xFF)
        pids.append(pid)
    return pids


def reap() -> dict[int, int]:
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()
    print(json.dumps({"threads": threading.active_count()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(start(command["start"]) if "start" in command else reap()), flush=True)


if __name__ == "__main__":
    main()
