"""Checkpoint places that fsspec reaches: object stores, SFTP, WebDAV and the like.

Nothing is assumed of a store but that a written object is whole, and that reads and lists see it from then on. So
a checkpoint is published by its manifest, written last, and a fence is claimed by a file of a unique name before it is
written: who sees another claim withdraws. Requests that fail for the moment are repeated.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, cast

from overnight.core.addresses import shown
from overnight.core.errors import BadInputError, SetupError
from overnight.trainer.checkpoint.discretion import Discretion
from overnight.trainer.checkpoint.multipart import Upload, abort, uploads_below
from overnight.trainer.checkpoint.place import CLAIM_SECONDS, PASSING, CheckpointName, Place, is_base, partials
from overnight.trainer.checkpoint.retry import Patience, is_transient

T = TypeVar("T")

MANIFEST_NAME = "manifest.json"
Listed = list[tuple[str, dict[str, Any]]]
"""Names in a folder, and what the driver says of each."""

_EXTRAS = {"s3": "overnight[s3]", "s3a": "overnight[s3]"}
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps; macOS knows the second only, which does there."""

_WITHOUT_FOLDERS = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"))
"""Protocols of object stores. Asked for a folder, their drivers would make the bucket, be its name ever so mistyped."""


class RemotePlace(Place):
    """A checkpoint place in a store.

    Args:
        url: As the user gave it.
        files: An fsspec file system.
        root: Path of the place in it.
        patience: With failing requests.
    """

    def __init__(self, url: str, files: Any, root: str, patience: Patience = Patience()) -> None:
        self.patience = patience
        self.url = url.rstrip("/")
        self.files = files
        self._root = root.rstrip("/")
        self._discretion = Discretion(url, getattr(files, "storage_options", {}))
        self._has_folders = _WITHOUT_FOLDERS.isdisjoint(_protocols_of(files))
        self._has_one_connection = not getattr(files, "async_impl", False)
        self._turn = threading.RLock()

    def call(self, request: Callable[[], T]) -> T:
        """What a request to the file system returns, patiently.

        Drivers that are not async have one connection. Its answers go astray, or are waited for without end, if two
        threads ask at once; and once it is lost nobody but us makes another.

        Raises:
            Exception: Whatever the driver raises, once patience is over; without passwords.
        """
        try:
            return self.patience.call(partial(self._in_turn, request) if self._has_one_connection else request)
        except Exception as error:
            if (told := self._discretion.about(error)) is error:
                raise
        raise told

    def _in_turn(self, request: Callable[[], T]) -> T:
        with self._turn:
            try:
                return request()
            except Exception as error:
                if is_transient(error):
                    self._connect_anew()
                raise

    def _connect_anew(self) -> None:
        with contextlib.suppress(Exception):  # the next try is another chance
            options = {**self.files.storage_options, "skip_instance_cache": True}
            self.files = type(self.files)(*self.files.storage_args, **options)

    def full(self, path: str) -> str:
        """The path as the file system wants it; ``..`` is resolved here, stores do not."""
        parts: list[str] = []
        for part in path.split("/"):
            if part == "..":
                parts.pop()
            elif part:
                parts.append(part)
        return "/".join([self._root, *parts])

    def entries(self, folder: str = "") -> list[str]:
        """Names of everything in a folder, sorted; empty if it does not exist. Never from a cache."""
        return sorted(name for name, _ in self._list(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of the files directly in a folder, by name; empty if it does not exist."""
        return {name: int(info["size"]) for name, info in self._list(folder) if info["type"] == "file"}

    def _list(self, folder: str) -> Listed:
        path = self.full(folder)

        def ask() -> list[dict[str, Any]]:
            self.files.invalidate_cache()
            return cast(list[dict[str, Any]], self.files.ls(path, detail=True))

        try:
            found = self.call(ask)
        except (FileNotFoundError, NotADirectoryError):
            return []
        named = [(str(info["name"]).rstrip("/"), info) for info in found]
        inside = [(name.rpartition("/")[2], info) for name, info in named if name.strip("/") != path.strip("/")]
        return [(name, info) for name, info in inside if name]

    def read(self, path: str) -> bytes:
        """A whole file."""
        return cast(bytes, self.call(lambda: self.files.cat_file(self.full(path))))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, in one request; fewer at the end of the file."""
        end = offset + length
        return cast(bytes, self.call(lambda: self.files.cat_file(self.full(path), start=offset, end=end)))

    def write(self, path: str, data: bytes) -> None:
        """Puts an object, which readers see whole or not at all; makes the folder around it where the store has any.

        Raises:
            SetupError: There is no such bucket.
        """
        self.make_folder(path)
        try:
            self.call(lambda: self.files.pipe_file(self.full(path), data))
        except FileNotFoundError as error:
            if self._has_folders:
                raise
            bucket = self._root.partition("/")[0]
            raise SetupError(
                f"{self} has no bucket {bucket!r}", hint="Make the bucket, or correct the address."
            ) from error

    def make_folder(self, path: str) -> None:
        """Makes the folder around a file, where the store has folders."""
        parent = self.full(path).rpartition("/")[0]
        if not self._has_folders or "/" not in parent.strip("/"):
            return
        with contextlib.suppress(FileExistsError, PermissionError):  # of an object store that is not in the list
            self.call(lambda: self.files.makedirs(parent, exist_ok=True))

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file unless it exists or somebody else has announced it.

        Each caller first writes a claim of a unique name, then looks for others. Of several callers at most one gets
        True, and when all meet at once, none may.

        Raises:
            TimeoutError: That took so long that the claim may be gone.
        """
        began = time.clock_gettime(_CLOCK)
        claim = f"{path}.claim-{os.urandom(8).hex()}"
        self.write(claim, b"")
        folder, _, name = path.rpartition("/")
        mine = claim.rpartition("/")[2]
        rivals = [e for e in self.entries(folder) if e == name or (e.startswith(f"{name}.claim-") and e != mine)]
        try:
            if rivals:
                return False
            if time.clock_gettime(_CLOCK) - began > CLAIM_SECONDS:
                raise TimeoutError(f"{path} was not claimed within {CLAIM_SECONDS:.0f} s")
            return self._create_exclusively(path, data)
        finally:
            self.remove(claim)

    def _create_exclusively(self, path: str, data: bytes) -> bool:
        """Lets the store guard the name as well, where it can."""
        tries = 0

        def create() -> None:
            nonlocal tries
            tries += 1
            try:
                self.files.pipe_file(self.full(path), data, mode="create")
            except (NotImplementedError, TypeError, ValueError):  # how drivers say that they know no such mode
                self.files.pipe_file(self.full(path), data)

        try:
            self.call(create)
            return True
        except FileExistsError:  # perhaps by the first try, whose answer was lost
            return tries > 1 and self.read(path) == data

    def remove(self, path: str) -> None:
        """Deletes a file or folder if it exists; of a checkpoint its manifest first: nobody reads half of it."""
        is_checkpoint = CheckpointName.parse(path) is not None
        if is_checkpoint:  # without its manifest it is none any more
            with contextlib.suppress(FileNotFoundError):
                self.call(lambda: self.files.rm_file(self.full(f"{path}/{MANIFEST_NAME}")))

        def delete() -> None:
            self.files.invalidate_cache()
            self.files.rm(self.full(path), recursive=True)

        with contextlib.suppress(FileNotFoundError):
            self.call(delete)
        if is_checkpoint or is_base(path):  # there is nothing large elsewhere
            self.abort_uploads(path)

    def ages(self, entries: Iterable[str]) -> dict[str, float]:
        """By the store's clock, where it tells when a file was written."""
        probe = f".now-{os.urandom(6).hex()}{PASSING}"
        ages: dict[str, float] = {}
        with contextlib.suppress(PermissionError, NotImplementedError):
            self.write(probe, b"")
            try:
                now = self._written_at(probe)
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        ages[entry] = (now - self._written_at(entry)).total_seconds()
            finally:
                self.remove(probe)
        return ages

    def _written_at(self, path: str) -> datetime:
        def ask() -> datetime:
            self.files.invalidate_cache()
            return cast(datetime, self.files.modified(self.full(path)))

        return self.call(ask)

    def glance(self) -> "RemotePlace":
        """The place as it is now; each folder is listed once, when it is first asked for."""
        return Glance(self)

    def exists(self, folder: str) -> bool:
        """Whether anything is stored of a folder; parts of an upload that broke off are in no listing."""
        return bool(self.entries(folder) or self._uploads(folder))

    def abort_uploads(self, folder: str) -> None:
        """Frees what uploads into a folder that broke off have left; nobody may be uploading to it."""
        for upload in self._uploads(folder):
            with contextlib.suppress(FileNotFoundError):
                self.call(partial(abort, self.files, upload))

    def _uploads(self, folder: str) -> list[Upload]:
        try:
            return self.call(lambda: uploads_below(self.files, self.full(folder)))
        except (FileNotFoundError, PermissionError, NotImplementedError):
            return []  # it is a right of its own, and not all that speak S3 know such a list

    def unfinished(self) -> dict[str, CheckpointName | None]:
        """Folders without a manifest, those where their ranks met, and those of which only broken uploads are left."""
        uploads = {upload.path.partition("/")[0] for upload in self._uploads("")}
        entries = self.entries()
        names = {entry: name for entry in {*entries, *uploads} if (name := CheckpointName.parse(entry))}
        unpublished = {entry: name for entry, name in names.items() if MANIFEST_NAME not in self.sizes(entry)}
        bases = [entry for entry in uploads.difference(entries) if is_base(entry)]
        return partials(entries) | unpublished | dict.fromkeys(bases)

    def checkpoints(self) -> list[CheckpointName]:
        """Published checkpoints, oldest token first: those that have a manifest."""
        names = [name for entry in self.entries() if (name := CheckpointName.parse(entry))]
        return sorted(name for name in names if MANIFEST_NAME in self.sizes(str(name)))

    def __str__(self) -> str:
        return shown(self.url)


def _protocols_of(files: Any) -> tuple[str, ...]:
    protocol: str | tuple[str, ...] = files.protocol
    return (protocol,) if isinstance(protocol, str) else protocol


class Glance(RemotePlace):
    """A store at one moment, see :meth:`~overnight.trainer.checkpoint.place.Place.glance`.

    Args:
        place: The store itself.
    """

    def __init__(self, place: RemotePlace) -> None:
        super().__init__(place.url, place.files, place.full(""), place.patience)
        self._discretion, self._turn = place._discretion, place._turn
        self._listed: dict[str, Listed] = {}
        self._contents: dict[str, bytes] = {}
        self._pending: list[Upload] | None = None

    def glance(self) -> "RemotePlace":
        """This moment."""
        return self

    def gone(self, entry: str) -> None:
        """What was listed, without an entry and what was in it."""
        self._listed = {folder: found for folder, found in self._listed.items() if folder != entry}
        if "" in self._listed:
            self._listed[""] = [one for one in self._listed[""] if one[0] != entry]
        if self._pending is not None:
            self._pending = [upload for upload in self._pending if upload.path.partition("/")[0] != entry]

    def read(self, path: str) -> bytes:
        """A whole file; a small one directly in the place is read once."""
        if "/" in path:
            return super().read(path)
        if path not in self._contents:
            self._contents[path] = super().read(path)
        return self._contents[path]

    def _list(self, folder: str) -> Listed:
        if folder not in self._listed:
            self._listed[folder] = super()._list(folder)
        return self._listed[folder]

    def _uploads(self, folder: str) -> list[Upload]:
        if folder:
            return super()._uploads(folder)
        if self._pending is None:
            self._pending = super()._uploads("")
        return self._pending


def open_remote(url: str) -> RemotePlace:
    """The place at a URL that is not a local path.

    Raises:
        BadInputError: No such protocol, or a URL that its driver refuses.
        SetupError: The protocol's driver is not installed; the hint names the pip line.
    """
    import fsspec

    scheme, text = url.partition("://")[0], shown(url)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or str(error)
        package = _EXTRAS.get(scheme, str(missing).partition(".")[0])
        raise SetupError(
            f"checkpoints cannot be written to {text}: the driver of {scheme}:// is not installed ({error})",
            hint=f'pip install "{package}"',
        ) from error
    except ValueError as error:
        raise BadInputError(
            f"checkpoints cannot be written to {text}: no driver knows {scheme}://",
            hint="Use a path, or a URL that fsspec knows: s3://, gs://, abfs://, sftp://, webdav:// …",
        ) from error
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ValueError, TypeError) as error:
        what = error if text == url else f"its driver refuses the address ({type(error).__name__})"
        hint = "Its form is scheme://user:password@host:port/folder; special letters are written like %40."
        raise BadInputError(f"checkpoints cannot be written to {text}: {what}", hint=hint) from None
    except Exception as error:  # some drivers connect at once
        if (told := Discretion(url, fsspec.config.conf).about(error)) is error:
            raise
    else:
        return RemotePlace(url, files, root)
    raise told
