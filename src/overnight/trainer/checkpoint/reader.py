"""Reading checkpoints: the newest good one of the newest lineage, and what was passed over on the way.

Only what a manifest vouches for exists. Tokens are walked newest first; a token that has committed hides what its
ancestors committed after the fork. A place that holds checkpoints of which none can be used is an error, never step 0.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from overnight.core.errors import BadInputError, CorruptCheckpointError, NotFoundError, NoUsableCheckpointError
from overnight.trainer.checkpoint.fence import Fence, read_fences
from overnight.trainer.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Place, Token, open_place
from overnight.trainer.checkpoint.state import decode
from overnight.trainer.checkpoint.writer import private_key


def complain(text: str) -> None:
    """Tells the person who reads the run's output."""
    print(f"overnight: {text}", file=sys.stderr, flush=True)


def lineage(place: Place) -> Iterator[CheckpointName]:
    """Published checkpoints from which a new token may go on, best first; their content is not looked at."""
    fences = read_fences(place)
    by_token: dict[Token, list[CheckpointName]] = defaultdict(list)
    for name in place.checkpoints():
        by_token[name.token].append(name)
    floor = max((token for token, fence in fences.items() if fence.fresh), default=Token(0, 0))
    token = max((token for token in by_token if token >= floor), default=None)
    limit: tuple[int, int] | None = None
    while token is not None:
        for name in sorted(by_token[token], reverse=True):
            if limit is None or (name.step, name.save) <= limit:
                yield name
        token, limit = _ancestor(fences.get(token), token, by_token)


def _ancestor(
    fence: Fence | None, token: Token, by_token: dict[Token, list[CheckpointName]]
) -> tuple[Token | None, tuple[int, int] | None]:
    if fence is None or not fence.readable:
        older = [other for other in by_token if other < token]
        return max(older, default=None), None
    if fence.parent is None:
        return None, None
    return fence.parent.token, (fence.parent.step, fence.parent.save)


def newest_good(
    place: Place | str | Path, complaints: Callable[[str], None] = complain
) -> tuple[CheckpointName, Manifest] | None:
    """The newest usable checkpoint, every byte verified.

    Args:
        place: A place, path or URL.
        complaints: Called with one line for each checkpoint that is passed over.

    Returns:
        None when nothing was ever committed.

    Raises:
        NoUsableCheckpointError: There are checkpoints (or foreign files), but none that can be used.
    """
    place = place if isinstance(place, Place) else open_place(place)
    reasons: list[str] = []
    for name in lineage(place):
        try:
            return name, verify(local_folder(place, name))
        except CorruptCheckpointError as error:
            reasons.append(f"{name}: {error.message}")
            complaints(f"passed over {name}: {error.message}")
    if reasons:
        raise NoUsableCheckpointError(
            f"{place} holds {len(reasons)} checkpoint(s) of which none can be used: {'; '.join(reasons)[:2000]}",
            hint="Repair or move that folder away to start from step 0, or pass --fresh.",
        )
    if not place.tokens() and (foreign := place.foreign()):
        raise NoUsableCheckpointError(
            f"{place} holds no checkpoint of overnight, but other files: {', '.join(foreign[:5])}",
            hint="Use an empty folder as checkpoint place.",
        )
    return None


def local_folder(place: Place, name: CheckpointName) -> Path:
    """Folder of a checkpoint in a local place.

    Raises:
        BadInputError: The place is remote.
    """
    if not isinstance(place, LocalPlace):
        raise BadInputError(f"{place} is not a local folder", hint="Copy the checkpoint to a local folder first.")
    return place.path(name)


def inspect(path: str | Path) -> dict[str, Any]:
    """What a checkpoint, or the best checkpoint of a place, consists of.

    Args:
        path: Folder of a checkpoint or a checkpoint place.

    Returns:
        JSON-able facts: name, step, attempt, generation, parent, world_size, versions, position, bytes, ``tensors``
        (type and shape by key), and ``good`` with the ``problem`` that verification found.

    Raises:
        NotFoundError: Neither a checkpoint nor a place with one.
    """
    folder = Path(path).expanduser().absolute()
    if CheckpointName.parse(folder.name) is None and not (folder / MANIFEST).exists():
        found = newest_good(LocalPlace(folder))
        if found is None:
            raise NotFoundError(f"{folder} holds no checkpoint", hint="Give a step-… folder or the folder around it.")
        folder = folder / str(found[0])
    manifest = read_manifest(folder)
    try:
        verify(folder)
        problem = None
    except CorruptCheckpointError as error:
        problem = error.message
    return {
        "name": str(manifest.name),
        "step": manifest.step,
        "attempt": manifest.attempt,
        "generation": manifest.generation,
        "parent": manifest.parent,
        "created_at": manifest.created_at,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "position": manifest.position,
        "bytes": manifest.num_bytes,
        "files": sorted(manifest.files),
        "tensors": _tensor_shapes(folder) if problem is None else {},
        "good": problem is None,
        "problem": problem,
    }


def _tensor_shapes(folder: Path) -> dict[str, str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    return {
        key: f"{str(stored.properties.dtype).removeprefix('torch.')}{list(stored.size)}"
        for key, stored in sorted(metadata.state_dict_metadata.items())
        if isinstance(stored, TensorStorageMetadata)
    }


class Restored:
    """The state in one verified checkpoint, as one rank sees it.

    At another world size, ranks that did not exist at the save see what rank 0 saved.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        rank: Global rank of this process.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self._folder = folder
        self._rank = rank if rank < manifest.world_size else 0

    @cached_property
    def _state(self) -> dict[str, Any]:
        try:
            body: dict[str, Any] = json.loads((self._folder / f"state-{self._rank}.json").read_bytes())
            return {"objects": body["objects"], "private": set(body["private"])}
        except (OSError, ValueError, KeyError) as error:
            raise CorruptCheckpointError(f"state-{self._rank}.json cannot be read: {error}") from error

    @property
    def names(self) -> list[str]:
        """Names of the saved objects."""
        return list(self._state["objects"])

    def state(self, name: str, device: torch.device | None = None) -> Any:
        """The saved state of one object; tensors are fresh memory.

        Args:
            name: One of :attr:`names`.
            device: Where tensors go that were saved from an accelerator; None leaves all on the CPU.

        Raises:
            CorruptCheckpointError: The checkpoint does not hold what its manifest vouches for.
        """
        encoded = self._state["objects"][name]
        stored = {key: self._stored_key(key) for key in _tensor_keys(encoded)}
        tensors = read_tensors(self._folder, list(stored.values()))
        return decode(encoded, lambda key, chunk=None: tensors[stored[key]], device)

    def _stored_key(self, key: str) -> str:
        return private_key(self._rank, key) if key in self._state["private"] else key


def _tensor_keys(encoded: Any) -> list[str]:
    if isinstance(encoded, list):
        return [key for item in encoded for key in _tensor_keys(item)]
    if isinstance(encoded, dict):
        if encoded.get("$") in ("tensor", "array"):
            return [encoded["key"]]
        return [key for item in encoded.values() for key in _tensor_keys(item)]
    return []


def read_tensors(folder: Path, keys: list[str]) -> dict[str, torch.Tensor]:
    """Reads tensors of a checkpoint into fresh CPU memory, without asking another rank.

    Raises:
        CorruptCheckpointError: A key is missing or the files cannot be read.
    """
    if not keys:
        return {}
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        tensors: dict[str, torch.Tensor] = {}
        for key in keys:
            stored: Any = metadata.state_dict_metadata[key]
            tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        placed = planner.finish_plan(reader.prepare_global_plan(plan)[0])
        reader.read_data(placed, planner).wait()
        return tensors
    except (OSError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise CorruptCheckpointError(f"{folder.name}: tensors cannot be read: {error}") from error
