"""Makes an attempt's folder, then a supervisor for it: warm if it can be, cold if not, and once whatever happens."""

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overnight.core.models.node import LaunchFailed, Order
from overnight.core.paths import Home
from overnight.platform.node import boot, command, launch_lock
from overnight.platform.node.files import write_json
from overnight.platform.node.zygotes import ColdError, Key, WarmPool, ZygoteGoneError

MIN_PYTHON = (3, 11)
TERM_SECONDS = 10.0
_SAFE_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger(__name__)


class LaunchError(Exception):
    """The launch cannot be made; ``report`` is what the server is told."""

    def __init__(self, attempt_id: str, kind: str, message: str, *, user: bool) -> None:
        super().__init__(message)
        self.report = LaunchFailed(attempt_id=attempt_id, user=user, type=kind, message=message)


@dataclass(frozen=True)
class Launched:
    """What became of a launch.

    Attributes:
        pid: The supervisor; None when one was there before (or was and is gone).
        over: A supervisor ran before and is gone.
        process: A cold supervisor's handle, to be reaped by the caller.
    """

    pid: int | None
    over: bool = False
    process: subprocess.Popen[bytes] | None = None


class Launcher:
    """Launches orders.

    Args:
        home: Layout of the home.
        warm: The warm processes.
        term_seconds: What ranks have between SIGTERM and SIGKILL.
    """

    def __init__(self, home: Home, warm: WarmPool, *, term_seconds: float = TERM_SECONDS) -> None:
        self._home = home
        self._term_seconds = term_seconds
        self._warm = warm
        self._versions: dict[tuple[str, int], tuple[int, ...] | None] = {}
        self.heartbeat_seconds = 5.0

    def socket_path(self, attempt_id: str) -> Path:
        """Where the attempt's supervisor listens."""
        return self._home.socket_dir / f"{attempt_id}.sock"

    async def launch(self, order: Order) -> Launched:
        """Starts a supervisor for the order, unless one lives or lived.

        Raises:
            LaunchError: It cannot be started.
        """
        folder = Path(order.attempt_dir)
        try:
            if not _SAFE_ID.fullmatch(order.attempt_id):
                raise LaunchError(order.attempt_id, "BadOrder", f"{order.attempt_id!r} is no attempt id", user=False)
            for made in (folder, Path(order.trial_dir)):
                made.mkdir(parents=True, exist_ok=True)
            claim = launch_lock.stamp(folder)
            if claim.token is None:
                return Launched(None, over=claim.over)
            cwd = await asyncio.to_thread(self._place_code, order) if order.code else order.cwd
            data = {**order.model_dump(mode="json"), "cwd": cwd}
            plan = command.plan(data, sys.executable)
            _check_files(order, plan, cwd)
            await self._check_version(order, plan)
            write_json(folder / "order.json", data)
            return await self._start(order, data, plan, claim.token)
        except OSError as error:
            message = f"the node cannot prepare {folder}: {error}"
            raise LaunchError(order.attempt_id, type(error).__name__, message, user=False) from None

    async def _start(self, order: Order, data: dict[str, Any], plan: command.Plan, token: str) -> Launched:
        folder = Path(order.attempt_dir)
        handover = self._handover(order, plan, token)
        if plan.kind != "command" and order.preload and plan.python is not None:
            try:
                return Launched(await self._warm.launch(Key.of(plan.python, order.env), handover))
            except ColdError as error:
                _log.info("attempt %s starts cold: %s", order.attempt_id, error)
            except ZygoteGoneError:
                # Perhaps a supervisor has the order, perhaps not: a new stamp settles it.
                claim = launch_lock.stamp(folder)
                if claim.token is None:
                    return Launched(None, over=claim.over)
                handover["token"] = claim.token
        return self._start_cold(folder, handover, dict(data["env"]))

    def _handover(self, order: Order, plan: command.Plan, token: str) -> dict[str, Any]:
        folder = Path(order.cwd, plan.target).parent if plan.kind == "script" else Path(order.cwd)
        if order.code:
            copy = Path(order.attempt_dir, "code")
            folder = Path(copy, plan.target).parent if plan.kind == "script" else copy
        return {
            "dir": order.attempt_dir,
            "token": token,
            "socket": str(self.socket_path(order.attempt_id)),
            "imports": "" if plan.python in (None, sys.executable) else str(self._imports()),
            "heartbeat_seconds": self.heartbeat_seconds,
            "term_seconds": self._term_seconds,
            "python": sys.executable,
            "folder": str(folder),
        }

    def _start_cold(self, folder: Path, handover: dict[str, Any], order_env: dict[str, str]) -> Launched:
        """The server's own interpreter supervises; the user's is executed for the ranks, as it is."""
        with (folder / "supervisor.log").open("ab") as output:
            process = subprocess.Popen(
                boot.command(sys.executable, "supervisor", handover),
                env={**command.base_env(os.environ), "OVERNIGHT_HOME": str(self._home.root)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return Launched(process.pid, process=process)

    def _imports(self) -> Path:
        """A folder that holds this installation's overnight and nothing else, for other interpreters' PYTHONPATH."""
        folder = self._home.root / "node" / "imports"
        link = folder / "overnight"
        if not link.is_symlink() or link.readlink() != boot.PACKAGE_DIR:
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / f".overnight.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(boot.PACKAGE_DIR)
            fresh.replace(link)
        return folder

    def _place_code(self, order: Order) -> str:
        """A fresh copy of the snapshot: what runs is what was submitted, whatever an earlier attempt wrote."""
        source, target = Path(order.cwd), Path(order.attempt_dir, "code")
        if not source.is_dir():
            raise LaunchError(
                order.attempt_id, "CodeMissing", f"the code snapshot {order.code} is not at {source}", user=False
            )
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name, linked in order.code_links.items():
            link = target / name
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise LaunchError(order.attempt_id, "BadLink", f"the link {name!r} leaves the code folder", user=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(linked)
        return str(target)

    async def _check_version(self, order: Order, plan: command.Plan) -> None:
        if plan.kind == "command" or plan.python is None or plan.python == sys.executable:
            return
        version = await self._version(order, plan.python)
        if version is not None and version < MIN_PYTHON:
            found, least = (".".join(map(str, one)) for one in (version, MIN_PYTHON))
            message = f"{plan.python} is Python {found}; scripts need {least} or newer"
            raise LaunchError(order.attempt_id, "PythonTooOld", message, user=True)

    async def _version(self, order: Order, python: str) -> tuple[int, ...] | None:
        """The interpreter's version; asked once for each build of it."""
        key = (python, _stamp_of(order, python))
        if key not in self._versions:
            self._versions[key] = await asyncio.to_thread(_ask_version, python)
        version = self._versions[key]
        if version is None:
            raise LaunchError(order.attempt_id, "BadInterpreter", f"{python} does not run as a Python", user=True)
        return version


def _check_files(order: Order, plan: command.Plan, cwd: str) -> None:
    """Says early, and in words, what would fail in the rank anyway."""
    if not Path(cwd).is_dir():
        message = f"the working directory {cwd} does not exist"
    elif plan.kind == "script" and not Path(cwd, plan.target).is_file():
        message = f"there is no script {plan.target!r} in {cwd}"
    else:
        return
    raise LaunchError(order.attempt_id, "FileNotFoundError", message, user=True)


def _stamp_of(order: Order, python: str) -> int:
    try:
        return Path(python).stat().st_mtime_ns
    except OSError as error:
        message = f"there is no interpreter {python}: {error.strerror}"
        raise LaunchError(order.attempt_id, type(error).__name__, message, user=True) from None


def _ask_version(python: str) -> tuple[int, ...] | None:
    question = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, timeout=30, check=True, cwd="/")
        return tuple(int(word) for word in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
