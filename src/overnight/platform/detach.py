"""`overnight up -d`: a background `up` that outlives its terminal, and tells its starter how the start went.

``python -m overnight.platform.detach`` forks, so that the process that stays belongs to nobody's terminal or session; a
pipe carries its events, as JSON lines, until the server answers or cannot start.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overnight.core.errors import OvernightError, SetupError, from_dict
from overnight.core.settings import Settings, build_settings
from overnight.platform.server.environment import settings_environment
from overnight.platform.up import UpEvent, run_up


def run_detached(settings: Settings, on_event: Callable[[UpEvent], None]) -> int:
    """Starts `up` in the background; returns 0 when its server answers.

    Raises:
        OvernightError: It could not start; the message is its own.
    """
    settings.paths.logs.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        try:
            with (settings.paths.logs / "up.log").open("ab") as output:
                subprocess.run(
                    [sys.executable, "-m", "overnight.platform.detach", str(writing)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[writing],
                    env=dict(os.environ) | settings_environment(settings),
                    cwd="/",
                    check=True,
                )
        except subprocess.CalledProcessError as error:
            raise SetupError(
                f"`overnight up` could not be put into the background: {error}",
                hint="Run it in a terminal of its own: overnight up",
            ) from None
        finally:
            os.close(writing)
        for line in pipe:
            message = json.loads(line)
            if "error" in message:
                raise from_dict(message["error"])
            event = UpEvent(**message)
            on_event(event)
            if event.kind == "server":
                return 0
    raise SetupError("`overnight up` ended before its server answered", hint=f"See {settings.paths.logs / 'up.log'}.")


class _Starter:
    """The other end of the pipe; gone once the start has been reported."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w")

    def event(self, event: UpEvent) -> None:
        """Reports, and writes to the log (standard output)."""
        print(event.message, flush=True)
        self.send(asdict(event))
        if event.kind == "server":
            self._pipe.close()

    def send(self, message: dict[str, Any]) -> None:
        """One line, if somebody still listens."""
        if self._pipe.closed:
            return
        try:
            self._pipe.write(json.dumps(message) + "\n")
            self._pipe.flush()
        except OSError:
            self._pipe = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the starter is gone


def main() -> int:
    """The background process."""
    fd = int(sys.argv[1])
    if os.fork():
        os._exit(0)
    os.setsid()
    starter = _Starter(fd)
    try:
        home_file = build_settings(os.environ).paths.settings_file
        text = Path(home_file).read_text() if home_file.is_file() else ""
        return run_up(build_settings(os.environ, text), on_event=starter.event)
    except OvernightError as error:
        print(error, file=sys.stderr, flush=True)
        starter.send({"error": error.to_dict()})
        return 1


if __name__ == "__main__":
    sys.exit(main())
