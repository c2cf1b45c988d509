"""Out of a checkpoint into one file that others read: safetensors for a model, ``torch.save`` for anything."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from overnight.core.errors import BadInputError, CheckpointError, NotFoundError
from overnight.trainer.checkpoint.manifest import Manifest
from overnight.trainer.checkpoint.pins import pin
from overnight.trainer.checkpoint.place import CheckpointName, Place, open_place, sync_directory, sync_file
from overnight.trainer.checkpoint.reading.inspection import locate
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.safetensors import write_safetensors

_TORCH = (".pt", ".pth", ".bin", ".ckpt")


def export(path: str | Path, target: str | Path, *, name: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Writes what a checkpoint holds to one file; every byte that goes into it is verified.

    The names are the module's own, whatever it was wrapped in (DistributedDataParallel, ``torch.compile``,
    ``fully_shard``); sharded tensors are whole again.

    Args:
        path: Folder or URL of a checkpoint, or of a checkpoint place (then its newest good one).
        target: A ``.safetensors`` file for the tensors of one object, or a ``.pt`` (``.pth``, ``.bin``, ``.ckpt``) file
            for ``torch.load``.
        name: Which tracked object. Without: for safetensors ``model``, or the only object that consists of tensors; for
            ``torch.save`` all of them, in a dict by name.
        overwrite: Replace a file that is there.

    Returns:
        JSON-able facts: ``checkpoint``, ``step``, ``objects``, ``tensors`` (how many), ``bytes`` and ``target``.

    Raises:
        BadInputError: Such a file cannot be written, or the object does not fit into it.
        NotFoundError: No such checkpoint, or object in it.
        CorruptCheckpointError, NoUsableCheckpointError: What is to be exported is damaged.
    """
    file = Path(target).expanduser().absolute()
    if file.suffix not in (".safetensors", *_TORCH):
        raise BadInputError(f"{file.name} is no .safetensors or .pt file", hint="The suffix says what is written.")
    if file.exists() and not overwrite:
        raise BadInputError(f"{file} exists already", hint="Give another name, or overwrite it on purpose.")
    with opened(path, f"export to {file}") as (restored, manifest):
        if file.suffix == ".safetensors":
            names, tensors, size = _to_safetensors(restored, manifest, file, name)
        else:
            names, tensors, size = _to_torch(restored, file, name)
    return {
        "checkpoint": str(manifest.name),
        "step": manifest.step,
        "objects": names,
        "tensors": tensors,
        "bytes": size,
        "target": str(file),
    }


@contextlib.contextmanager
def opened(path: str | Path, holder: str) -> Iterator[tuple[Restored, Manifest]]:
    """A checkpoint that stays while it is read; one in a place that takes no pins is read without.

    Args:
        path: As with :func:`export`.
        holder: Who reads it and why, for people.

    Raises:
        NotFoundError, CorruptCheckpointError, NoUsableCheckpointError, UnavailableError: It cannot be opened.
    """
    source, manifest = locate(path)
    with contextlib.ExitStack() as stack:
        if (found := _around(source.url)) is not None:
            with contextlib.suppress(CheckpointError):
                stack.enter_context(pin(*found, holder))
        yield Restored(source, manifest), manifest


def _around(text: str) -> tuple[Place, CheckpointName] | None:
    """The place in which a checkpoint is, None if it has been copied elsewhere."""
    folder, _, last = text.rpartition("/")
    name = CheckpointName.parse(last)
    return None if name is None else (open_place(folder), name)


def _to_safetensors(restored: Restored, manifest: Manifest, file: Path, name: str | None) -> tuple[list[str], int, int]:
    chosen = name or _only_model(restored)
    tensors, others = flatten(_state(restored, chosen))
    if others:
        raise BadInputError(
            f"{chosen!r} holds more than tensors ({', '.join(others[:5])}), which safetensors cannot",
            hint="Export it to a .pt file, or name another object.",
        )
    about = {"format": "pt", "checkpoint": str(manifest.name), "step": str(manifest.step), "object": chosen}
    return [chosen], len(tensors), write_safetensors(file, tensors, about)


def _to_torch(restored: Restored, file: Path, name: str | None) -> tuple[list[str], int, int]:
    names = [name] if name is not None else _users(restored)
    states = {each: _state(restored, each) for each in names}
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        torch.save(states if name is None else states[name], temporary)
        sync_file(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(file.parent)
    return names, sum(len(flatten(state)[0]) for state in states.values()), file.stat().st_size


def _users(restored: Restored) -> list[str]:
    return [name for name in restored.names if not name.startswith("$")]


def _state(restored: Restored, name: str) -> Any:
    if name not in restored.names:
        raise NotFoundError(
            f"{restored.manifest.name} holds no {name!r}", hint=f"It holds {', '.join(_users(restored)) or 'nothing'}."
        )
    return restored.state(name)


def _only_model(restored: Restored) -> str:
    """The object that is meant when nobody says which."""
    names = _users(restored)
    if "model" in names:
        return "model"
    fitting = [name for name in names if restored.is_tensors_only(name)]
    if len(fitting) == 1:
        return fitting[0]
    raise BadInputError(
        f"{restored.manifest.name} holds {', '.join(names) or 'nothing'}: which of them is the model is not clear",
        hint="Say it: name=….",
    )


def flatten(state: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], list[str]]:
    """Tensors by dotted path, and the paths of whatever else there is."""
    tensors: dict[str, torch.Tensor] = {}
    others: list[str] = []
    items = state.items() if isinstance(state, Mapping) else [("", state)] if not prefix else []
    for key, value in items:
        path = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            tensors[path or "tensor"] = value
        elif isinstance(value, Mapping):
            inner, rest = flatten(value, f"{path}.")
            tensors |= inner
            others += rest
        else:
            others.append(path)
    return tensors, others
