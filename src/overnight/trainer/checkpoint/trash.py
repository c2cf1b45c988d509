"""Deleting checkpoints so that whoever begins to read one meanwhile is either told or spared.

First the checkpoint ceases to exist for readers: a local folder by one rename, one in a store by the loss of its
manifest. If it turns out then that somebody needs it, that is undone; else the rest is removed.
"""

import contextlib
import secrets
from collections.abc import Callable

from overnight.trainer.checkpoint.manifest import MANIFEST
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Place
from overnight.trainer.checkpoint.summary import forget

TRASH = ".trash-"
"""Begins the names of local folders that are being removed."""


def discard(place: Place, entry: str, needed: Callable[[], bool] = lambda: False) -> bool:
    """Deletes a folder of the place.

    Args:
        place: The place.
        entry: Name of the folder.
        needed: Asked once readers do not find it any more: whether somebody has begun to need it.

    Returns:
        Whether it was deleted; False also if it was not there.

    Raises:
        OSError: The place refuses.
    """
    deleted = _discard_local(place, entry, needed) if isinstance(place, LocalPlace) else _discard(place, entry, needed)
    if deleted and (name := CheckpointName.parse(entry)) is not None:
        forget(place, name)
    return deleted


def _discard_local(place: LocalPlace, entry: str, needed: Callable[[], bool]) -> bool:
    trash = place.root / f"{TRASH}{entry}-{secrets.token_hex(4)}"
    try:
        (place.root / entry).rename(trash)
    except FileNotFoundError:
        return False
    if needed():
        with contextlib.suppress(OSError):  # somebody has made it anew meanwhile
            trash.rename(place.root / entry)
            return False
    place.remove(trash.name)
    return True


def _discard(place: Place, entry: str, needed: Callable[[], bool]) -> bool:
    path = f"{entry}/{MANIFEST}"
    if not place.exists(entry):
        return False
    try:
        manifest = place.read(path)
    except FileNotFoundError:
        manifest = None
    place.remove(path)
    if needed():
        if manifest is not None:
            place.write(path, manifest)
        return False
    place.remove(entry)
    return True
