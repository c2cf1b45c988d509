"""From a committed attempt to the order that its node executes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from overnight.core.models.api import Trial
from overnight.core.models.node import Order, OrderDevice
from overnight.core.models.spec import Objective
from overnight.core.paths import Home


@dataclass(frozen=True)
class Surroundings:
    """What an order takes from the installation rather than from the trial.

    Attributes:
        home: Layout of the home.
        grace_seconds: From a yield to SIGTERM.
        num_cores: Processor cores of the node.
        num_devices: Devices of the node.
        mtbf_seconds: Mean time between failures of one of the attempt's devices, None if nobody counts.
    """

    home: Home
    grace_seconds: float
    num_cores: int
    num_devices: int
    mtbf_seconds: float | None = None


def seed_of(trial: Trial) -> int:
    """The trial's seed: the configured one for replicate 0, else derived; the same in each of its attempts."""
    if trial.config.seed is not None and trial.replicate == 0:
        return trial.config.seed
    base = trial.id if trial.config.seed is None else f"{trial.config.seed}:{trial.replicate}"
    return int.from_bytes(hashlib.sha256(base.encode()).digest()[:8], "big") >> 1


def make_order(
    trial: Trial,
    *,
    attempt_id: str,
    number: int,
    generation: int,
    node_id: str,
    devices: Sequence[OrderDevice],
    objective: Objective | None,
    around: Surroundings,
) -> Order:
    """Builds the order of one attempt on one node.

    Threads per rank are the node's cores shared by its devices, not by what runs just now: a resumed trial must find
    the same number, or its sums differ in the last bits.
    """
    home, config = around.home, trial.config
    world_size = config.compute.procs or len(devices)
    cores_of_devices = max(1, around.num_cores // max(1, around.num_devices)) * len(devices)
    trial_dir = home.trial_dir(trial.id)
    return Order(
        attempt_id=attempt_id,
        trial_id=trial.id,
        trial_name=trial.name,
        experiment=trial.experiment,
        number=number,
        generation=generation,
        node_id=node_id,
        devices=tuple(devices),
        world_size=world_size,
        ranks=tuple(range(world_size)),
        run=config.run,
        args=config.args,
        params=trial.params,
        python=config.python,
        cwd=str(home.code_dir(config.code)) if config.code else config.workdir or str(trial_dir),
        code=config.code,
        code_links=config.code_links,
        env=config.env,
        trial_dir=str(trial_dir),
        attempt_dir=str(home.attempt_dir(trial.id, number)),
        checkpoints=str(home.checkpoints(trial.id)),
        objective=objective,
        resume=config.resume,
        seed=seed_of(trial),
        mlflow_run_id=trial.mlflow_run_id,
        mlflow_experiment=trial.experiment,
        server_file=str(home.server_file),
        token_file=str(home.token_file),
        grace_seconds=around.grace_seconds,
        max_seconds=config.compute.max_time_seconds,
        hang_seconds=config.compute.hang_seconds,
        threads=max(1, cores_of_devices // world_size),
        mtbf_seconds=around.mtbf_seconds and around.mtbf_seconds * world_size / len(devices),
    )
