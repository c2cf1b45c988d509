"""What a warm start begins from: which file or checkpoint is meant, and why there is none if there is none.

People type these paths by hand, and a run that begins from something else than was meant is worse than none. So what
is not there is told with what was looked for and where, and nothing is taken for something similar.
"""

import errno
import json
import pickle
import re
import urllib.parse
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overnight.core.addresses import shown
from overnight.core.errors import BadInputError, CorruptCheckpointError, NotFoundError, NoUsableCheckpointError
from overnight.trainer.checkpoint.manifest import MANIFEST, read_manifest
from overnight.trainer.checkpoint.place import CheckpointName, Place, open_place
from overnight.trainer.checkpoint.reading.finding import newest_good
from overnight.trainer.checkpoint.reading.source import answered
from overnight.trainer.checkpoint.safetensors import read_safetensors
from overnight.trainer.checkpoint.summary import summarize

_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_HINT = "Give a torch.save or .safetensors file, a step-… folder, or the checkpoints folder around it."
_UNSUPPORTED = re.compile(r"Unsupported (?:global: GLOBAL|class) (\S+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def choose_source(path: str, step: int | None) -> tuple[str, bool]:
    """What is meant by a path or URL.

    Args:
        path: A ``torch.save`` or ``.safetensors`` file, a checkpoint, or a place of them; URLs of the latter two only.
        step: Which checkpoint of a place; the one of the newest token where several have that step.

    Returns:
        Absolute path or URL, and whether it is a file (or else one checkpoint).

    Raises:
        BadInputError: It has no steps, is of another step, or cannot be.
        NotFoundError: There is nothing, no checkpoint in it, or none of that step.
        NoUsableCheckpointError: There are some, but none that can be used.
        UnavailableError: A store does not answer.
    """
    if not path.strip():
        raise BadInputError("the path of a warm start is empty", hint=_HINT)
    scheme, separator, rest = path.partition("://")
    if separator and scheme != "file":
        return _choose_in_store(path, step), False
    local = Path(urllib.parse.unquote(rest) if separator else path).expanduser().absolute()
    if _is_file(local):
        if step is not None:
            raise BadInputError(f"{local} is a file, which has no step {step}", hint="Leave step= out.")
        return str(local), True
    if CheckpointName.parse(local.name) is not None or (local / MANIFEST).exists():
        _require_step(local, step)
        return str(local), False
    return _choose(open_place(local), step, partial(_hint_of, local)), False


def _is_file(path: Path) -> bool:
    """Whether a path is a file, or else a folder.

    Raises:
        NotFoundError: There is nothing.
        BadInputError: It is neither, or no path at all.
    """
    try:
        if path.is_file():
            return True
        if path.is_dir():
            return False
        is_there, target = path.exists(), path.readlink() if path.is_symlink() else None
    except (OSError, ValueError) as error:  # names that are too long, or with a NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(f"a warm start cannot begin from {str(path)[:200]!r}: {reason}", hint=_HINT) from None
    if is_there:
        raise BadInputError(f"a warm start cannot begin from {path}: it is neither a file nor a folder", hint=_HINT)
    if target is not None:
        raise NotFoundError(
            f"a warm start cannot begin from {path}: it is a link to {target}, which is not there",
            hint="Give the path of the file itself.",
        )
    raise NotFoundError(f"a warm start cannot begin from {path}: there is nothing", hint=_nearest(path))


def _nearest(path: Path) -> str:
    """Up to where a path exists."""
    folder = next(parent for parent in path.parents if parent.is_dir())
    try:
        found = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        found = []
    return f"{folder} exists and holds {_some(found)}." if found else f"{folder} exists."


def _require_step(folder: Path, step: int | None) -> None:
    name = CheckpointName.parse(folder.name)
    if step is None or (name.step if name else read_manifest(folder).step) == step:
        return
    raise BadInputError(f"{folder} is not the checkpoint of step {step}", hint="Give its place, or no step=.")


def _choose_in_store(url: str, step: int | None) -> str:
    if (one := CheckpointName.parse(url.rstrip("/").rpartition("/")[2])) is not None:
        if step not in (None, one.step):
            raise BadInputError(
                f"{shown(url)} is not the checkpoint of step {step}", hint="Give its place, or no step=."
            )
        return url
    hint = "Has that run saved one already?"
    if url.endswith(_FILES):
        hint = "Of a store, checkpoints can be read; download a single file and give its path."
    return _choose(open_place(url), step, lambda: hint)


def _choose(place: Place, step: int | None, hint: Callable[[], str]) -> str:
    """A checkpoint of a place.

    Args:
        place: The place.
        step: Which.
        hint: What to do if there is none at all.
    """
    names = answered(str(place), place.checkpoints)
    if not names:
        entries = answered(str(place), place.foreign)
        instead = f"; it holds {_some(entries)}" if entries else "" if place.tokens() else ", and nothing else"
        raise NotFoundError(f"a warm start looked for step-… folders in {place}: there is none{instead}", hint=hint())
    if step is None:
        try:
            newest = newest_good(place)
        except NoUsableCheckpointError as error:
            raise NoUsableCheckpointError(error.message, hint="Begin from another one.") from error
        if newest is None:  # it was deleted meanwhile, or lies before a start from scratch that has saved nothing
            raise NotFoundError(f"{place} holds no checkpoint that counts", hint="Give one of its steps: step=…")
        return f"{place.url}/{newest[0]}"
    found = [name for name in names if name.step == step]
    if not found:
        steps = sorted({name.step for name in names})
        raise NotFoundError(f"{place} holds no checkpoint of step {step}", hint=f"It has steps {steps}.")
    genuine = [name for name in found if not summarize(place, name).is_renamed]
    return f"{place.url}/{(genuine or found)[-1]}"


def _hint_of(folder: Path) -> str:
    """What a folder without checkpoints may have been meant for."""
    below = folder / "checkpoints"
    if below.is_dir():
        return f"Its checkpoints are in {below}."
    files = sorted(path for path in folder.iterdir() if path.suffix in _FILES)
    return f"Give the file itself, like {files[0]}." if files else "Has that run saved one already?"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def trial_place(trial_dir: Path, trial: str) -> str:
    """The checkpoint place of another trial of the same home.

    The folders of trials are named by their ids; their names stand in the orders of their attempts.

    Args:
        trial_dir: The folder of this trial.
        trial: Name or id.

    Raises:
        NotFoundError: There is no such trial here, or it has made no folder for checkpoints yet.
    """
    around = trial_dir.parent
    for folder in (around / trial, *(sorted(around.iterdir()) if around.is_dir() else ())):
        for order in _orders(folder):
            if trial in (order.get("trial_id"), order.get("trial_name")):
                place = str(order.get("checkpoints") or folder / "checkpoints")
                if "://" not in place and not Path(place).is_dir():
                    raise NotFoundError(
                        f"trial {trial} has saved no checkpoint yet: there is no folder {place}",
                        hint=f"Start when it has; see: overnight show {trial}",
                    )
                return place
    raise NotFoundError(
        f"there is no trial {trial} in {around}",
        hint="Give the name or id of a trial that ran in this home, or path= with its checkpoints.",
    )


def _orders(folder: Path) -> list[dict[str, Any]]:
    """Orders of a trial's attempts, newest first."""
    found = []
    for path in sorted(folder.glob("attempts/*/order.json"), reverse=True):
        try:
            body = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(body, dict):
            found.append(body)
    return found


def read_file(file: Path) -> Any:
    """What a ``torch.save`` or safetensors file holds; nothing in it is executed.

    Raises:
        NotFoundError: It is not there (any more).
        CorruptCheckpointError: It cannot be read.
    """
    try:
        if file.stat().st_size == 0:
            raise CorruptCheckpointError(f"{file} cannot be read: it is empty", hint="Copy it anew.")
        if file.suffix == ".safetensors":
            return read_safetensors(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
        _require_sums(file)
        return content
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.message, hint=error.hint or "Copy it anew.") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise NotFoundError(f"there is no file {file}", hint="In a gang every rank must see it.") from None
        reason = error.strerror or str(error)
        raise CorruptCheckpointError(
            f"{file} cannot be read: {reason}", hint="See its permissions and disk."
        ) from error
    except Exception as error:  # torch raises what pickle, zipfile and its own reader do
        raise CorruptCheckpointError(
            f"{file} cannot be read: {_reason(file, error)}",
            hint="It must be readable with torch.load(weights_only=True): tensors, numbers, strings, lists and dicts.",
        ) from error


def _reason(file: Path, error: Exception) -> str:
    """In one line, what torch tells in many."""
    text = _ANSI.sub("", str(error))
    if isinstance(error, pickle.UnpicklingError) and (found := _UNSUPPORTED.search(text)) is not None:
        return f"it needs {found[1]}, and to make objects of a class could run any code"
    if not zipfile.is_zipfile(file):
        return f"it is no file of torch.save, or was cut off ({type(error).__name__})"
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"


def _require_sums(file: Path) -> None:
    """Compares a file's bytes with its own check sums, which ``torch.load`` does not look at.

    Raises:
        CorruptCheckpointError: A byte was altered.
    """
    if not zipfile.is_zipfile(file):
        return  # the form before torch 1.6, which has no sums
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.CRC:
                continue  # torch.serialization.set_crc32_options(False)
            try:
                with archive.open(entry) as stream:
                    while stream.read(1 << 20):
                        pass
            except zipfile.BadZipFile as error:
                raise CorruptCheckpointError(f"{file} is damaged: {error}", hint="Copy it anew.") from None
