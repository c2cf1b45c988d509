"""Writing a checkpoint: every rank its files, then rank 0 the manifest, agreed upon by files alone.

No collective runs here: a rank that fails leaves an abort file that all others see, and a rank that is gone costs a
time-out instead of a hang. Since nothing but the folder is shared, all of it may run behind training.

What is equal on all ranks (proved by hash) is stored once, each tensor by one rank; what differs (random state,
BatchNorm buffers under data parallelism, loaders) is stored by each rank under a key of its own.
"""

import contextlib
import io
import json
import pickle
import struct
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from overnight.core.errors import CheckpointError, FencedError, OvernightError, SaveFailedError, from_dict
from overnight.trainer.checkpoint.fence import refuse_stale
from overnight.trainer.checkpoint.index import INDEX, Chunk, Index, TensorEntry, index_to_bytes, private_key
from overnight.trainer.checkpoint.manifest import MANIFEST, FileEntry, Manifest, describe, now_text
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Place, sync_directory, write_atomic
from overnight.trainer.checkpoint.state import Snapshot
from overnight.trainer.checkpoint.versions import versions
from overnight.trainer.checkpoint.writing.order import Author

POLL_SECONDS = 0.002
METADATA = ".metadata"

__all__ = ["Author", "Writer", "private_key", "write_metadata", "write_tensors"]


class Writer:
    """Writes snapshots of one token to its place.

    Args:
        place: Where to.
        author: Who.
        before_publish: Called on rank 0 when all files are complete, before the manifest is published.
    """

    def __init__(self, place: Place, author: Author, before_publish: Callable[[], None] = lambda: None) -> None:
        assert isinstance(place, LocalPlace)
        self._place = place
        self._author = author
        self._before_publish = before_publish

    def write(self, snapshot: Snapshot, name: CheckpointName, digests: dict[str, str]) -> Manifest | None:
        """Writes and publishes one checkpoint; returns when it is published.

        Every rank calls it with the same ``name``, which it has not used before.

        Returns:
            The manifest on rank 0, None elsewhere.

        Raises:
            FencedError: A newer token owns the place.
            SaveFailedError: Any rank failed, or did not finish in time; nothing was published.
        """
        folder = self._place.partial(name)
        try:
            refuse_stale(self._place, self._author.token)
            folder.mkdir(parents=True, exist_ok=True)
            plan = self._write_rank(folder, snapshot, digests)
            if self._author.rank == 0:
                return self._publish(folder, snapshot, name, snapshot.content(digests), plan)
            self._wait(folder, lambda: self._place.path(name).exists(), f"rank 0 to publish {name}")
            return None
        except FencedError as error:
            self._abort(folder, error)
            raise
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = self._failure(error, name)
            self._abort(folder, failure)
            raise failure from error

    def _failure(self, error: Exception, name: CheckpointName) -> SaveFailedError:
        if isinstance(error, SaveFailedError):
            return error
        what = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)
        return SaveFailedError(
            f"checkpoint {name} was not saved (rank {self._author.rank}): {type(error).__name__}: {what}",
            hint=f"Earlier checkpoints in {self._place} are untouched and usable.",
        )

    def _abort(self, folder: Path, error: OvernightError) -> None:
        with contextlib.suppress(OSError):  # a full disk: the others run into their time-out, or see this process end
            write_atomic(folder / f"abort-{self._author.rank}.json", json.dumps(error.to_dict()).encode())

    def _write_rank(self, folder: Path, snapshot: Snapshot, digests: dict[str, str]) -> tuple[Any, Any]:
        """Writes this rank's files; returns what :func:`write_tensors` did."""
        rank = self._author.rank
        owned, private = self._divide(folder, digests)
        tensors = {key: snapshot.tensors[key] for key in owned}
        tensors |= {private_key(rank, key): snapshot.tensors[key] for key in private}
        plan_and_results = write_tensors(folder, tensors, rank, self._author.world_size)
        state = {"objects": snapshot.objects, "private": sorted(private)}
        write_atomic(folder / f"state-{rank}.json", json.dumps(state).encode())
        mine = [folder / f"state-{rank}.json", *sorted(folder.glob(f"__{rank}_*.distcp"))]
        if rank > 0:
            write_atomic(folder / f"plan-{rank}.pickle", pickle.dumps(plan_and_results))
        body = {"rank": rank, "files": {path.name: describe(path.read_bytes()).to_json() for path in mine}}
        write_atomic(folder / f"rank-{rank}.json", json.dumps(body).encode())
        return plan_and_results

    def _divide(self, folder: Path, digests: dict[str, str]) -> tuple[list[str], list[str]]:
        """Which keys this rank stores for all, and which for itself."""
        rank, world_size = self._author.rank, self._author.world_size
        if world_size == 1:
            return sorted(digests), []
        write_atomic(folder / f"digests-{rank}.json", json.dumps(digests).encode())
        all_digests = self._gather(folder, "digests")
        shared = sorted(key for key in digests if all(d.get(key) == digests[key] for d in all_digests))
        private = sorted(set(digests) - set(shared))
        return [key for number, key in enumerate(shared) if number % world_size == rank], private

    def _publish(
        self, folder: Path, snapshot: Snapshot, name: CheckpointName, content: str, own_plan: tuple[Any, Any]
    ) -> Manifest:
        author = self._author
        bodies = self._gather(folder, "rank")
        files = {file: FileEntry.from_json(entry) for body in bodies for file, entry in body["files"].items()}
        plans = [folder / f"plan-{rank}.pickle" for rank in range(1, author.world_size)]
        write_metadata(folder, [own_plan, *(pickle.loads(path.read_bytes()) for path in plans)])
        write_atomic(folder / INDEX, index_to_bytes(_index_of(folder)))
        for path in (folder / METADATA, folder / INDEX, *(folder / f"rank-{r}.json" for r in range(author.world_size))):
            files[path.name] = describe(path.read_bytes())
        for path in (*plans, *folder.glob("digests-*.json")):  # they have served
            path.unlink()
        manifest = Manifest(
            step=snapshot.step,
            attempt=author.token.attempt,
            generation=author.token.generation,
            save=name.save,
            parent=str(author.parent) if author.parent else None,
            created_at=now_text(),
            world_size=author.world_size,
            versions=versions(),
            threads=torch.get_num_threads(),
            seed=author.seed,
            position=snapshot.position,
            content=content,
            files=files,
        )
        self._before_publish()
        write_atomic(folder / MANIFEST, manifest.to_bytes())
        sync_directory(folder)
        refuse_stale(self._place, author.token)
        folder.rename(self._place.path(name))
        sync_directory(self._place.root)
        return manifest

    def _gather(self, folder: Path, prefix: str) -> list[dict[str, Any]]:
        paths = [folder / f"{prefix}-{rank}.json" for rank in range(self._author.world_size)]
        for rank, path in enumerate(paths):
            self._wait(folder, path.exists, f"rank {rank} to write its files")
        return [json.loads(path.read_bytes()) for path in paths]

    def _wait(self, folder: Path, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._author.timeout_seconds
        while not done():
            for path in _aborts(folder):
                raise _error_of(path)
            if time.monotonic() > deadline:
                raise SaveFailedError(
                    f"waited {self._author.timeout_seconds:g} s for {what}",
                    hint="A rank has died or its disk is stuck; nothing was published.",
                )
            time.sleep(POLL_SECONDS)


def _aborts(folder: Path) -> list[Path]:
    """Files by which ranks gave up; none where the folder has just been renamed, which is what is waited for."""
    try:
        return list(folder.glob("abort-*.json"))
    except FileNotFoundError:
        return []


def _error_of(abort: Path) -> OvernightError:
    try:
        return from_dict(json.loads(abort.read_bytes()))
    except (OSError, ValueError):
        return SaveFailedError(f"another rank gave up ({abort.name})")


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> tuple[Any, Any]:
    """Writes tensors as this rank's DCP file, without asking another rank.

    Returns:
        The DCP save plan and its write results, from which rank 0 builds the metadata.

    Raises:
        SaveFailedError: DCP reports fewer items, or smaller files, than were asked for.
        OSError: The file system refused.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    is_coordinator = rank == 0
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator)
    writer.set_up_storage_writer(is_coordinator)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    placed = writer.prepare_global_plan([plan] * world_size)[rank]
    results = writer.write_data(planner.finish_plan(placed), planner).wait() if tensors else []
    ends: dict[str, int] = {}
    for result in results:
        stored = result.storage_data
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    short = [name for name, end in ends.items() if (folder / name).stat().st_size < end]
    if len(results) != len(tensors) or short:
        raise SaveFailedError(f"{len(results)} of {len(tensors)} tensors were written, short files: {short or 'none'}")
    return replace(plan, planner_data=None), results


def _index_of(folder: Path) -> Index:
    """Where the raw bytes of each tensor lie, from DCP's metadata and the archives that it points to."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    index: Index = {}
    for item, stored in (metadata.storage_data or {}).items():
        record = stored.offset, stored.length
        with (folder / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            with zipfile.ZipFile(io.BytesIO(file.read(stored.length))) as archive:
                data = next((info for info in archive.infolist() if info.filename.endswith("/data/0")), None)
            offset, num_bytes = stored.offset, 0
            if data is not None:
                file.seek(stored.offset + data.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
                offset, num_bytes = file.tell() + name_bytes + extra_bytes, data.file_size
        described: Any = metadata.state_dict_metadata[item.fqn]
        dtype, shape = str(described.properties.dtype).removeprefix("torch."), tuple(described.size)
        chunk = Chunk(stored.relative_path, offset, num_bytes, (0,) * len(shape), shape, record, "")
        index[item.fqn] = TensorEntry(dtype, shape, (chunk,))
    return index


def write_metadata(folder: Path, plans_and_results: Sequence[tuple[Any, Any]]) -> None:
    """Writes DCP's ``.metadata`` from what all ranks have planned and written.

    Raises:
        CheckpointError: The plans contradict each other.
    """
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    try:
        _, metadata = create_default_global_save_plan([plan for plan, _ in plans_and_results])
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' plans do not fit together: {error}") from error
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results for _, results in plans_and_results])
