"""Find, start and ask the node daemon of a home. For ``overnight up`` and the server; imports little, starts at
once."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

from overnight.core.errors import SetupError
from overnight.core.paths import Home
from overnight.core.settings import Settings
from overnight.platform.identity import Holder, holder

START_SECONDS = 30.0


def find_daemon(home: Home) -> Holder | None:
    """The living daemon of a home, or None."""
    return holder(home.node_lock)


def spawn_daemon(settings: Settings) -> Holder:
    """Starts the daemon in a session of its own and waits until it serves. If one lives already, that one is returned.

    Raises:
        SetupError: It did not start; the message ends with its last words.
    """
    home = settings.paths
    found = find_daemon(home)
    if found is not None:
        return found
    home.logs.mkdir(parents=True, exist_ok=True)
    log = home.logs / "node.log"
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        with log.open("ab") as output:
            said_from = output.tell()
            try:
                subprocess.run(
                    [*_command(settings), "--ready-fd", str(writing)],
                    env=dict(os.environ) | {"OVERNIGHT_HOME": str(home.root)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[writing],
                    cwd="/",
                    check=False,
                )
            finally:
                os.close(writing)
        said = pipe.readline()
    found = find_daemon(home)
    if found is None:
        words = log.read_bytes()[said_from:].decode(errors="replace").strip()[-2_000:]
        raise SetupError(f"the node daemon did not start: {said.strip() or words}", hint=f"Its log is {log}.")
    return found


def _command(settings: Settings) -> list[str]:
    words = [sys.executable, "-m", "overnight.platform.node", "--home", str(settings.home)]
    return words if settings.pool is None else [*words, "--pool", settings.pool]


def ask(home: Home, message: dict[str, Any], timeout_seconds: float = 5.0) -> dict[str, Any]:
    """One operation of the daemon.

    Args:
        home: Layout of the home.
        message: ``{"op": "ping"}`` (who it is, its node id and attempts), ``{"op": "poke"}`` (the server is back),
            ``{"op": "stop"}`` (yield the workers, report, leave; answers at once).
        timeout_seconds: For the answer.

    Raises:
        OSError: No daemon answers.
    """
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(timeout_seconds)
        channel.connect(str(home.node_socket))
        channel.sendall(json.dumps(message).encode() + b"\n")
        with channel.makefile() as lines:
            answer = lines.readline()
    if not answer:
        raise ConnectionError("the node daemon closed the connection without an answer")
    value: dict[str, Any] = json.loads(answer)
    return value
