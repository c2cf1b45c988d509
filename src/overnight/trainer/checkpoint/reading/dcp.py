"""Checkpoints for torch's own ``dcp.load``, from any place and verified while they are read.

torch's ``FileSystemReader`` reads the files of a local checkpoint too, but believes every byte, and unpickles what it
finds. What this reader gives has the hashes of the manifest.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from overnight.core.errors import BadInputError
from overnight.trainer.checkpoint.index import Index, TensorEntry
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.reading.assembly import Assembly, dtype_of
from overnight.trainer.checkpoint.reading.content import read_index
from overnight.trainer.checkpoint.reading.inspection import locate
from overnight.trainer.checkpoint.reading.memory import Slabs
from overnight.trainer.checkpoint.reading.source import Source
from overnight.trainer.checkpoint.reading.transfer import num_threads, transfer
from overnight.trainer.checkpoint.sharding import Chunk


class StagedReader(StorageReader):
    """Reads a checkpoint for ``torch.distributed.checkpoint.load``::

        state = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
        dcp.load(state, storage_reader=trainer.StagedReader("s3://bucket/runs/checkpoints"))

    Keys are ``<name under which it was tracked>.<path in its state>``; ``overnight.trainer.inspect(path)`` lists them.
    What is no tensor is not among them: ``trainer.export`` and a resumed run give that.

    Args:
        path: Folder or URL of a checkpoint; of a checkpoint place, its newest good one is read.

    Raises:
        NotFoundError: Neither a checkpoint nor a place with one.
        NoUsableCheckpointError: A place with checkpoints, none of them good.
        CorruptCheckpointError: A checkpoint without a good manifest. Damage to data is raised by ``dcp.load``.
        UnavailableError: A remote place does not answer.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._open(path)

    def _open(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        found: tuple[Source, Manifest] = locate(os.fspath(path))
        self._source, self._manifest = found
        self._index: Index = read_index(self._source, self._manifest.files)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another checkpoint, if one is named."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != os.fspath(self._path):
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, out of its index."""
        storage = {
            MetadataIndex(key, torch.Size(chunk.at), number): chunk.file
            for key, entry in self._index.items()
            for number, chunk in enumerate(entry.chunks)
        }
        tensors = {key: _metadata_of(entry) for key, entry in self._index.items()}
        return Metadata(dict(tensors), storage_data=storage, storage_meta=StorageMeta(checkpoint_id=str(self._path)))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and verifies all that a rank has planned in one pass; nothing is given before everything is verified.

        Raises:
            CorruptCheckpointError: The message names the file that is missing, truncated or altered.
        """
        assembly, slabs = Assembly(self._index), Slabs()
        read = [(item, assembly.tensor(item.storage_index.fqn, _chunk_of(item), slabs)) for item in plan.items]
        transfer(self._source, self._manifest.files, assembly.wants, threads=num_threads(self._source))
        assembly.finish()
        for item, tensor in read:
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by itself: whoever wants verified reads names this reader."""
        return False


def _chunk_of(item: ReadItem) -> Chunk:
    """The part of a tensor that an item asks for: it is given within one stored chunk."""
    begin = item.storage_index.offset
    if begin is None:
        raise BadInputError(f"the plan asks for {item.storage_index.fqn} without saying which chunk of it")
    at = tuple(start + within for start, within in zip(begin, item.storage_offsets, strict=True))
    return Chunk(at, tuple(item.lengths))


def _metadata_of(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.at), torch.Size(chunk.shape)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(entry.dtype)), torch.Size(entry.shape), chunks)
