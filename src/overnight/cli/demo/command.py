"""The ``demo`` command: makes a home, starts ``overnight up`` in it, plays the scenario, shows what came out."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from overnight.agents.client import AsyncClient, Client
from overnight.cli.demo.facts import Facts
from overnight.cli.demo.scenario import Scenario, demo_config
from overnight.cli.demo.story import Story
from overnight.cli.demo.view import run_scenario, show_final
from overnight.core.errors import NotFoundError, OvernightError
from overnight.core.models.api import Leaderboard
from overnight.core.settings import Settings

STOP_SECONDS = 20.0
MIN_TRIALS = 12


def find_example(name: str) -> Path:
    """An example script, as installed.

    Raises:
        NotFoundError: This installation came without examples.
    """
    import overnight

    path = Path(overnight.__file__).parent / "examples" / name
    if not path.is_file():
        raise NotFoundError(f"the example {name} is not installed", hint="Run the demo from a checkout.")
    return path.resolve()


@contextmanager
def running_up(settings: Settings) -> Iterator[None]:
    """``overnight up`` as a child process; at the end it is asked to stop everything, then made to."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OVERNIGHT_")}
    env |= {
        "OVERNIGHT_HOME": str(settings.home),
        "OVERNIGHT_POOL": settings.pool or "",
        "OVERNIGHT_PROBE_SECONDS": str(settings.probe_seconds),
        "OVERNIGHT_HEARTBEAT_SECONDS": str(settings.heartbeat_seconds),
    }
    settings.paths.logs.mkdir(parents=True, exist_ok=True)
    with (settings.paths.logs / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "overnight", "up"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _play(settings: Settings, console: Console, *, trials: int, live: bool) -> tuple[Facts, Leaderboard]:
    script = find_example("digits.py")
    with running_up(settings):
        scenario = Scenario(
            AsyncClient(settings),
            settings.paths,
            Story(),
            demo_config(script, sys.executable),
            num_trials=trials,
        )
        facts = run_scenario(
            scenario, live=live, say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
        )
        with Client(settings) as client:
            return facts, client.leaderboard("digits")


def demo_command(*, json_output: bool, home: Path | None = None, trials: int = MIN_TRIALS, plain: bool = False) -> int:
    """Runs the demo.

    Args:
        json_output: Print one envelope instead of pages; the story goes to stderr.
        home: Where to play; a fresh temporary folder if None. It is kept, for looking around.
        trials: Trials of the sweep, at least 12.
        plain: Lines instead of the live screen.

    Returns:
        Exit code: 0 if everything came out as promised.
    """
    console = Console(stderr=json_output)
    place = home or Path(tempfile.mkdtemp(prefix="overnight-demo-"))
    settings = Settings(home=place.absolute(), pool="fake:4", probe_seconds=0.5, heartbeat_seconds=1.0)
    live = console.is_terminal and not plain and not json_output
    try:
        facts, board = _play(settings, console, trials=max(MIN_TRIALS, trials), live=live)
    except OvernightError as error:
        if json_output:
            known = {name: error.to_dict()[name] for name in ("code", "message", "retryable")}
            print(json.dumps({"v": 1, "error": known}))
        console.print(f"The demo failed: {error}", style="red", markup=False)
        return 1
    if json_output:
        print(json.dumps({"v": 1, "data": facts.to_dict()}))
    else:
        show_final(console, facts, board, settings)
    for problem in facts.problems:
        console.print(f"Not as promised: {problem}", style="red", markup=False)
    return 1 if facts.problems else 0
