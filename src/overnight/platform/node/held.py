"""The attempts that a node has: found again after a restart, watched while they live, buried when they are gone."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from overnight.core.models.node import Ended
from overnight.core.paths import Home
from overnight.core.staging import STAGING, clear_staging
from overnight.platform.node import launch_lock, reaper
from overnight.platform.node.delivery import Delivery, StaleError
from overnight.platform.node.files import read_json, write_json
from overnight.platform.node.identity import Identity
from overnight.platform.node.link import Backoff, ServerLink
from overnight.platform.node.spool import Spool
from overnight.platform.node.wire import WireError

KILL_SECONDS = 12.0
"""From asking a supervisor to kill its ranks to killing the supervisor."""

FINISH_SECONDS = 15.0
"""From ``exit.json`` to a supervisor's own end: it only delivers its last words."""

_log = logging.getLogger(__name__)


@dataclass
class Held:
    """One attempt on this node.

    Attributes:
        supervisor: Who supervises it; None before that is known, and when nobody does.
        process: Handle of a cold supervisor, which is our child.
        kill_why: Set when it is to be killed.
        dirty: Its supervisor is gone, its processes perhaps not.
    """

    attempt_id: str
    folder: Path
    supervisor: Identity | None = None
    process: subprocess.Popen[bytes] | None = None
    kill_why: str = ""
    dirty: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def is_finishing(self) -> bool:
        """Whether its ranks are gone and all is said: ``exit.json`` is written after the last process has ended."""
        return (self.folder / "exit.json").exists()


class Registry:
    """Attempts that this node has not finished with, as files: what a new daemon looks after."""

    def __init__(self, home: Home) -> None:
        self._folder = home.root / "node" / "attempts"

    def add(self, attempt_id: str, folder: Path) -> None:
        """Before anything of the attempt exists."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / f"{attempt_id}.json", {"dir": str(folder)})

    def remove(self, attempt_id: str) -> None:
        """When the server knows that nothing of it is left."""
        (self._folder / f"{attempt_id}.json").unlink(missing_ok=True)

    def all(self) -> dict[str, Path]:
        """Folders by attempt id."""
        found = {}
        for file in sorted(self._folder.glob("*.json")):
            data = read_json(file)
            if data is not None and isinstance(data.get("dir"), str):
                found[file.stem] = Path(data["dir"])
        return found


def take_back_launch(folder: Path) -> bool:
    """Makes sure that a launch which a daemon did not finish never happens, unless it has happened.

    A new stamp decides it: a supervisor that is still on its way comes with the old one, and leaves.

    Args:
        folder: The attempt's.

    Returns:
        Whether no code of the user ran or will run: the attempt can be launched again as if for the first time.
    """
    try:
        return launch_lock.stamp(folder).token is not None
    except OSError:
        return False  # a folder that is gone proves nothing


async def until_gone(identity: Identity) -> None:
    """Waits for a process to end, child or not."""
    descriptor = identity.pidfd()
    if descriptor is None:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _is_gone_within(identity: Identity, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(until_gone(identity), seconds)
        return True
    return False


def signal_process(identity: Identity, number: int) -> None:
    """Signals exactly this process, or nobody."""
    descriptor = identity.pidfd()
    if descriptor is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        os.close(descriptor)


async def kill(held: Held) -> None:
    """Has a supervisor kill its ranks; a supervisor that does not is killed too. The burial does the rest."""
    identity = held.supervisor
    if identity is None or (held.is_finishing and await _is_gone_within(identity, FINISH_SECONDS)):
        return
    signal_process(identity, signal.SIGTERM)
    if await _is_gone_within(identity, KILL_SECONDS):
        return
    _log.warning("supervisor %d of %s does not end: killed", identity.pid, held.attempt_id)
    signal_process(identity, signal.SIGKILL)


class Undertaker:
    """Buries attempts whose supervisor is gone.

    Args:
        orphans: For an attempt's id, pids of processes that became this daemon's children and may be its.
        make_link: A way to the server, by the order's own files.
        heartbeat_seconds: For the posts.
    """

    def __init__(self, orphans: Callable[[str], list[int]], heartbeat_seconds: float = 5.0) -> None:
        self._orphans = orphans
        self._heartbeat_seconds = heartbeat_seconds

    async def bury(self, held: Held, on_clean: Callable[[], None]) -> Ended:
        """Kills what is left, delivers the rest of the spool (for as long as that takes), and says how it ended.

        Args:
            held: Its supervisor is gone.
            on_clean: Called when no process is left.
        """
        held.dirty = True
        pids = read_json(held.folder / launch_lock.PIDS) or {}
        known = _known(pids)
        orphans = partial(self._orphans, held.attempt_id)
        while left := await asyncio.to_thread(reaper.sweep, held.attempt_id, known, orphans):
            _log.error("attempt %s: processes %s cannot be killed; its devices stay leased", held.attempt_id, left)
            await asyncio.sleep(1.0)
        held.dirty = False
        await asyncio.to_thread(_clear_staging, held.folder)
        on_clean()
        report = read_json(held.folder / "exit.json")
        if held.folder.is_dir():
            await self._deliver(held, report)
        cause = held.kill_why or ("" if report is not None else _how_lost(pids))
        return Ended(attempt_id=held.attempt_id, vanished=report is None, cause=cause)

    async def _deliver(self, held: Held, report: dict[str, Any] | None) -> None:
        order = read_json(held.folder / "order.json")
        if order is None or not (held.folder / "spool.jsonl").exists():
            return
        try:
            spool = Spool(held.folder)
            generation = max(int(order["generation"]), spool.last_generation)  # its ranks may have started again
            if report is not None and spool.last_kind != "exit":
                spool.append("exit", generation, report, durable=True)
        except OSError as error:
            _log.error("the spool of %s cannot be read: %s", held.attempt_id, error)
            return
        link = ServerLink(Path(order["server_file"]), Path(order["token_file"]))
        delivery = Delivery(spool, link, held.attempt_id, generation, self._heartbeat_seconds)
        backoff = Backoff()
        try:
            while not spool.drained:
                try:
                    await delivery.flush()
                except WireError:
                    await backoff.pause()
        except StaleError:
            pass  # the server has ended the attempt without it
        finally:
            link.close()
            spool.close()


def _clear_staging(folder: Path) -> None:
    """Removes the checkpoints that the attempt was sending to a store when it ended."""
    if (order := read_json(folder / "order.json")) is not None:
        number, ranks = order["number"], order["ranks"]
        clear_staging(Path(order["trial_dir"], STAGING), lambda attempt, _, rank: attempt == number and rank in ranks)


def _known(pids: dict[str, Any]) -> list[Identity]:
    found = [Identity.from_dict(one) for one in pids.get("ranks", {}).values()]
    found += [Identity(int(pid), int(start), str(pids.get("boot"))) for pid, start in pids.get("census", [])]
    return found


def _how_lost(pids: dict[str, Any]) -> str:
    if pids.get("boot") not in (None, Identity.mine().boot):
        return "the machine was restarted"
    return "its supervisor was killed" if pids else "its supervisor ended before it could start anything"
