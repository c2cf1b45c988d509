"""How a run begins: device, process group, token, fence, and the checkpoint from which it goes on."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overnight.core.canonical import digest
from overnight.core.errors import OvernightError, SetupError, from_dict
from overnight.core.staging import STAGING
from overnight.trainer.checkpoint.fence import claim, next_attempt
from overnight.trainer.checkpoint.handover import Handover
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.pipeline import Pipeline
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token, open_place
from overnight.trainer.checkpoint.reading.finding import ALONE, Reader, complain, open_newest
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.retention import Retention
from overnight.trainer.checkpoint.saver import Saver
from overnight.trainer.checkpoint.staging.stager import Stager
from overnight.trainer.checkpoint.writing.client import WriterClient
from overnight.trainer.checkpoint.writing.order import Author
from overnight.trainer.data.record import SampleRecord
from overnight.trainer.envelope import envelope, warning
from overnight.trainer.environment import ALONE_ROOT, Environment, read_environment, script_name
from overnight.trainer.params import Params, from_json, parse_flags, refuse_typos, resolve, usage

GROUP_TIMEOUT = timedelta(minutes=30)
"""Evaluations on one rank may take long; a dead peer is noticed at once by its closed connection."""


@dataclass(frozen=True)
class Inputs:
    """What the run was given: environment, params, and whether to ignore earlier checkpoints."""

    environment: Environment
    params: Params
    fresh: bool
    rest: list[str]


@dataclass(frozen=True)
class Origin:
    """Where the run goes on.

    Attributes:
        environment: With all folders and the attempt number filled in.
        place: The checkpoint place.
        token: This run's fencing token.
        parent: The checkpoint it forks from, None at step 0.
        identity: Of the place, see :mod:`overnight.trainer.checkpoint.fence`.
        restored: Its content.
    """

    environment: Environment
    place: Place
    token: Token
    parent: CheckpointName | None
    identity: str
    restored: Restored | None

    @property
    def trial_dir(self) -> Path:
        """Persistent folder of the trial."""
        assert self.environment.trial_dir is not None
        return self.environment.trial_dir

    @property
    def fork(self) -> dict[str, Any]:
        """What the supervisor is told: the step at which this run goes on, and from whose checkpoint."""
        if self.parent is None:
            return {"step": 0, "parent": None}
        return {"step": self.parent.step, "parent": [self.parent.token.attempt, self.parent.token.generation]}

    @property
    def attempt_dir(self) -> Path:
        """Folder of this attempt."""
        assert self.environment.attempt_dir is not None
        return self.environment.attempt_dir


def read_inputs(defaults: dict[str, Any], fresh: bool) -> Inputs:
    """Reads environment and arguments.

    A trial's params come from the environment; otherwise flags on the command line overlay the defaults, and the run's
    folder is ``.overnight/<script>/<hash of params>``, so that the same command goes on where it stopped.

    Raises:
        BadInputError: A variable, flag or param that cannot be right; the message names it.
    """
    environment = read_environment(os.environ)
    if environment.params is not None:
        parsed = parse_flags(sys.argv[1:], {})
        params = resolve(defaults, from_json(environment.params))
    else:
        parsed = parse_flags(sys.argv[1:], defaults)
        if environment.alone:
            _answer_at_once(parsed.rest, defaults)
        params = resolve(defaults, parsed.values)
    fresh = (fresh or parsed.fresh) and environment.attempt is None  # a trial that is started again always goes on
    folder = Path.cwd() / ALONE_ROOT / script_name() / digest(dict(params))[:12]
    return Inputs(environment.placed(folder), params, fresh, parsed.rest)


def _answer_at_once(rest: list[str], defaults: dict[str, Any]) -> None:
    """Help, and words that look like a mistyped param: both must not train."""
    if {"-h", "--help"} & set(rest):
        print(usage(Path(sys.argv[0]).name, defaults))
        raise SystemExit(0)
    refuse_typos(rest, defaults)


def pick_device(environment: Environment) -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join_group(environment: Environment, device: torch.device) -> tuple[dist.ProcessGroup | None, bool]:
    """Joins the process group of all ranks, unless the script has, and makes a private gloo group.

    Returns:
        The private group, None for one rank; and whether the main group is ours to end.
    """
    if environment.world_size == 1:
        return None, False
    ours = not dist.is_initialized()
    if ours:
        own_gpu = device.type == "cuda" and torch.cuda.device_count() >= environment.local_world_size
        dist.init_process_group(
            "nccl" if own_gpu else "gloo",
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=GROUP_TIMEOUT,
            device_id=device if own_gpu else None,
        )
    return dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT), ours


def claim_origin(inputs: Inputs, group: dist.ProcessGroup | None) -> Origin:
    """Reads the newest good checkpoint, on all ranks, and fences the place off, on rank 0 for all.

    Raises:
        NoUsableCheckpointError: The place has content that cannot be used.
        FencedError: A newer start owns the place.
        SetupError: The run's folder cannot be written.
    """
    environment = inputs.environment
    place = open_place(str(environment.checkpoints))
    restored = None if inputs.fresh else open_newest(place, reader_of(environment, group))
    parent = restored.manifest.name if restored is not None else None
    parent_place = restored.manifest.place if restored is not None else ""

    def decide() -> dict[str, Any]:
        with _writing_to(place):
            _ignore_in_git(environment)
            attempt = environment.attempt or next_attempt(place)
            token = Token(attempt, environment.generation)
        fence = claim(place, token, parent, fresh=inputs.fresh, parent_place=parent_place)
        return {"attempt": attempt, "place": fence.place}

    decision = from_rank_zero(decide, group)
    if restored is not None and environment.rank == 0:
        _tell_resumed(place, restored.manifest, environment.world_size)
    environment = environment.numbered(decision["attempt"])
    token = Token(decision["attempt"], environment.generation)
    return Origin(environment, place, token, parent, decision["place"], restored)


def reader_of(environment: Environment, group: dist.ProcessGroup | None) -> Reader:
    """This rank among those that read a checkpoint together."""
    if group is None:
        return ALONE

    def gather(value: Any) -> list[Any]:
        box: list[Any] = [None] * environment.world_size
        dist.all_gather_object(box, value, group=group)
        return box

    return Reader(environment.rank, environment.world_size, environment.local_world_size, gather)


def from_rank_zero(decide: Callable[[], dict[str, Any]], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What ``decide`` returns on rank 0, on every rank; its error is raised on every rank too."""
    if group is None:
        return decide()
    box: list[Any] = [None]
    failure: OvernightError | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = {"value": decide()}
        except OvernightError as error:
            failure = error
            box[0] = {"error": error.to_dict()}
    dist.broadcast_object_list(box, src=0, group=group)
    if failure is not None:
        raise failure
    if "error" in box[0]:
        raise from_dict(box[0]["error"])
    value: dict[str, Any] = box[0]["value"]
    return value


def make_saver(
    origin: Origin, seed: int, device: torch.device, retention: Retention, *, before_submit: Callable[[], object]
) -> Saver:
    """The saver of this rank; ``before_submit`` is called in the background before a save is handed to its writer."""
    environment, place = origin.environment, origin.place
    rank, world_size = environment.rank, environment.world_size
    claimed: dict[str, Any] = {"token": origin.token, "parent": origin.parent, "place": origin.identity}
    author = Author(**claimed, rank=rank, world_size=world_size, seed=seed)
    stager = Stager(np.random.default_rng())
    staging = origin.trial_dir / STAGING
    writer = WriterClient(place.url, author, retention, staging, tidies=environment.alone)
    handover = None
    if origin.restored is not None:
        handover = Handover(origin.restored, device, rank=rank, world_size=world_size, seed=seed, complain=complain)
    return Saver(Pipeline(place, author, stager, writer, before_submit), stager, handover)


def open_record(origin: Origin) -> SampleRecord:
    """This rank's sample record in the folder of the attempt.

    Raises:
        DataError: It cannot be written.
    """
    environment, token = origin.environment, origin.token
    return SampleRecord(
        origin.attempt_dir,
        rank=environment.rank,
        world_size=environment.world_size,
        attempt=token.attempt,
        generation=token.generation,
    )


def _tell_resumed(place: Place, manifest: Manifest, world_size: int) -> None:
    complain(f"resumed at step {manifest.step} from {place}/{manifest.name}")
    if manifest.world_size != world_size:
        complain(
            f"it was saved by {manifest.world_size} rank(s), this run has {world_size}: "
            "the order of samples continues exactly, the last bits of sums may differ"
        )


def tell_differences(manifest: Manifest, device: torch.device, world_size: int) -> None:
    """Says what of this run is not as it was at the save; after the script has set its flags."""
    saved = {"versions": manifest.versions, "threads": manifest.threads, "envelope": manifest.envelope}
    if (text := warning(saved, envelope(device, world_size))) is not None:
        complain(text)


@contextmanager
def _writing_to(place: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"the run's folder cannot be written: {error}",
            hint=f"Start the script in a folder that can be written and has room; checkpoints go to {place}.",
        ) from error


def _ignore_in_git(environment: Environment) -> None:
    root = Path.cwd() / ALONE_ROOT
    if environment.trial_dir is not None and root in environment.trial_dir.parents:
        root.mkdir(exist_ok=True)
        (root / ".gitignore").write_text("*\n")
