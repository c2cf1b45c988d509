"""Bringing files to a remote store and making sure that they arrived: by the store's checksum, else by reading back."""

import base64
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from overnight.trainer.checkpoint.manifest import FileEntry
from overnight.trainer.checkpoint.remote import RemotePlace

_MAX_THREADS = 4
_BLOCK_BYTES = 4 << 20


class ArrivedDamagedError(OSError):
    """What the store holds is not what was sent; sending it again may help."""


def upload(
    place: RemotePlace, folder: Path, target: str, files: Mapping[str, FileEntry], progress: Callable[[int], None]
) -> None:
    """Uploads files in parallel; returns when all were verified at the destination.

    Args:
        place: Where to.
        folder: Where the files lie.
        target: Folder in the place.
        files: What the files consist of, by name.
        progress: Called with numbers of bytes.

    Raises:
        Exception: What the store's driver raised, once patience is over.
    """
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="overnight-upload") as pool:
        jobs = [
            pool.submit(_deliver, place, folder / name, f"{target}/{name}", entry, progress)
            for name, entry in files.items()
        ]
        for job in jobs:
            job.result()


def _deliver(place: RemotePlace, path: Path, target: str, entry: FileEntry, progress: Callable[[int], None]) -> None:
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            progress(inc)

    place.make_folder(target)

    def once() -> None:
        place.files.put_file(str(path), place.full(target), callback=Progress())
        verify(place, target, path, entry, progress)

    place.call(once)


def verify(place: RemotePlace, target: str, path: Path, entry: FileEntry, progress: Callable[[int], None]) -> None:
    """Checks that the store holds a file as it was sent.

    Raises:
        ArrivedDamagedError: It does not.
    """
    place.files.invalidate_cache()
    info = place.files.info(place.full(target))
    if int(info["size"]) != entry.size:
        raise ArrivedDamagedError(f"{target} has {info['size']} bytes at the destination instead of {entry.size}")
    if (stored := _stored_md5(info)) is not None and stored == _md5(path, progress):
        return
    for segment in entry.segments:
        if segment.length == 0:
            continue
        end = segment.offset + segment.length
        data = place.files.cat_file(place.full(target), start=segment.offset, end=end)
        progress(len(data))
        if xxhash.xxh3_128_hexdigest(data) != segment.xxh3_128:
            raise ArrivedDamagedError(f"{target} differs at the destination at byte {segment.offset}")


def put(place: RemotePlace, target: str, data: bytes) -> None:
    """Puts a small file and reads it back; it is sent again for as long as it arrives altered.

    Raises:
        ArrivedDamagedError: It still does, once patience is over.
        Exception: What the store's driver raised.
    """
    place.make_folder(target)

    def once() -> None:
        place.files.pipe_file(place.full(target), data)
        if place.files.cat_file(place.full(target)) != data:
            raise ArrivedDamagedError(f"{target} is not at the destination what was sent")

    place.call(once)


def _stored_md5(info: Mapping[str, Any]) -> str | None:
    """The MD5 that a store says it has computed, in hex.

    An S3 ETag is one only for objects that came in one part and are not encrypted with a key of one's own; a value
    that does not match is therefore no proof of damage.
    """
    if isinstance(md5 := info.get("md5Hash") or info.get("content_md5"), str):
        return base64.b64decode(md5).hex()
    if isinstance(md5, bytes | bytearray):
        return bytes(md5).hex()
    etag = str(info.get("ETag", "")).strip('"')
    return etag if len(etag) == 32 and "-" not in etag else None


def _md5(path: Path, progress: Callable[[int], None]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()
