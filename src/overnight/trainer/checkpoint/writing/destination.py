"""Where a checkpoint goes, and how it becomes visible there.

A local destination is written to directly, in ``<name>.partial``, and published by one rename. For a remote one, the
files are first written to a local folder (one checkpoint at a time, which bounds it), then uploaded and verified, and
published by the manifest.
"""

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from overnight.core.errors import CorruptCheckpointError, SaveFailedError
from overnight.core.staging import clear_staging, staged_name
from overnight.trainer.checkpoint.fence import refuse_stale, require_own
from overnight.trainer.checkpoint.manifest import MANIFEST, FileEntry, Manifest, load_manifest
from overnight.trainer.checkpoint.place import (
    CheckpointName,
    LocalPlace,
    Place,
    Token,
    partial_name,
    sync_directory,
    sync_file,
)
from overnight.trainer.checkpoint.remote import RemotePlace

Progress = Callable[[int], None]


class Destination(ABC):
    """The place of one rank's saves.

    Attributes:
        place: The checkpoint place.
        rank: Of this process.
    """

    place: Place
    rank: int

    @abstractmethod
    def folder(self, name: CheckpointName) -> Path:
        """The local folder in which this rank writes its files; it is made."""

    def base_folder(self, name: CheckpointName) -> Path:
        """The local folder in which this rank writes a new base; it is made."""
        folder = self.folder(name) / f".base-{self.rank}"
        folder.mkdir(exist_ok=True)
        return folder

    def note(self, name: CheckpointName) -> Path:
        """File in which this rank notes on this machine that its files are complete, and what they are."""
        return self.folder(name) / f"rank-{self.rank}.json"

    @abstractmethod
    def deliver(self, name: CheckpointName, files: Mapping[str, FileEntry]) -> None:
        """Returns when this rank's files, which are durable in :meth:`folder`, and its note are at the destination."""

    @abstractmethod
    def deliver_base(self, folder: Path, base: str, files: Mapping[str, FileEntry]) -> None:
        """Publishes a base."""

    @abstractmethod
    def add(self, name: CheckpointName, file: str, data: bytes) -> None:
        """Adds a small file of rank 0."""

    @abstractmethod
    def publish(self, manifest: Manifest, token: Token) -> None:
        """Makes a checkpoint visible, durably, whose files are all at the destination.

        Raises:
            FencedError: A higher token owns the place.
            SaveFailedError: A rank has given up meanwhile, or the place is not the one that was claimed.
        """

    @abstractmethod
    def clean(self, manifest: Manifest) -> None:
        """Removes what the ranks of a published checkpoint told each other, and what killed writers left in it.

        Not before: whoever takes over from a dead writer needs it until the checkpoint is published.
        """

    @abstractmethod
    def is_published(self, name: CheckpointName) -> bool:
        """Whether it is visible."""

    @abstractmethod
    def tidy(self, token: Token) -> None:
        """Removes what earlier processes have left on this machine; called before the first save of ``token``."""

    @abstractmethod
    def forget(self, name: CheckpointName, *, failed: bool) -> None:
        """Gives back what this rank needs no longer on disk."""


def make_destination(place: Place, rank: int, staging: Path, progress: Progress) -> Destination:
    """The destination for a place."""
    if isinstance(place, LocalPlace):
        return LocalDestination(place, rank)
    assert isinstance(place, RemotePlace)
    return RemoteDestination(place, rank, staging, progress)


def _refuse(place: Place, manifest: Manifest, token: Token) -> None:
    refuse_stale(place, token)
    if manifest.place:
        require_own(place, token, manifest.place)


class LocalDestination(Destination):
    """A local folder: it is the staging place too, so nothing is copied twice."""

    def __init__(self, place: LocalPlace, rank: int) -> None:
        self.place: LocalPlace = place
        self.rank = rank

    def folder(self, name: CheckpointName) -> Path:
        """The folder in which all ranks prepare the checkpoint; it is made, but not the place, which a claim makes."""
        folder = self.place.partial(name)
        folder.mkdir(exist_ok=True)
        return folder

    def deliver(self, name: CheckpointName, files: Mapping[str, FileEntry]) -> None:
        """Nothing to do: the files were written where they belong."""

    def deliver_base(self, folder: Path, base: str, files: Mapping[str, FileEntry]) -> None:
        """Publishes a base by a rename; one that is there already and has the same sizes is as good.

        Raises:
            SaveFailedError: The one that is there has other sizes.
        """
        sync_directory(folder)
        with contextlib.suppress(OSError):  # it exists; whether it is whole is seen below
            folder.rename(self.place.root / base)
        sync_directory(self.place.root)
        if self.place.sizes(base) != {file: entry.size for file, entry in files.items()}:
            raise SaveFailedError(f"{base} in {self.place} is damaged", hint="Delete that folder.")
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, name: CheckpointName, file: str, data: bytes) -> None:
        """Adds a small file of rank 0; it becomes durable with :meth:`publish`."""
        (self.place.partial(name) / file).write_bytes(data)

    def publish(self, manifest: Manifest, token: Token) -> None:
        """Compares all sizes with the manifest, makes everything durable, and renames the folder.

        Raises:
            FencedError: A higher token owns the place.
            SaveFailedError: A rank has given up meanwhile, a file is missing or of another size, or the place is not
                the one that was claimed.
        """
        folder = self.place.partial(manifest.name)
        for entry in self.place.entries(folder.name):
            if entry.startswith("abort-"):
                raise SaveFailedError(f"rank {entry[6:-5]} has given up")
        sizes = self.place.sizes(folder.name)
        for name, described in manifest.files.items():
            if not name.startswith("../") and sizes.get(name) != described.size:
                raise SaveFailedError(f"{name} has {sizes.get(name, 'no')} bytes instead of {described.size}")
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        for file in (*manifest.files, MANIFEST):
            if not file.endswith(".distcp"):  # which are durable, as are bases
                sync_file(folder / file)
        sync_directory(folder)
        _refuse(self.place, manifest, token)
        folder.rename(self.place.path(manifest.name))
        sync_directory(self.place.root)
        self.clean(manifest)

    def clean(self, manifest: Manifest) -> None:
        """Removes what is in the published folder but not in its manifest."""
        folder = str(manifest.name)
        with contextlib.suppress(OSError):  # only rubbish stays
            for entry in self.place.entries(folder):
                if entry not in manifest.files and entry != MANIFEST:
                    self.place.remove(f"{folder}/{entry}")

    def is_published(self, name: CheckpointName) -> bool:
        """Whether the folder has its final name."""
        return self.place.path(name).exists()

    def tidy(self, token: Token) -> None:
        """Nothing to do: retention knows whose unfinished checkpoints there are."""

    def forget(self, name: CheckpointName, *, failed: bool) -> None:
        """Deletes this rank's files of a failed save, unless rank 0 may be about to publish them; others stay."""
        folder, note = self.place.partial(name), self.place.partial(name) / f"rank-{self.rank}.json"
        with contextlib.suppress(OSError):
            if failed and (self.rank == 0 or not note.exists()):  # else rank 0 may be about to publish
                note.unlink(missing_ok=True)
                shutil.rmtree(folder / f".base-{self.rank}", ignore_errors=True)
                for path in folder.glob(f"__{self.rank}_*.distcp"):  # the disk may be full
                    path.unlink(missing_ok=True)


class RemoteDestination(Destination):
    """A store behind fsspec."""

    def __init__(self, place: RemotePlace, rank: int, staging: Path, progress: Progress) -> None:
        self.place: RemotePlace = place
        self.rank = rank
        self._staging = staging
        self._progress = progress

    def tidy(self, token: Token) -> None:
        """Removes what starts before this one have staged, which can never be published, and this rank's own."""

        def is_over(attempt: int, generation: int, rank: int) -> bool:
            staged = Token(attempt, generation)
            return staged < token or (staged == token and rank == self.rank)

        clear_staging(self._staging, is_over)

    def folder(self, name: CheckpointName) -> Path:
        """This rank's folder for the checkpoint on this machine; it is made."""
        folder = self._staging / staged_name(str(name), self.rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def deliver(self, name: CheckpointName, files: Mapping[str, FileEntry]) -> None:
        """Uploads and verifies this rank's files, then puts its note where the ranks meet."""
        # with thread pools: of no use to local places
        from overnight.trainer.checkpoint.writing.upload import put, upload

        own = {file: entry for file, entry in files.items() if not file.startswith("../")}
        upload(self.place, self.folder(name), str(name), own, self._progress)
        note = self.note(name)
        put(self.place, f"{partial_name(name)}/{note.name}", note.read_bytes())

    def deliver_base(self, folder: Path, base: str, files: Mapping[str, FileEntry]) -> None:
        """Uploads and verifies a base, and deletes it here."""
        from overnight.trainer.checkpoint.writing.upload import upload

        upload(self.place, folder, base, files, self._progress)
        with contextlib.suppress(Exception):  # of a killed writer; a rank with the same base would send it again
            self.place.abort_uploads(base)
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, name: CheckpointName, file: str, data: bytes) -> None:
        """Puts a small file of rank 0 and reads it back.

        Raises:
            ArrivedDamagedError: It is not what was put, however often it was sent.
        """
        from overnight.trainer.checkpoint.writing.upload import put

        put(self.place, f"{name}/{file}", data)

    def publish(self, manifest: Manifest, token: Token) -> None:
        """Puts the manifest, which makes the uploaded files a checkpoint.

        Raises:
            FencedError: A higher token owns the place.
            SaveFailedError: A rank has given up meanwhile, or the place is not the one that was claimed.
            ArrivedDamagedError: The manifest arrived damaged, however often it was sent; it is taken away again.
        """
        from overnight.trainer.checkpoint.writing.upload import ArrivedDamagedError

        meeting = partial_name(manifest.name)
        for entry in self.place.entries(meeting):
            if entry.startswith("abort-"):
                raise SaveFailedError(f"rank {entry[6:-5]} has given up")
        _refuse(self.place, manifest, token)
        try:
            self.add(manifest.name, MANIFEST, manifest.to_bytes())
        except ArrivedDamagedError:
            with contextlib.suppress(Exception):  # readers see that it is damaged, and pass it over
                self.place.remove(f"{manifest.name}/{MANIFEST}")
            raise
        self.clean(manifest)

    def clean(self, manifest: Manifest) -> None:
        """Removes the folder where the ranks met, and what killed writers had half uploaded."""
        with contextlib.suppress(Exception):  # whatever the driver raises, only rubbish stays
            self.place.remove(partial_name(manifest.name))
            self.place.abort_uploads(str(manifest.name))

    def is_published(self, name: CheckpointName) -> bool:
        """Whether its manifest is there, as it was sent: one that arrived damaged is sent again by who publishes."""
        if MANIFEST not in self.place.sizes(str(name)):
            return False
        try:
            load_manifest(self.place, name)
        except CorruptCheckpointError:
            return False
        return True

    def forget(self, name: CheckpointName, *, failed: bool) -> None:
        """Deletes this rank's folder on this machine, whether the save is good or not."""
        shutil.rmtree(self._staging / staged_name(str(name), self.rank), ignore_errors=True)
