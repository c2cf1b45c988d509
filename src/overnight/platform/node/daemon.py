"""The node daemon: makes the processes of this machine match what the server wants, and outlives the server.

It holds ``node.lock`` for life, keeps a work long-poll open, launches, adopts, kills and buries attempts, and looks
at the devices. It may be killed at any moment: supervisors carry on, and the next daemon finds them by the registry
and their locks.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import overnight
from overnight.core.inherited import inherited
from overnight.core.models.node import (
    DeviceReport,
    Ended,
    LaunchFailed,
    NodeHello,
    NodeReport,
    NodeWelcome,
    Order,
    Work,
)
from overnight.core.paths import Home
from overnight.platform.identity import LockFile
from overnight.platform.node import launch_lock, reaper
from overnight.platform.node.control import ControlSocket
from overnight.platform.node.files import read_json
from overnight.platform.node.held import Held, Registry, Undertaker, kill, take_back_launch, until_gone
from overnight.platform.node.identity import Identity, boot_id, read_stat
from overnight.platform.node.launcher import TERM_SECONDS, Launched, Launcher, LaunchError
from overnight.platform.node.link import Backoff, ServerLink
from overnight.platform.node.wire import Client, WireError
from overnight.platform.node.zygotes import Key, WarmPool, is_spare
from overnight.platform.pools import Pool

WORK_WAIT_SECONDS = 20.0
IDLE_SECONDS = 600.0
HOME_CHECK_SECONDS = 1.0
SUPERVISOR_START_SECONDS = 20.0
MAX_LAUNCHES = 3
STOP_MARGIN_SECONDS = 15.0
LAST_REPORT_SECONDS = 2.0
FAULTS_SECONDS = 0.1

_log = logging.getLogger(__name__)


class Daemon:
    """One node.

    Args:
        home: Layout of the home.
        pool: Its devices.
        lock: ``node.lock``, held.
        name: The node's name.
        idle_seconds: Leaves after this long without server and workers.
        prewarm: Start the warm process of this interpreter at once, not with the first order.
        term_seconds: What ranks have between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        home: Home,
        pool: Pool,
        lock: LockFile,
        name: str,
        *,
        idle_seconds: float = IDLE_SECONDS,
        prewarm: bool = True,
        term_seconds: float = TERM_SECONDS,
    ) -> None:
        self._home = home
        self._pool = pool
        self._lock_inode = home.node_lock.stat().st_ino
        self._name = name
        self._idle_seconds = idle_seconds
        self._wants_prewarm = prewarm
        self._warm = WarmPool(home)
        self._launcher = Launcher(home, self._warm, term_seconds=term_seconds)
        self._registry = Registry(home)
        self._undertaker = Undertaker(self._orphans)
        self._held: dict[str, Held] = {}
        self._ended: dict[str, Ended] = {}
        self._failed: dict[str, LaunchFailed] = {}
        self._devices: tuple[DeviceReport, ...] = ()
        self._probe_seconds = 5.0
        self._node_id: str | None = None
        self._counter = 0
        self._link = ServerLink(home.server_file, home.token_file)
        self._report_link = ServerLink(home.server_file, home.token_file)
        self._backoff = Backoff()
        self._report_backoff = Backoff()
        self._to_report = asyncio.Event()
        self._stopping = asyncio.Event()
        self._leave = asyncio.Event()
        self._changed = asyncio.Event()
        self._heard_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life

    async def run(self) -> None:
        """Serves until told to stop, idle for long, or homeless."""
        reaper.become_subreaper()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        control = ControlSocket(self._home, {"ping": self._ping, "poke": self._poke, "stop": self._stop_asked})
        await control.open()
        self._adopt_all()
        if self._wants_prewarm:
            self._prewarm()
        for work in (self._follow_work(), self._send_reports(), self._watch_devices(), self._watch_home()):
            self._spawn(work)
        _log.info("node daemon %d serves %s", os.getpid(), self._home.root)
        await self._leave.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        control.close()
        self._warm.stop()
        self._link.close()
        self._report_link.close()

    def stop(self) -> None:
        """Yields every worker, waits for them, reports, and leaves."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._spawn(self._wind_down())

    def _spawn(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A daemon that does only half of its work is worse than none: the next one starts from the files.
            _log.critical("the node daemon fails", exc_info=error)
            os._exit(1)

    def _ping(self, message: dict[str, object]) -> dict[str, object]:
        return {
            **Identity.mine().to_dict(),
            "node_id": self._node_id,
            "attempts": sorted(self._held),
            "version": overnight.__version__,
            "connected": self._node_id is not None,
        }

    def _poke(self, message: dict[str, object]) -> dict[str, object]:
        self._backoff.kick()
        self._report_backoff.kick()
        return {"ok": True}

    def _stop_asked(self, message: dict[str, object]) -> dict[str, object]:
        self.stop()
        return {"ok": True, "attempts": sorted(self._held)}

    async def _wind_down(self) -> None:
        held = list(self._held.values())
        graces = await asyncio.gather(*(self._ask_to_yield(one) for one in held))
        await self._until(lambda: not self._num_working(), max(graces, default=0.0) + STOP_MARGIN_SECONDS)
        for one in self._held.values():
            self._kill(one, "the node daemon stops")
        await self._until(lambda: not self._num_working(), STOP_MARGIN_SECONDS)
        # What cannot be said now is in files, for the next daemon.
        await self._until(self._has_said_all, LAST_REPORT_SECONDS)
        self._leave.set()

    def _has_said_all(self) -> bool:
        return self._node_id is None or not (self._held or self._ended or self._failed)

    def _num_working(self) -> int:
        """Attempts that have, or may have, processes; those that only wait for the server do not count."""
        return sum(one.supervisor is not None or one.dirty for one in self._held.values())

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    async def _ask_to_yield(self, held: Held) -> float:
        client = Client(f"unix:{self._launcher.socket_path(held.attempt_id)}")
        grace_seconds = float((read_json(held.folder / "order.json") or {}).get("grace_seconds", 30.0))
        try:
            await client.request("POST", "/v1/control", {"action": "yield", "reason": "shutdown"}, timeout_seconds=5)
        except WireError:
            self._kill(held, "the node daemon stops")
            return 0.0
        finally:
            client.close()
        return grace_seconds

    async def _watch_home(self) -> None:
        """Leaves when the home is gone, or nobody has needed this daemon for long."""
        while True:
            await asyncio.sleep(HOME_CHECK_SECONDS)
            self._warm.reap()
            if not self._is_at_home():
                _log.warning("the home %s is gone: everything here ends", self._home.root)
                await self._abandon()
                return
            if self._num_working():
                self._heard_at = time.monotonic()
            if time.monotonic() - self._heard_at > self._idle_seconds:
                _log.info("neither server nor workers for %g s: leaving", self._idle_seconds)
                self._leave.set()
                return

    def _is_at_home(self) -> bool:
        try:
            return self._home.node_lock.stat().st_ino == self._lock_inode
        except OSError:
            return False

    async def _abandon(self) -> None:
        held = list(self._held.values())
        for one in held:
            one.kill_why = "the home is gone"
        await asyncio.gather(*(kill(one) for one in held))
        for one in held:
            await asyncio.to_thread(reaper.sweep, one.attempt_id, [])
        self._leave.set()

    # -- the server's wishes

    async def _follow_work(self) -> None:
        while True:
            try:
                await self._hello()
                after = -1
                while True:
                    work = await self._ask_work(after)
                    self._heard_at = time.monotonic()
                    self._backoff.reset()
                    self._apply(work)
                    after = work.version
                    await asyncio.sleep(0)  # launches go before the next question
            except (WireError, ValueError) as error:
                if self._node_id is not None:
                    _log.info("the server is away: %s", error)
                self._node_id = None
                await self._backoff.pause()

    async def _hello(self) -> None:
        if not self._devices:
            await self._probe()
        message = NodeHello(
            name=self._name,
            pid=os.getpid(),
            boot_id=boot_id(),
            version=overnight.__version__,
            devices=self._devices,
            attempts=tuple(one.attempt_id for one in self._held.values() if not one.dirty),
            dirty=tuple(one.attempt_id for one in self._held.values() if one.dirty),
        )
        status, answer = await self._link.request("POST", "/v1/nodes", message.model_dump(mode="json"))
        if status != 200:
            raise WireError(f"hello was refused: {status} {str(answer)[:300]}")
        welcome = NodeWelcome.model_validate(answer)
        self._probe_seconds = welcome.probe_seconds
        self._launcher.heartbeat_seconds = welcome.heartbeat_seconds
        self._node_id = welcome.node_id
        self._report_backoff.kick()
        self._to_report.set()

    async def _ask_work(self, after: int) -> Work:
        path = f"/v1/nodes/{self._node_id}/work?after={after}&wait={WORK_WAIT_SECONDS:g}"
        status, answer = await self._link.request("GET", path, timeout_seconds=WORK_WAIT_SECONDS + 10)
        if status != 200:
            raise WireError(f"no work: {status} {str(answer)[:300]}")
        return Work.model_validate(answer)

    def _apply(self, work: Work) -> None:
        wanted = {order.attempt_id for order in work.launches} | set(work.keep)
        for attempt_id in work.kill:
            if attempt_id in self._held:
                self._kill(self._held[attempt_id], "the server said kill")
            elif attempt_id not in self._ended:
                self._report_ended(Ended(attempt_id=attempt_id, cause="no process of it is on this node"))
        for held in list(self._held.values()):
            if held.attempt_id not in wanted:
                self._kill(held, "the server does not know it any more")
        for order in work.launches:
            known = order.attempt_id in self._held or order.attempt_id in self._ended | self._failed
            if not known and order.attempt_id not in work.kill and not self._stopping.is_set():
                held = self._hold(order.attempt_id, Path(order.attempt_dir))
                held.task = self._spawn(self._live(held, order))

    def _hold(self, attempt_id: str, folder: Path) -> Held:
        held = self._held[attempt_id] = Held(attempt_id, folder)
        return held

    def _kill(self, held: Held, why: str) -> None:
        if not held.kill_why:
            if not held.is_finishing:
                _log.info("attempt %s is killed: %s", held.attempt_id, why)
            held.kill_why = why
            self._spawn(kill(held))

    # -- an attempt's life on this node

    async def _live(self, held: Held, order: Order | None) -> None:
        """Launches (or adopts), watches and buries one attempt."""
        try:
            if order is not None:
                self._registry.add(held.attempt_id, held.folder)
                await self._launch(held, order)
            else:
                await self._find(held)
                if held.supervisor is not None:
                    await until_gone(held.supervisor)
        except LaunchError as error:
            _log.warning("attempt %s cannot be launched: %s", held.attempt_id, error)
            self._registry.remove(held.attempt_id)
            self._held.pop(held.attempt_id, None)
            self._failed[held.attempt_id] = error.report
            self._to_report.set()
            return
        held.dirty, held.supervisor = True, None
        ended = await self._undertaker.bury(held, self._changed.set)
        self._held.pop(held.attempt_id, None)
        self._report_ended(ended)

    async def _launch(self, held: Held, order: Order) -> None:
        for _ in range(MAX_LAUNCHES):
            launched = await self._launcher.launch(order)
            held.process = launched.process
            if launched.over:
                return
            await self._find(held, launched)
            if held.supervisor is not None:
                if held.kill_why or self._stopping.is_set():
                    self._spawn(kill(held))
                await until_gone(held.supervisor)
            leaving = held.kill_why or self._stopping.is_set() or not self._is_at_home()
            if leaving or (held.folder / launch_lock.PIDS).exists():
                return
            # No pids.json: it died before any code of the user ran. Another try costs nothing.
            _log.warning("the supervisor of %s ended before it started anything", held.attempt_id)
            await asyncio.to_thread(reaper.sweep, held.attempt_id, [])

    async def _find(self, held: Held, launched: Launched | None = None) -> None:
        """Learns who supervises an attempt: the one just launched, or whoever holds its lock."""
        if launched is not None and launched.pid is not None:
            held.supervisor = Identity.of(launched.pid)
            return
        deadline = time.monotonic() + SUPERVISOR_START_SECONDS
        while launch_lock.is_held(held.folder) and time.monotonic() < deadline:
            identity = launch_lock.holder(held.folder)
            if identity is not None and identity.alive():
                held.supervisor = identity
                return
            await asyncio.sleep(0.02)

    def _adopt_all(self) -> None:
        for attempt_id, folder in self._registry.all().items():
            if take_back_launch(folder):
                # Nothing is lost and nothing to be told: if its order still stands, it is the first work to come.
                _log.info("attempt %s of an earlier daemon was never launched", attempt_id)
                self._registry.remove(attempt_id)
                continue
            held = self._hold(attempt_id, folder)
            _log.info("found attempt %s of an earlier daemon", attempt_id)
            held.task = self._spawn(self._live(held, None))

    def _report_ended(self, ended: Ended) -> None:
        self._ended[ended.attempt_id] = ended
        self._to_report.set()
        self._changed.set()

    # -- reports and devices

    async def _send_reports(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._to_report.wait(), self._probe_seconds)
            self._to_report.clear()
            if self._node_id is None:
                await self._report_backoff.pause()
                self._to_report.set()
                continue
            ended, failed = dict(self._ended), dict(self._failed)
            self._counter += 1
            report = NodeReport(
                counter=self._counter, devices=self._devices, ended=tuple(ended.values()), failed=tuple(failed.values())
            )
            try:
                path = f"/v1/nodes/{self._node_id}/reports"
                status, answer = await self._report_link.request("POST", path, report.model_dump(mode="json"))
                if status != 200:
                    raise WireError(f"the report was refused: {status} {str(answer)[:300]}")
            except WireError as error:
                _log.info("report not delivered: %s", error)
                self._to_report.set()
                await self._report_backoff.pause()
                continue
            self._report_backoff.reset()
            for attempt_id in ended:
                self._registry.remove(attempt_id)
                self._ended.pop(attempt_id, None)
            for attempt_id in failed:
                self._failed.pop(attempt_id, None)
            self._changed.set()

    async def _watch_devices(self) -> None:
        while True:
            await self._probe()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._probe_seconds):
                    stamp = self._faults_stamp()
                    while stamp == self._faults_stamp():  # noqa: ASYNC110 - a file has no event to wait for
                        await asyncio.sleep(FAULTS_SECONDS)

    def _faults_stamp(self) -> tuple[int, int] | None:
        try:
            stat = self._home.faults_file.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    async def _probe(self) -> None:
        devices = tuple(await asyncio.to_thread(self._pool.probe))
        if devices != self._devices:
            self._devices = devices
            self._to_report.set()

    # -- children

    def _prewarm(self) -> None:
        """Most trials run in the interpreter and environment of whoever started us: have that ready."""
        with contextlib.suppress(Exception):
            self._warm.start(Key.of(sys.executable, inherited(os.environ)))

    def _reap(self) -> None:
        """Collects children that have ended: cold supervisors, warm processes, orphans."""
        self._warm.reap()
        for held in self._held.values():
            if held.process is not None and held.process.poll() is not None:
                held.process = None
        known = self._child_pids()
        for pid in reaper.children(os.getpid()):
            if pid not in known:
                stat = read_stat(pid)
                if stat is not None and stat.state == "Z" and stat.session != os.getsid(0):
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)

    def _child_pids(self) -> set[int]:
        return self._warm.pids() | {one.process.pid for one in self._held.values() if one.process is not None}

    def _orphans(self, attempt_id: str) -> list[int]:
        """Children that nobody here started and that no other attempt claims: a dead supervisor left them.

        Those that carry the attempt's own mark too: one that forks on and on is seen here, where a walk through all
        processes comes too late for it.
        """
        known = self._child_pids() | {one.supervisor.pid for one in self._held.values() if one.supervisor is not None}
        launching = any(one.supervisor is None and not one.dirty for one in self._held.values())
        found = []
        for pid in reaper.children(os.getpid()):
            stat = read_stat(pid)
            if pid in known or stat is None or stat.session == os.getsid(0) or is_spare(pid):
                continue
            mark = reaper.mark_of(pid)
            if mark == attempt_id or (mark is None and not launching):
                found.append(pid)
        return found
