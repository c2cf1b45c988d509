"""From the call that submits a trial to the first line of the user's script, and to its first batch.

    python benchmarks/trial_start.py [--json] [--trials 100]

Beside it, in the same run: a cold ``python`` that imports torch, and a Ray Tune trial where Ray is installed. All
times are taken on the machine's monotonic clock, which its processes share.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _report import Row, median, parser, percentile, publish

from overnight import Client
from overnight.core.enums import ArgsStyle, RunKind
from overnight.core.models.api import ProposalIn
from overnight.core.models.spec import Command, TrialConfig
from overnight.core.settings import Settings, build_settings

IDLE_SECONDS = 0.5
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

FIRST_LINE = """\
import time; first_line = time.monotonic_ns()
import os, pathlib
pathlib.Path(os.environ["STAMP"]).write_text(str(first_line))
"""

FIRST_LINE_TORCH = """\
import torch
import time; first_line = time.monotonic_ns()
import os, pathlib
pathlib.Path(os.environ["STAMP"]).write_text(str(first_line))
"""

FIRST_BATCH = """\
import os, pathlib, runpy, sys, time
from overnight import trainer

taken = trainer.Run.batches

def batches(run, *args, **kwargs):
    for batch in taken(run, *args, **kwargs):
        pathlib.Path(os.environ["STAMP"]).write_text(str(time.monotonic_ns()))
        sys.exit(0)

trainer.Run.batches = batches
sys.path.insert(0, os.environ["EXAMPLES"])
runpy.run_path(os.path.join(os.environ["EXAMPLES"], "digits.py"), run_name="__main__")
"""


@contextlib.contextmanager
def server(folder: Path, pool: str = "fake:1") -> Iterator[Settings]:
    """``overnight up`` with a few fake devices, in a home of its own."""
    settings = build_settings(os.environ, home=folder / "home", pool=pool)
    settings.home.mkdir()
    env = {**os.environ, "OVERNIGHT_HOME": str(settings.home), "OVERNIGHT_POOL": pool}
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "overnight", "up"], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for(lambda: settings.paths.server_file.exists(), 60, "the server")
        yield settings
    finally:
        up.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            up.wait(20)
        if up.poll() is None:
            up.kill()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.002)


def read_stamp(path: Path) -> int:
    """The nanoseconds that the script wrote; waits for them."""
    wait_for(lambda: path.exists() and path.stat().st_size > 0, 120, str(path))
    return int(path.read_text())


def overnight_starts(
    client: Client, folder: Path, source: str, count: int, name: str, pause_seconds: float = IDLE_SECONDS
) -> list[float]:
    """Milliseconds from the submit call to the stamp, one trial after the other on a free device.

    Args:
        pause_seconds: From the moment that the device is free to the next submit. Without a pause the next start
            competes with what the last trial left to do: MLflow, clean-up, the next warm process.
    """
    script = folder / f"{name}.py"
    script.write_text(source)
    found = []
    for i in range(count + 3):
        stamp = folder / f"{name}-{i}.stamp"
        config = TrialConfig(
            experiment=name,
            run=Command(kind=RunKind.SCRIPT, target=script.name),
            args=ArgsStyle.NONE,
            python=sys.executable,
            workdir=str(folder),
            env={**os.environ, "STAMP": str(stamp), "EXAMPLES": str(EXAMPLES)},
        )
        began = time.monotonic_ns()
        proposal = client.propose(ProposalIn(config=config, params={"i": i}))
        found.append((read_stamp(stamp) - began) / 1e6)
        client.wait([proposal.trials[0].id], timeout=60)
        wait_for(lambda: all(d.trial_id is None for d in client.devices()), 30, "a free device")
        time.sleep(pause_seconds)
    return found[3:]  # the first ones warm the process up


def cold_starts(folder: Path, source: str, count: int, name: str) -> list[float]:
    """The same script under a plain, cold ``python``."""
    script = folder / f"cold-{name}.py"
    script.write_text(source)
    found = []
    for i in range(count):
        stamp = folder / f"cold-{name}-{i}.stamp"
        env = {**os.environ, "STAMP": str(stamp), "EXAMPLES": str(EXAMPLES)}
        place = folder / f"cold-{name}-{i}"  # of its own: the trainer would go on with the run before
        place.mkdir()
        began = time.monotonic_ns()
        subprocess.run([sys.executable, str(script)], cwd=place, env=env, check=True, capture_output=True)
        found.append((read_stamp(stamp) - began) / 1e6)
    return found


def ray_starts(folder: Path, count: int) -> list[float]:
    """Ray Tune: from ``fit()`` to the trainable's first line, on a cluster that is up. Empty without Ray."""
    try:
        import ray
        from ray import tune
    except ImportError:
        return []
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    found = []
    try:
        for i in range(count):
            stamp = folder / f"ray-{i}.stamp"

            def trainable(config: dict[str, str]) -> None:
                import pathlib
                import time

                pathlib.Path(config["stamp"]).write_text(str(time.monotonic_ns()))

            tuner = tune.Tuner(
                trainable,
                param_space={"stamp": str(stamp)},
                run_config=tune.RunConfig(storage_path=str(folder / "ray"), verbose=0),
            )
            began = time.monotonic_ns()
            with contextlib.redirect_stdout(sys.stderr):
                tuner.fit()
            found.append((read_stamp(stamp) - began) / 1e6)
    finally:
        ray.shutdown()
    return found[1:]


def rows(
    first_line: list[float],
    first_batch: list[float],
    back_to_back: list[float],
    cold: dict[str, list[float]],
    ray: list[float],
) -> list[Row]:
    """One row per measure and peer."""
    result = [
        Row("start_first_line_ms", "ms", median(first_line), median(cold["line"]), "python, import torch", "<= 25"),
        Row(
            "start_first_line_p99_ms",
            "ms",
            round(percentile(first_line, 0.99), 3),
            round(max(cold["line"]), 3),
            "python, import torch (max)",
            "<= 100",
        ),
        Row("start_first_batch_ms", "ms", median(first_batch), median(cold["batch"]), "python examples/digits.py"),
        Row("start_back_to_back_ms", "ms", median(back_to_back), median(cold["line"]), "python, import torch"),
    ]
    if ray:
        result.append(Row("start_first_line_ms", "ms", median(first_line), median(ray), "Ray Tune trial", "<= 25"))
    else:
        result.append(
            Row("start_first_line_ms", "ms", median(first_line), None, "Ray Tune (extra ray not installed)", "<= 25")
        )
    return result


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__ or "")
    options.add_argument("--trials", type=int, default=100, help="trials of ours (default 100)")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="overnight-bench-") as name:
        folder = Path(name)
        with server(folder) as settings, Client(settings) as client:
            line = overnight_starts(client, folder, FIRST_LINE, arguments.trials, "line")
            batch = overnight_starts(client, folder, FIRST_BATCH, max(5, arguments.trials // 5), "batch")
            chained = overnight_starts(client, folder, FIRST_LINE, max(5, arguments.trials // 4), "chained", 0.0)
        cold = {
            "line": cold_starts(folder, FIRST_LINE_TORCH, 5, "line"),
            "batch": cold_starts(folder, FIRST_BATCH, 5, "batch"),
        }
        ray = ray_starts(folder, 6)
    publish("trial_start", rows(line, batch, chained, cold, ray), as_json=arguments.json)


if __name__ == "__main__":
    main()
