"""The state in one checkpoint, as one rank sees it: read once, verified on the way, handed out object by object.

Nothing is given to a live object before every byte of the checkpoint has been verified, so falling back to an older one
never has to undo anything. What is held is handed over, not copied: an optimizer keeps the very memory that was read.
"""

from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.index import Index
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.reading.assembly import Assembly, whole_of
from overnight.trainer.checkpoint.reading.content import SavedObjects, read_index, read_objects
from overnight.trainer.checkpoint.reading.memory import Slabs
from overnight.trainer.checkpoint.reading.source import FolderSource, Source
from overnight.trainer.checkpoint.reading.transfer import num_threads, transfer
from overnight.trainer.checkpoint.reading.verification import check_sizes, segments_of
from overnight.trainer.checkpoint.sharding import Chunk, Fit, whole_only
from overnight.trainer.checkpoint.state import decode, needs

Wanted = tuple[str, Chunk]


class Restored:
    """The state in one checkpoint.

    At another world size, ranks that did not exist at the save see what rank 0 saved.

    Args:
        source: The checkpoint, or its folder.
        manifest: Its manifest.
        rank: Global rank of this process.
        local_world_size: Ranks on this machine, which share its cores.
    """

    def __init__(self, source: Source | Path, manifest: Manifest, rank: int = 0, local_world_size: int = 1) -> None:
        self.manifest = manifest
        self._source: Source = FolderSource(source) if isinstance(source, Path) else source
        self._rank = rank if rank < manifest.world_size else 0
        self._threads = num_threads(self._source, local_world_size)
        self._held: dict[Wanted, torch.Tensor] = {}
        self._takers: dict[str, set[str]] = defaultdict(set)

    @cached_property
    def _index(self) -> Index:
        return read_index(self._source, self.manifest.files)

    @cached_property
    def _saved(self) -> SavedObjects:
        return read_objects(self._source, self.manifest.files, self._rank)

    @property
    def names(self) -> list[str]:
        """Names of the saved objects."""
        return list(self._saved.objects)

    def differs(self, name: str) -> bool:
        """Whether some tensor of an object was not the same on all ranks; sharded ones are the same, in parts."""
        return any(stored != key for key, stored in self._saved.stored_keys(name).items())

    def is_tensors_only(self, name: str) -> bool:
        """Whether an object is a mapping of tensors, as a module's state is."""
        return _is_mapping_of_tensors(self._saved.objects[name])

    def hold(self, reader: int = 0, num_readers: int = 1) -> None:
        """Reads what this rank will want, and verifies its share of all the rest, in one pass.

        Together, ``num_readers`` calls with ``reader`` from 0 have verified every byte.

        Raises:
            CorruptCheckpointError: The message names the file that is missing, truncated or altered.
            UnavailableError: A remote store did not answer.
        """
        files = self.manifest.files
        check_sizes(self._source, sorted(files.items())[reader::num_readers])
        assembly = Assembly(self._index)
        held: dict[Wanted, torch.Tensor] = {}
        for name in self.names:
            slabs = Slabs()
            for key in self._saved.stored_keys(name).values():
                self._takers[key].add(name)
                chunk = self._expected(key, num_readers)
                if chunk is not None and (key, chunk) not in held:
                    held[key, chunk] = assembly.tensor(key, chunk, slabs)
        transfer(self._source, files, assembly.wants, segments_of(files)[reader::num_readers], self._threads)
        assembly.finish()
        self._held = held

    def _expected(self, key: str, world_size: int) -> Chunk | None:
        """What this rank will want of a tensor: all, or of a distributed one the chunk that it saved itself."""
        if (entry := self._index.get(key)) is None:
            raise CorruptCheckpointError(f"{key} is not in the index of the checkpoint")
        chunks = [(stored.file, Chunk(stored.at, stored.shape)) for stored in entry.chunks]
        if all(chunk == whole_of(entry) for _, chunk in chunks):
            return whole_of(entry)
        if world_size != self.manifest.world_size:
            return None
        return next((chunk for file, chunk in chunks if file.startswith(f"__{self._rank}_")), None)

    def release(self) -> None:
        """Forgets what is held and was not asked for; it can still be asked for, and is then read again."""
        self._held.clear()

    def state(self, name: str, device: torch.device | None = None, fit: Fit = whole_only) -> Any:
        """The saved state of one object; tensors are memory that is the caller's.

        Args:
            name: One of :attr:`names`.
            device: Where tensors go that were saved from an accelerator; None leaves all on the CPU.
            fit: Which tensors shall come back as DTensors, whatever sharding they were saved under. Others come whole.

        Raises:
            CorruptCheckpointError: The checkpoint does not hold what its manifest vouches for.
            UnavailableError: A remote store did not answer.
        """
        encoded = self._saved.objects[name]
        tensors: dict[tuple[str, Chunk | None], torch.Tensor] = {}
        assembly, slabs = Assembly(self._index), Slabs()
        for key, chunk in needs(encoded, fit):
            stored = self._saved.stored_key(key)
            held = self._hand_over(name, stored, chunk)
            tensors[key, chunk] = assembly.tensor(stored, chunk, slabs) if held is None else held
        if assembly.wants:
            transfer(self._source, self.manifest.files, assembly.wants, threads=self._threads)
            assembly.finish()
        return decode(encoded, lambda key, chunk=None: tensors[key, chunk], device, fit)

    def _hand_over(self, name: str, key: str, chunk: Chunk | None) -> torch.Tensor | None:
        """What is held, for good; if another object will want the same, this one gets a copy."""
        if (entry := self._index.get(key)) is None:
            return None
        wanted = (key, whole_of(entry) if chunk is None else chunk)
        self._takers[key].discard(name)
        if not self._takers[key]:
            return self._held.pop(wanted, None)
        held = self._held.get(wanted)
        return None if held is None else held.clone()


def _is_mapping_of_tensors(encoded: Any) -> bool:
    if not isinstance(encoded, dict) or encoded.get("$") not in (None, "odict"):
        return False
    values = [value for _, value in encoded["items"]] if "$" in encoded else list(encoded.values())
    kinds = [value.get("$") if isinstance(value, dict) else "" for value in values]
    return bool(kinds) and all(kind == "tensor" for kind in kinds)
