"""Starts training scripts quickly and for real: one process with torch loaded forks a process per rank and order.

An order is a line of JSON on stdin: ``{"script", "argv", "cwd", "env", "ranks", "log", "imports"}``; the answer, a line
on stdout, is the list of wait statuses. ``imports`` names modules that this and later orders find imported. The parent
runs no operator, exactly as a warm process must not.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback

import torch._dynamo
import torch.distributed.checkpoint

import overnight.trainer.execution  # noqa: F401
from overnight.platform.node.places import free_port


def child(order: dict, rank: int, port: int) -> int:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.alarm(60)  # a gang that hangs is a failure, not a wait
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    if order["ranks"] > 1:
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["ranks"], "LOCAL_WORLD_SIZE": order["ranks"]}
        os.environ.update({key: str(value) for key, value in where.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    sys.argv = [order["script"], *order["argv"]]
    try:
        runpy.run_path(order["script"], run_name="__main__")
        return 0
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:  # the end of an interpreter, but for the memory: to free that of torch takes longer than most scripts
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    atexit._clear()  # what the libraries registered is for this process to do
    gc.freeze()
    print(json.dumps({"threads": threading.active_count()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        for name in order["imports"]:
            importlib.import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
        port = free_port()
        pids = []
        for rank in range(order["ranks"]):
            if (pid := os.fork()) == 0:
                os._exit(child(order, rank, port) & 0xFF)
            pids.append(pid)
        statuses = []
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            statuses.append(os.waitstatus_to_exitcode(status))
        print(json.dumps(statuses), flush=True)
    os._exit(0)  # nothing here is worth a tear-down


if __name__ == "__main__":
    main()
