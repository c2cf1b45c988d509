"""A planner in a process of its own: one JSON request per line in, one JSON answer per line out.

``{"id", "config", "objective", "history", "count", "seed"}`` is answered by ``{"id", "params", "exhausted"}`` or
``{"id", "error"}``. The process ends when its input does, even in the middle of a computation: without its server it
has no purpose, and a planner that computes for ever must not outlive it.
"""

import json
import os
import queue
import sys
import threading
import traceback
from typing import Any, BinaryIO

from overnight.core.errors import OvernightError
from overnight.planning.observations import Request
from overnight.planning.planners import propose


def answer(line: bytes) -> dict[str, Any]:
    """The answer to one request; every failure is an answer too."""
    request_id = None
    try:
        data = json.loads(line)
        request_id = data["id"]
        request = Request.from_wire(data)
        found = propose(request.config, request.objective, request.history, request.count, request.seed)
        return {"id": request_id, "params": found.params, "exhausted": found.exhausted}
    except OvernightError as error:
        return {"id": request_id, "error": error.to_dict()}
    except Exception as error:
        last = traceback.format_exc(limit=-3)
        return {"id": request_id, "error": {"code": "error", "message": f"{type(error).__name__}: {error}\n{last}"}}


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answers requests in their order until the source ends."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    while True:
        target.write(json.dumps(answer(lines.get())).encode() + b"\n")
        target.flush()


def main() -> None:
    """Serves the standard streams; what libraries print goes to standard error."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, target)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)


if __name__ == "__main__":
    main()
