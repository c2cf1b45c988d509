"""What the environment says: under overnight, under torchrun or alone, a script sees one picture.

The variables are listed in docs/architecture.md, "Ranks see". Nothing is read at import time, since a warm process
imports this package long before it knows which trial it will become.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overnight.core.errors import BadInputError, InvalidParamsError

ALONE_ROOT = ".overnight"
"""Folder, in the working directory, of runs that nobody scheduled."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Who this process is.

    Attributes:
        trial_id, trial_name, experiment: None when nobody scheduled this run.
        attempt, generation: The fencing token; ``attempt`` is None when the run shall take the next free one.
        trial_dir, attempt_dir: Persistent folder of the trial; this attempt's.
        checkpoints: Checkpoint place, a path or URL.
        params: The trial's params as JSON text, None when flags decide.
        supervisor: Path of the supervisor's Unix socket.
        objective: The objective, if one was asked for.
        mtbf_seconds: Mean time between failures of one rank, if the platform knows it.
        rank, local_rank, world_size, local_world_size: As torchrun sets them.
    """

    trial_id: str | None = None
    trial_name: str | None = None
    experiment: str | None = None
    attempt_id: str | None = None
    attempt: int | None = None
    generation: int = 1
    trial_dir: Path | None = None
    attempt_dir: Path | None = None
    checkpoints: str | None = None
    params: str | None = None
    seed: int | None = None
    supervisor: str | None = None
    objective: dict[str, Any] | None = None
    mtbf_seconds: float | None = None
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def alone(self) -> bool:
        """Whether nobody supervises this run: it was started by ``python`` or ``torchrun``."""
        return self.supervisor is None

    def placed(self, trial_dir: Path) -> "Environment":
        """The same environment with every folder that is still open put below ``trial_dir``."""
        return replace(
            self,
            trial_dir=self.trial_dir or trial_dir,
            checkpoints=self.checkpoints or str((self.trial_dir or trial_dir) / "checkpoints"),
        )

    def numbered(self, attempt: int) -> "Environment":
        """The same environment as attempt number ``attempt`` (from 1), with its folder."""
        if self.trial_dir is None:
            raise ValueError("an attempt needs the folder of its trial")
        folder = self.attempt_dir or self.trial_dir / "attempts" / f"{attempt:04d}"
        return replace(self, attempt=attempt, attempt_dir=folder)


def read_environment(env: Mapping[str, str]) -> Environment:
    """Reads the environment.

    Raises:
        BadInputError: A variable that should be a number or JSON is not; the message names it.
    """

    def text(name: str) -> str | None:
        return env.get(name) or None

    def path(name: str) -> Path | None:
        return Path(value) if (value := env.get(name)) else None

    world_size = _number(env, "WORLD_SIZE", 1)
    result = Environment(
        trial_id=text("OVERNIGHT_TRIAL_ID"),
        trial_name=text("OVERNIGHT_TRIAL_NAME"),
        experiment=text("OVERNIGHT_EXPERIMENT"),
        attempt_id=text("OVERNIGHT_ATTEMPT_ID"),
        attempt=_number(env, "OVERNIGHT_ATTEMPT", 0) or None,
        generation=_number(env, "OVERNIGHT_GENERATION", 1),
        trial_dir=path("OVERNIGHT_TRIAL_DIR"),
        attempt_dir=path("OVERNIGHT_ATTEMPT_DIR"),
        checkpoints=text("OVERNIGHT_CHECKPOINTS"),
        params=text("OVERNIGHT_PARAMS"),
        seed=_number(env, "OVERNIGHT_SEED", 0) if text("OVERNIGHT_SEED") else None,
        supervisor=text("OVERNIGHT_SUPERVISOR"),
        objective=_objective(text("OVERNIGHT_OBJECTIVE")),
        mtbf_seconds=_number(env, "OVERNIGHT_MTBF_SECONDS", 0) or None,
        rank=_number(env, "RANK", 0),
        local_rank=_number(env, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
    )
    if not 0 <= result.rank < result.world_size:
        raise BadInputError(
            f"RANK={result.rank} does not fit WORLD_SIZE={result.world_size}",
            hint="Unset both to run alone, or start the ranks with torchrun.",
        )
    return result


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise BadInputError(f"{name}={value!r} is not an integer", hint=f"Unset {name} or give it a number.") from None


def _objective(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        raise InvalidParamsError(f"OVERNIGHT_OBJECTIVE is not JSON: {text[:80]!r}") from None
    return value if isinstance(value, dict) else None


def script_name() -> str:
    """Name of the running script without its suffix; ``interactive`` where there is none."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else "")
    return Path(file).stem if file and file not in ("-c", "-") else "interactive"
