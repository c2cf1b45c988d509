"""What a checkpoint consists of and what is wrong with it, for people and programs; free of torch."""

from pathlib import Path
from typing import Any

from overnight.core.errors import CorruptCheckpointError, NotFoundError
from overnight.trainer.checkpoint.index import Index, TensorEntry
from overnight.trainer.checkpoint.manifest import MANIFEST, Manifest
from overnight.trainer.checkpoint.place import CheckpointName, open_place
from overnight.trainer.checkpoint.reading.content import read_index, read_objects
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.reading.source import FolderSource, Source, open_source
from overnight.trainer.checkpoint.reading.verification import foreign_files, manifest_of, problems


def locate(path: str | Path) -> tuple[Source, Manifest]:
    """The checkpoint at a path or URL; of a checkpoint place, the newest good one.

    Args:
        path: Folder of a checkpoint, wherever it has been copied to, or a checkpoint place.

    Raises:
        NotFoundError: Neither a checkpoint nor a place with one.
        NoUsableCheckpointError: A place with checkpoints, none of them good.
        CorruptCheckpointError: A checkpoint without a good manifest.
        UnavailableError: A remote place does not answer.
    """
    text = str(path).rstrip("/")
    around, _, last = text.rpartition("/")
    if "://" in text and (name := CheckpointName.parse(last)) is not None:
        source = open_source(open_place(around), name)
        return source, manifest_of(source, name)
    if "://" not in text:
        folder = Path(path).expanduser().absolute()
        if CheckpointName.parse(folder.name) is not None or (folder / MANIFEST).exists():
            source = FolderSource(folder)
            return source, manifest_of(source, CheckpointName.parse(folder.name))
    place = open_place(path)
    if (found := newest_good(place)) is None:
        raise NotFoundError(f"{place} holds no checkpoint", hint="Give a step-… folder or the folder around it.")
    return open_source(place, found[0]), found[1]


def inspect(path: str | Path) -> dict[str, Any]:
    """What a checkpoint, or the best checkpoint of a place, consists of; reads every byte.

    Args:
        path: Folder or URL of a checkpoint, or of a checkpoint place.

    Returns:
        JSON-able facts: name, step, attempt, generation, parent, created_at, kind, world_size, threads, versions,
        envelope, metrics, position, ``bytes``, ``files`` with their bytes, ``objects`` with their bytes (of all ranks),
        ``tensors`` (type and shape by key), ``good``, and what is wrong: ``problem``, the first of ``problems``.

    Raises:
        NotFoundError: Neither a checkpoint nor a place with one.
        NoUsableCheckpointError: A place with checkpoints, none of them good.
        CorruptCheckpointError: The manifest itself is damaged.
        UnavailableError: A remote place does not answer.
    """
    source, manifest = locate(path)
    found = _problems(source, manifest)
    facts = ("step", "attempt", "generation", "parent", "created_at", "kind", "world_size", "threads", "seed")
    index, objects = _content(source, manifest)
    return {
        "name": str(manifest.name),
        **{fact: getattr(manifest, fact) for fact in facts},
        "versions": manifest.versions,
        "envelope": manifest.envelope,
        "metrics": manifest.metrics,
        "position": manifest.position,
        "bytes": manifest.num_bytes,
        "files": {name: entry.size for name, entry in sorted(manifest.files.items())},
        "objects": objects,
        "tensors": {key: f"{entry.dtype}{list(entry.shape)}" for key, entry in sorted(index.items())},
        "good": not found,
        "problem": next(iter(found), None),
        "problems": found,
    }


def _problems(source: Source, manifest: Manifest) -> list[str]:
    try:
        foreign_files(source, manifest)
        return problems(source, manifest.files)
    except CorruptCheckpointError as error:
        return [error.message, *problems(source, manifest.files)]


def _content(source: Source, manifest: Manifest) -> tuple[Index, dict[str, int]]:
    """Tensors, and bytes by object; as much as can still be read of a damaged checkpoint."""
    try:
        index = read_index(source, manifest.files)
    except CorruptCheckpointError:
        return {}, {}
    sizes: dict[str, dict[str, int]] = {}
    for rank in range(manifest.world_size):
        try:
            saved = read_objects(source, manifest.files, rank)
        except CorruptCheckpointError:
            continue
        for name in saved.objects:
            keys = saved.stored_keys(name).values()
            sizes.setdefault(name, {}).update({key: num_bytes_of(index[key]) for key in keys if key in index})
    return index, {name: sum(tensors.values()) for name, tensors in sorted(sizes.items())}


def num_bytes_of(entry: TensorEntry) -> int:
    """Bytes of all chunks of a tensor."""
    return sum(chunk.num_bytes for chunk in entry.chunks)
