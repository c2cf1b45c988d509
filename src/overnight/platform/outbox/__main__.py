"""``python -m overnight.platform.outbox --home HOME``: tells MLflow what the store knows, until its server is gone.

Standard input is a pipe from the server: when it ends, so does this process. It may be killed at any moment.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from overnight.core.clock import Clock, SystemClock
from overnight.core.errors import HomeHeldError, OvernightError, UnavailableError
from overnight.core.settings import Settings, build_settings
from overnight.platform.identity import LockFile

if TYPE_CHECKING:
    from overnight.platform.outbox.projector import Projector
    from overnight.store.engine import Store

log = logging.getLogger("overnight.outbox")

POLL_SECONDS = 0.25
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 60.0
NICENESS = 10
"""Telling MLflow takes ten times as long as starting a trial; it must not do so at the expense of the start."""

LEAVE_SECONDS = 5.0
"""How long a call of MLflow may delay the end. Killed in the middle of it, nothing is lost."""

_MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


def quiet_mlflow(environment: MutableMapping[str, str]) -> None:
    """Settings that mlflow reads when it is imported: no telemetry, short waits (we pause and try again ourselves)."""
    for name, value in _MLFLOW_DEFAULTS.items():
        environment.setdefault(name, value)


def main(argv: list[str] | None = None) -> int:
    """Runs until told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m overnight.platform.outbox", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    home = parser.parse_args(argv).home
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    os.nice(NICENESS)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    threading.Thread(target=_watch_server, args=(stop,), name="server", daemon=True).start()
    try:
        config_file = home / "overnight.toml"
        settings = build_settings(os.environ, config_file.read_text() if config_file.exists() else "", home=home)
        lock = _lock(settings, stop)
        if lock is not None:
            _serve(settings, stop)
            lock.release()
    except OvernightError as error:
        log.error("%s", error)
        return 1
    return 0


def _watch_server(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()
    threading.Event().wait(LEAVE_SECONDS)
    os._exit(0)


def _lock(settings: Settings, stop: threading.Event) -> LockFile | None:
    """One outbox a home: the one of a server that was killed leaves a moment after it."""
    while not stop.is_set():
        try:
            return LockFile.acquire(settings.home / "outbox.lock", "outbox")
        except HomeHeldError:
            stop.wait(POLL_SECONDS)
    return None


def _serve(settings: Settings, stop: threading.Event) -> None:
    from overnight.store.engine import Store

    clock = SystemClock()
    with Store.open(settings.effective_store_url, clock, migrate=False) as store:
        projector: Projector | None = None
        pause = 0.0
        while not stop.is_set():
            try:
                if projector is None and _is_needed(store):
                    projector = _projector(settings, store, clock)
                if projector is not None:
                    projector.round()
                pause = 0.0
            except UnavailableError as error:
                pause = min(max(FIRST_PAUSE_SECONDS, pause * 2), MAX_PAUSE_SECONDS)
                log.warning("trying again in %g s: %s", pause, error)
            stop.wait(pause or POLL_SECONDS)


def _is_needed(store: "Store") -> bool:
    """Whether there is anything to tell: before that, nobody pays the seconds and the 200 MB that mlflow costs."""
    from overnight.store import outbox

    with store.read() as conn:
        return outbox.lag(conn) > 0


def _projector(settings: Settings, store: "Store", clock: Clock) -> "Projector":
    quiet_mlflow(os.environ)
    os.chdir(settings.home)  # mlflow makes a folder for artifacts where it is
    # Late, since mlflow reads the environment when it is imported.
    from overnight.platform.outbox.projector import Projector
    from overnight.store.tracking import Tracker, prepare_database

    uri = settings.effective_mlflow_uri
    artifacts = None if uri.startswith(("http:", "https:", "databricks")) else settings.home / "artifacts"
    if settings.mlflow_uri is None:
        prepare_database(settings.home / "mlflow.db")
    return Projector(store, Tracker(uri, artifacts), clock)


if __name__ == "__main__":
    sys.exit(main())
