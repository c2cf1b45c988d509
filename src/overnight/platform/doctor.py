"""`overnight doctor`: what this machine and this home are like, and how to mend what is not right.

Every check answers; none may raise, hang or change anything.
"""

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from overnight import __version__
from overnight.core.clock import SystemClock
from overnight.core.errors import OvernightError
from overnight.core.settings import Settings
from overnight.platform.identity import holder
from overnight.platform.pools import open_pool
from overnight.platform.server.tokens import is_loopback, read_token
from overnight.platform.switchboard import Switchboard
from overnight.store import filesystems

Level = Literal["ok", "warning", "problem"]

MIN_PYTHON = (3, 11)
LOW_BYTES = 5 * 2**30
NO_BYTES = 200 * 2**20
MAX_SOCKET_PATH = 107
FIRST_SANE_YEAR = 2025

EXTRAS = {
    "server": ("sqlalchemy", "alembic", "fastapi", "uvicorn", "apscheduler", "mlflow", "optuna", "textual"),
    "ray": ("ray",),
    "llm": ("pydantic-ai-slim", "mcp"),
    "postgres": ("psycopg",),
    "s3": ("s3fs",),
}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: The check.
        level: ``ok``, ``warning`` (works, but) or ``problem`` (does not work).
        message: What is the case.
        hint: How to mend it; empty when there is nothing to mend.
    """

    name: str
    level: Level
    message: str
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return self.level == "ok"


def diagnose(settings: Settings) -> list[Finding]:
    """Runs every check, the most basic first."""
    return [_guarded(name, check, settings) for name, check in CHECKS]


Check = Callable[[Settings], Finding | tuple[Level, str] | tuple[Level, str, str]]


def _guarded(name: str, check: Check, settings: Settings) -> Finding:
    try:
        found = check(settings)
    except OvernightError as error:
        return Finding(name, "problem", error.message, error.hint)
    except Exception as error:  # a broken machine is what this is for
        return Finding(name, "problem", f"the check failed: {type(error).__name__}: {error}")
    return found if isinstance(found, Finding) else Finding(name, *found)


def _python(settings: Settings) -> tuple[Level, str, str]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        return "problem", f"Python {version} is too old", "Install Python 3.11 or later and make a new venv with it."
    return "ok", f"Python {version} at {sys.executable}, overnight {__version__}", ""


def _torch(settings: Settings) -> tuple[Level, str, str]:
    version = _version("torch")
    if version is None:
        return "problem", "torch is not installed for this interpreter", "pip install 'torch>=2.9'"
    return "ok", f"torch {version}", ""


def _extras(settings: Settings) -> tuple[Level, str, str]:
    missing = {extra: [name for name in names if _version(name) is None] for extra, names in EXTRAS.items()}
    present = [extra for extra, names in missing.items() if not names]
    if missing["server"]:
        names = ", ".join(missing["server"])
        return "problem", f"the extra 'server' lacks {names}", "pip install 'overnight[server]'"
    return "ok", f"extras: {', '.join(present)}", ""


def _home(settings: Settings) -> tuple[Level, str, str]:
    root = settings.home
    place = next(path for path in (root, *root.parents) if path.exists())
    if not place.is_dir():
        return "problem", f"{place} is not a folder", "Set OVERNIGHT_HOME to a folder."
    if not os.access(place, os.W_OK | os.X_OK):
        return "problem", f"{place} is not writable", "Set OVERNIGHT_HOME to a folder that you may write to."
    if root.exists() and root.stat().st_uid != os.getuid():
        return "warning", f"{root} belongs to another user", "Set OVERNIGHT_HOME to a folder of your own."
    return "ok", f"{root}{'' if root.exists() else ' (will be made)'}", ""


def _filesystem(settings: Settings) -> tuple[Level, str, str]:
    path = settings.home.resolve()
    kind = filesystems.type_of(path, filesystems.MOUNTS.read_text(errors="surrogateescape")) or "unknown"
    if settings.effective_store_url.startswith("sqlite"):
        filesystems.require_local(path)
    return "ok", f"{kind} under the home", ""


def _space(settings: Settings) -> tuple[Level, str, str]:
    place = next(path for path in (settings.home, *settings.home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free under the home"
    if free < NO_BYTES:
        return "problem", text, f"Free some space on the disk of {place}."
    if free < LOW_BYTES:
        return "warning", text, f"Checkpoints need space: free some on the disk of {place}."
    return "ok", text, ""


def _sockets(settings: Settings) -> tuple[Level, str, str]:
    path = settings.paths.node_socket
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        return "problem", f"the socket path {path} is too long", "Set TMPDIR to a short path."
    if not os.access("/tmp", os.W_OK):
        return "problem", "/tmp is not writable, and sockets are kept there", "Make /tmp writable: chmod 1777 /tmp"
    return "ok", f"sockets in {settings.paths.socket_dir}", ""


def _database(settings: Settings) -> tuple[Level, str, str]:
    from overnight.store.engine import Store

    url = settings.effective_store_url
    if url.startswith("sqlite") and not Path(url.removeprefix("sqlite:///")).exists():
        return "ok", "no database yet; the first start makes it", ""
    with Store.open(url, SystemClock(), migrate=False) as store:
        problems = store.check()
        if problems:
            return "problem", f"the database is damaged: {problems[0]}", "Restore a backup: overnight db --help"
        return "ok", f"{store.url} is whole", ""


def _token(settings: Settings) -> tuple[Level, str, str]:
    path = settings.paths.token_file
    if not path.exists():
        return "ok", "no token file yet; the first start makes it", ""
    read_token(path)
    return "ok", f"{path} is closed to others", ""


def _port(settings: Settings) -> tuple[Level, str, str]:
    if holder(settings.paths.server_lock) is not None:
        return "ok", "the server listens", ""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host.strip("[]"), settings.port))
        except OSError as error:
            what = f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}"
            return "problem", what, "Choose another: overnight up --port 0"
    if not is_loopback(settings.host):
        return (
            "warning",
            f"{settings.host} can be reached from other machines",
            "Listen on 127.0.0.1 unless you mean it.",
        )
    return "ok", f"{settings.host}:{settings.port or 'any free port'} can be listened on", ""


def _pool(settings: Settings) -> tuple[Level, str, str]:
    pool = open_pool(settings.pool, settings.paths)
    reports = pool.probe()
    bad = [report for report in reports if report.fatal]
    if bad:
        return "problem", f"{len(bad)} of {len(reports)} devices are faulty: {bad[0].fatal}", "See: overnight devices"
    return "ok", pool.describe(), ""


def _node(settings: Settings) -> tuple[Level, str, str]:
    found = holder(settings.paths.node_lock)
    if found is None:
        return "warning", "no node daemon runs", "Start it: overnight up -d"
    return "ok", f"the node daemon is pid {found.pid}", ""


def _server(settings: Settings) -> tuple[Level, str, str]:
    found = holder(settings.paths.server_lock)
    if found is None:
        return "warning", "no server runs", "Start it: overnight up -d"
    health = Switchboard(settings).health()
    if health is None:
        hint = f"See {settings.paths.logs / 'server.log'}; restart it: overnight down; overnight up -d"
        return "problem", f"the server ({found}) does not answer", hint
    if health.get("version") != __version__:
        what = f"the server is overnight {health.get('version')}, this is {__version__}"
        return "warning", what, "Restart it: overnight down; overnight up -d"
    return "ok", f"the server answers ({found})", ""


def _clock(settings: Settings) -> tuple[Level, str, str]:
    now = SystemClock().now()
    if now.year < FIRST_SANE_YEAR:
        return "problem", f"the clock says {now:%Y-%m-%d}", "Set it, e.g.: timedatectl set-ntp true"
    newest = settings.paths.server_file
    if newest.exists() and newest.stat().st_mtime > now.timestamp() + 60:
        return "warning", "the clock is behind the newest file of the home", "Set it, e.g.: timedatectl set-ntp true"
    return "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC", ""


def _mlflow(settings: Settings) -> tuple[Level, str, str]:
    version = _version("mlflow")
    if version is None:
        return "problem", "mlflow is not installed", "pip install 'overnight[server]'"
    return "ok", f"mlflow {version}, tracking at {settings.effective_mlflow_uri}", ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


CHECKS: tuple[tuple[str, Check], ...] = (
    ("python", _python),
    ("torch", _torch),
    ("extras", _extras),
    ("home", _home),
    ("file system", _filesystem),
    ("space", _space),
    ("sockets", _sockets),
    ("clock", _clock),
    ("token", _token),
    ("database", _database),
    ("devices", _pool),
    ("port", _port),
    ("node", _node),
    ("server", _server),
    ("mlflow", _mlflow),
)
