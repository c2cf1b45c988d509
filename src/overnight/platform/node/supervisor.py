"""The process that owns one attempt's ranks: starts them, listens to them, speaks for them, ends them, leaves nothing.

It has its own session and is a child subreaper. It is single-threaded, because it forks. It needs neither the warm
process nor the daemon nor the server once it runs: what it cannot report it spools, and its end is on disk in
``exit.json``.

Standard library only: runs in the user's interpreter too.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from overnight.platform.node import command, evidence, launch_lock, reaper, stacks
from overnight.platform.node.delivery import Delivery, StaleError, follow_directives
from overnight.platform.node.directives import DirectiveBoard
from overnight.platform.node.files import read_json, write_json
from overnight.platform.node.gang import Gang
from overnight.platform.node.link import ServerLink
from overnight.platform.node.mlflow_endpoint import MlflowEndpoint
from overnight.platform.node.objective import PrintedObjective, Report
from overnight.platform.node.places import Places, free_port
from overnight.platform.node.rank import Seat
from overnight.platform.node.rank_api import RankApi
from overnight.platform.node.rank_logs import RankLogs
from overnight.platform.node.restarts import Restarts
from overnight.platform.node.spares import Spares
from overnight.platform.node.spool import Spool
from overnight.platform.node.watchdog import Watchdog
from overnight.platform.node.wire import HttpError, Request, Server, WireError

PEER_SECONDS = 5.0
FLUSH_SECONDS = 5.0
TICK_SECONDS = 0.1
SYNC_SECONDS = 1.0
HEAR_OUT_SECONDS = 0.25
"""Before the ranks start again, what the last ones had still sent is answered for at most so long."""
HEAD_START_SECONDS = 0.02
"""The ranks go first: where cores are few, talk with the server would hold up the first lines of the script."""


def main(handover: dict[str, Any], seat: Seat | None = None) -> NoReturn:
    """Becomes the supervisor of an attempt. Never returns.

    Args:
        handover: ``dir`` (the attempt's folder), ``token`` (of ``launch.lock``), ``socket`` (path), ``imports``
            (folder for ``PYTHONPATH`` or empty), ``heartbeat_seconds``, ``term_seconds`` (from SIGTERM to SIGKILL),
            ``python`` (default interpreter).
        seat: A rank forked in advance; None on a cold start.
    """
    status = 1
    try:
        folder = Path(handover["dir"])
        lock = launch_lock.hold(folder, handover["token"])
        if lock is not None:
            reaper.become_subreaper()
            supervisor = Supervisor(handover, lock, seat)
            supervisor.start_ranks()
            asyncio.run(supervisor.run())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        reaper.kill_descendants()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


class Supervisor:
    """One attempt. See :func:`main` for the arguments; ``lock`` is the held ``launch.lock``."""

    def __init__(self, handover: dict[str, Any], lock: int, seat: Seat | None) -> None:
        self._handover = handover
        self._folder = Path(handover["dir"])
        order = read_json(self._folder / "order.json")
        if order is None:
            raise FileNotFoundError(f"{self._folder / 'order.json'} is missing or unreadable")
        self._order = order
        self._lock = lock
        self._warm = seat is not None
        self.generation = int(order["generation"])
        self._spool = Spool(self._folder)
        self._places = Places.open(handover["socket"])
        self._board = DirectiveBoard()
        self._gang = Gang({})
        self._spares = Spares(seat)
        self._restarts = Restarts()
        self._watchdog = Watchdog(float(order.get("hang_seconds", 0.0)))
        self._inquest: asyncio.Task[None] | None = None
        self._uses_trainer = False
        self._wants_spares = False
        self._error: dict[str, Any] | None = None  # of the supervisor's own
        self._killed: str | None = None
        self._started = time.monotonic()
        self._oom_kills = 0
        self._census: set[int] = set()
        self._logs = RankLogs(self._folder, order["ranks"])
        self._printed = PrintedObjective(self._logs.path(0), order.get("objective") if 0 in order["ranks"] else None)
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[None] | None = None
        self._term_seconds = float(handover["term_seconds"])
        self._changed = asyncio.Event()
        self._servers = ((Server(self._on_request), self._places.unix), (Server(self._on_mlflow), self._places.tcp))
        self._link = ServerLink(Path(order["server_file"]), Path(order["token_file"]))
        self._delivery = Delivery(
            self._spool, self._link, order["attempt_id"], self.generation, handover["heartbeat_seconds"],
            self._on_server_directive,
        )  # fmt: skip
        self._mlflow = MlflowEndpoint(order, self._on_mlflow_metrics, self._on_mlflow_facts)
        self._api = RankApi(self, order.get("objective"))

    # -- start

    def start_ranks(self) -> None:
        """Records every process, then lets the ranks go. The first time before the event loop exists: it forks."""
        launch_lock.mark_held(self._lock, self._handover["token"])
        self._gang = Gang({rank: self._spares.take() for rank in self._order["ranks"]})
        self._write_pids()
        plan = command.plan(self._order, self._handover["python"])
        self._gang.start(partial(self.rank_order, plan, str(free_port())))

    def rank_order(self, plan: command.Plan, port: str, rank: int, local_rank: int) -> dict[str, Any]:
        """What a rank is told; see :func:`overnight.platform.node.rank.become`."""
        places = {
            "supervisor": self._places.path,
            "mlflow_uri": self._places.mlflow_uri,
            "mlflow_token": self._places.token,
            "mlflow_run_id": self._mlflow.run_id,
            "master_port": port,
            "imports": self._handover["imports"],
        }
        order = {**self._order, "generation": self.generation}
        env = command.rank_env(order, os.environ, rank=rank, local_rank=local_rank, places=places)
        return command.rank_order(order, plan, env, log=str(self._logs.path(rank)), warm=self._warm)

    def _write_pids(self) -> None:
        launch_lock.write_pids(self._folder, self._gang.pids, self._census)

    async def discard(self) -> None:
        """Ends a rehearsal."""
        for server, listening in self._servers:
            await server.listen(listening)
            await server.close()
        self._spool.append("started", 1, {})
        self._spool.close()
        os.close(self._lock)

    # -- life

    async def run(self) -> None:
        """From the first rank to the last word."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._kill_now, "killed")
        for server, listening in self._servers:
            await server.listen(listening)
        self.spool("started", {"pids": self._told_pids(), "warm": self._warm}, urgent=True)
        self._oom_kills = evidence.oom_kills()
        self._tasks = [asyncio.create_task(work) for work in (self._deliver(), self._listen(), self._housekeep())]
        self._reap()
        await self._gang.gone()
        while (cause := self._restart_cause()) is not None:
            await self._restart(cause)
            await self._gang.gone()
        await self._finish()

    def _told_pids(self) -> dict[str, int]:
        return {str(rank): pid for rank, pid in self._gang.pids.items()}

    def _reap(self) -> None:
        reaper.reap(self._on_exit)
        if self._gang.hung or self._killed not in (None, "peer_failed"):
            return
        if not self._gang.judge(self._obeyed_code()):
            return
        if self._gang.all_gone or self._board.leaving:
            return
        if self._restart_cause() is not None:
            self._kill_ranks()
        elif self._killed is None:
            self._end_ranks(0.0, PEER_SECONDS, "peer_failed")

    def _on_exit(self, pid: int, status: int) -> None:
        self._gang.record(pid, status)
        self._spares.lose(pid)

    def _obeyed_code(self) -> int | None:
        """The exit code of a command that was told to leave and did."""
        resume = self._order.get("resume")
        return int(resume["exit_code"]) if resume is not None and self._board.leaving else None

    async def _deliver(self) -> None:
        await asyncio.sleep(HEAD_START_SECONDS)
        try:
            await self._delivery.run()
        except StaleError:
            self._on_stale()

    async def _listen(self) -> None:
        link = ServerLink(Path(self._order["server_file"]), Path(self._order["token_file"]))
        await asyncio.sleep(HEAD_START_SECONDS)
        try:
            await follow_directives(link, self._order["attempt_id"], self._on_server_directive)
        except StaleError:
            self._on_stale()
        finally:
            link.close()

    async def _housekeep(self) -> None:
        """Bounds the output, reads the objective, keeps the census and the time limit."""
        synced_at = counted_at = time.monotonic()
        while True:
            self._logs.bound()
            self._tell_reports(self._printed.read())
            now = time.monotonic()
            if now - synced_at >= SYNC_SECONDS:
                synced_at = now
                self._sync()
                self._check_limits(now)
                self._look_for_hang(now)
                if self._wants_spares and not self._board.leaving:
                    self._spares.prepare(len(self._gang.pids))
            if now - counted_at >= self._handover["heartbeat_seconds"]:
                counted_at = now
                self._count_processes()
            await asyncio.sleep(TICK_SECONDS)

    def _tell_reports(self, reports: list[Report]) -> None:
        for step, values in reports:
            self.spool("report", {"step": step, "values": values}, urgent=True)

    def _check_limits(self, now: float) -> None:
        limit = self._order.get("max_seconds")
        if limit is not None and now - self._started >= limit and not self._board.leaving:
            self._tell("stop", float(self._order["grace_seconds"]), "max_time")

    def _count_processes(self) -> None:
        """Keeps pids.json true about descendants: should we be killed, the daemon finds them by it."""
        census = set(reaper.descendants(os.getpid())) - set(self._gang.pids.values())
        if census != self._census:
            self._census = census
            with contextlib.suppress(OSError):
                self._write_pids()

    def _sync(self) -> None:
        try:
            self._spool.sync()
            if not self._folder.is_dir():
                raise FileNotFoundError(f"{self._folder} is gone")
        except OSError as error:
            self._on_spool_failure(error)

    # -- what the ranks and the daemon say

    async def _on_request(self, request: Request) -> tuple[int, Any]:
        """The Unix socket, which only this user's processes reach."""
        return self._answer_mlflow(request) if self._mlflow.handles(request.path) else await self._api.answer(request)

    async def _on_mlflow(self, request: Request) -> tuple[int, Any]:
        """The loopback port, which every process of the machine reaches: MLflow only, and with the token."""
        if request.headers.get("authorization", "") != f"Bearer {self._places.token}":
            raise HttpError(401, "this endpoint serves the trial's own processes", "UNAUTHENTICATED")
        return self._answer_mlflow(request)

    def _answer_mlflow(self, request: Request) -> tuple[int, Any]:
        body: dict[str, Any] = dict(request.query) if request.method == "GET" else request.json()
        return self._mlflow.answer(request.method, request.path, body)

    def _on_mlflow_metrics(self, rows: list[list[Any]]) -> None:
        self._api.metrics(rows)

    def _on_mlflow_facts(self, params: dict[str, str], tags: dict[str, str]) -> None:
        self.spool("mlflow", {"params": params, "tags": tags})

    def directive(self) -> dict[str, Any]:
        """The current directive."""
        return self._board.current

    async def directive_after(self, version: int, seconds: float) -> dict[str, Any]:
        """A rank's long-poll."""
        return await self._board.wait(version, seconds)

    def rank_said(self, what: str, rank: int, data: dict[str, Any]) -> None:
        """A rank introduced itself, failed, or leaves."""
        if what == "hello":
            self._uses_trainer = True
            self._gang.listeners.add(rank)
            self._watchdog.heard(rank, time.monotonic())
        elif what == "leaving":
            self._gang.left[rank] = data
        elif self._gang.error is None:
            self._gang.error = data

    def committed(self, step: int, *, forked: bool) -> None:
        """A checkpoint of this step was committed, or the ranks went on from it (``forked``)."""
        (self._restarts.forked if forked else self._restarts.committed)(step)

    def heard(self, rank: int, told: dict[str, Any]) -> None:
        """A rank said where it is: from now on its start is worth being prepared again."""
        self._watchdog.heard(rank, time.monotonic(), **told)
        self._wants_spares = self._warm

    async def control(self, body: dict[str, Any]) -> dict[str, Any]:
        """The daemon asks for a yield or a stop, e.g. because ``overnight up`` ends."""
        action = body.get("action")
        if action not in ("yield", "stop"):
            raise HttpError(400, "action must be 'yield' or 'stop'")
        grace_seconds = float(body.get("grace_seconds") or self._order["grace_seconds"])
        self._tell(action, grace_seconds, str(body.get("reason") or "shutdown")[:250])
        return {}

    def spool(self, kind: str, data: dict[str, Any], *, urgent: bool = False) -> None:
        """Records an event and has it delivered."""
        if self._killed in ("stale", "spool_failed"):
            return
        try:
            self._spool.append(kind, self.generation, data, durable=kind == "exit")
        except OSError as error:
            self._on_spool_failure(error)
            return
        self._delivery.notify(urgent=urgent)

    def _on_spool_failure(self, error: OSError) -> None:
        if self._killed is None:
            print(f"overnight: the spool cannot be written, the attempt ends: {error}", file=sys.stderr)
            self._error = evidence.make_error("SpoolError", f"the attempt's spool cannot be written: {error}")
            self._end_ranks(0.0, self._term_seconds, "spool_failed")

    # -- directives and the end

    def _on_server_directive(self, directive: dict[str, Any]) -> None:
        if self._board.from_server(directive):
            self._act()

    def _tell(self, action: str, grace_seconds: float, reason: str) -> None:
        self._board.from_here(action, grace_seconds, reason)
        self._act()

    def _act(self) -> None:
        if not self._board.leaving:
            if self._ending is not None and self._killed is None:
                self._ending.cancel()
            return
        resume = self._order.get("resume")
        grace_seconds = float(self._board.current["grace_seconds"])
        if resume is not None and not self._uses_trainer:
            self._gang.signal(getattr(signal, f"SIG{resume['signal']}"))
        elif not self._uses_trainer:
            grace_seconds = 0.0  # nobody there listens to a directive
        self._end_ranks(grace_seconds, self._term_seconds, "grace")

    def _on_stale(self) -> None:
        self._killed = "stale"
        self._board.from_here("stop", 0.0, "stale")
        self._end_ranks(0.0, self._term_seconds, "stale")

    def _end_ranks(self, grace_seconds: float, term_seconds: float, why: str) -> None:
        """Starts the way to the end: a grace, SIGTERM to the rank leaders, SIGKILL to all."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.create_task(self._escalate(grace_seconds, term_seconds, why))

    async def _escalate(self, grace_seconds: float, term_seconds: float, why: str) -> None:
        if grace_seconds > 0 and await self._gang.gone(grace_seconds):
            return
        self._killed = self._killed or why
        self._gang.signal(signal.SIGTERM)
        if not await self._gang.gone(term_seconds):
            self._kill_ranks()

    def _kill_now(self, why: str) -> None:
        self._killed = self._killed or why
        self._kill_ranks()

    def _kill_ranks(self) -> bool:
        """Ends every process but the spares; returns whether none is left."""
        reaper.reap(self._on_exit)
        self._gang.about_to_kill()
        return reaper.kill_descendants(self._on_exit, keep=self._spares.pids)

    # -- another start of the ranks

    def _restart_cause(self) -> str | None:
        """Why the ranks shall start again in this attempt; None if it ends with them."""
        is_resumable = self._uses_trainer or self._order.get("resume") is not None
        is_wanted = self._killed in (None, "peer_failed") and not self._board.leaving and not self._gang.left
        if not (is_resumable and is_wanted and self._restarts.allowed):
            return None
        lost = self._gang.lost_rank
        if self._gang.hung or lost is None or self._ran_out_of_memory():
            return self._gang.hung
        return f"rank {lost} was ended by {signal.Signals(-self._gang.statuses[lost]).name}"

    async def _restart(self, cause: str) -> None:
        """Grants the next generation once nothing is left of the last one, unless the attempt is to end meanwhile."""
        if self._ending is not None:
            self._ending.cancel()
        self._killed = None
        if not self._kill_ranks():
            self._killed = "killed"
            return
        await asyncio.gather(*(server.hear_out(HEAR_OUT_SECONDS) for server, _ in self._servers))
        if self._restart_cause() is None:
            return
        self._tell_reports(self._printed.read())
        self._api.tell_progress()
        self._restarts.note(cause)
        self.generation += 1
        self._delivery.generation = self.generation
        self._oom_kills = evidence.oom_kills()
        self._watchdog.restart()
        self._logs.begin(f"{cause}; the ranks start again, generation {self.generation}")
        launch_lock.mark_restarted(self._lock)
        try:
            self.start_ranks()
        except OSError as error:
            self._on_spool_failure(error)
            return
        told = {"generation": self.generation, "cause": cause, "pids": self._told_pids()}
        self.spool("generation", told, urgent=True)

    # -- ranks that hang

    def _look_for_hang(self, now: float) -> None:
        patience = 2.0**self._restarts.in_vain  # where it hung before, it may only take long
        is_ending = self._board.leaving or self._killed is not None or self._gang.has_failed
        is_under_way = self._inquest is not None and not self._inquest.done()
        if self._watchdog.hangs(self._gang.living, now, patience) and not is_ending and not is_under_way:
            self._inquest = asyncio.create_task(self._end_hung(now))

    async def _end_hung(self, now: float) -> None:
        """Asks the ranks where they are, puts it on record, and ends them unless they were told to leave meanwhile."""
        gang = self._gang
        told = {rank: self._watchdog.describe(rank, now) for rank in gang.living}
        cause = "no rank makes progress: " + "; ".join(f"rank {rank} {line}" for rank, line in told.items())
        pids = {rank: gang.pids[rank] for rank in told if rank in gang.listeners}
        with contextlib.suppress(OSError):
            path = await stacks.collect(self._folder, self.generation, pids, told)
            self.spool("hang", {"cause": cause, "stacks": str(path)}, urgent=True)
        if not self._board.leaving and self._killed is None and not gang.all_gone:
            gang.hung = cause
            self._kill_ranks()

    def _ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed for memory since the ranks started, and a rank was killed by nobody here."""
        lost = self._gang.lost_rank
        is_shot = lost is not None and self._gang.statuses[lost] == -signal.SIGKILL
        return is_shot and evidence.oom_kills() > self._oom_kills

    async def _finish(self) -> None:
        tasks = [*self._tasks, *(task for task in (self._ending, self._inquest) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        reaper.kill_descendants(self._on_exit)
        for server, _ in self._servers:
            await server.close()
        self._tell_reports(self._printed.finish())
        self._api.tell_progress()
        self._logs.bound()
        report = self._exit_report()
        with contextlib.suppress(OSError):
            write_json(self._folder / "exit.json", report, durable=True)
        if self._killed != "stale":
            self.spool("exit", report, urgent=True)
            with contextlib.suppress(WireError, StaleError, TimeoutError):
                await asyncio.wait_for(self._delivery.flush(), FLUSH_SECONDS)
        self._link.close()
        self._places.remove()

    def _exit_report(self) -> dict[str, Any]:
        witness = self._gang.failed_rank if self._gang.failed_rank is not None else next(iter(self._gang.pids))
        lines = self._logs.last_lines(witness)
        report = self._gang.report(self._killed, self._board.current, self._obeyed_code(), lines)
        error = self._error or report["error"]
        return report | {
            "error": error,
            "seconds": time.monotonic() - self._started,
            "oom": evidence.is_out_of_memory(error) or self._ran_out_of_memory(),
            "generations": self.generation - int(self._order["generation"]) + 1,
            "restarts": self._restarts.causes,
        }
