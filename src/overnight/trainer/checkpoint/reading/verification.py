"""Whether a checkpoint is what its manifest says: every byte of every file, and nothing that could be mistaken."""

import re
from collections.abc import Iterable, Mapping

from overnight.core.errors import CorruptCheckpointError
from overnight.trainer.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from overnight.trainer.checkpoint.place import CheckpointName
from overnight.trainer.checkpoint.reading.source import Source
from overnight.trainer.checkpoint.reading.transfer import Choice, transfer

METADATA = ".metadata"

_NOTE = re.compile(r"rank-\d+\.json")
"""Notes of the writers to each other; one that is killed right behind the publication leaves them there."""


def manifest_of(source: Source, name: CheckpointName | None) -> Manifest:
    """The manifest of a committed checkpoint; its files are not looked at.

    Args:
        source: The checkpoint.
        name: Under which it is published, None where it has been moved elsewhere.

    Raises:
        CorruptCheckpointError: Missing, unreadable, or under another name than it was written for.
        UnavailableError: A remote store did not answer.
    """
    manifest = Manifest.from_bytes(source.read_all(MANIFEST))
    if name is not None and name != manifest.name:
        raise CorruptCheckpointError(f"{MANIFEST} belongs to {manifest.name}")
    return manifest


def foreign_files(source: Source, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that neither its manifest lists nor its writers have left.

    Raises:
        CorruptCheckpointError: One of them would be read by torch's own tools instead of what was saved.
        UnavailableError: A remote store did not answer.
    """
    extra = sorted(source.names() - set(manifest.files) - {MANIFEST})
    if METADATA in extra:
        raise CorruptCheckpointError(f"{METADATA} is not listed in the manifest")
    return [name for name in extra if not _NOTE.fullmatch(name)]


def segments_of(files: Mapping[str, FileEntry]) -> list[Choice]:
    """All segments of some files."""
    return [(name, segment) for name, entry in sorted(files.items()) for segment in entry.segments]


def check_sizes(source: Source, files: Iterable[tuple[str, FileEntry]]) -> None:
    """Compares the sizes of files with the manifest's.

    Raises:
        CorruptCheckpointError: The message names the first file that is missing or has another size.
        UnavailableError: A remote store did not answer.
    """
    for name, entry in files:
        size = source.size(name)
        if size != entry.size:
            raise CorruptCheckpointError(f"{name} has {size} bytes instead of {entry.size}")


def verify(source: Source, files: Mapping[str, FileEntry]) -> None:
    """Reads every byte and compares it with its hash.

    Raises:
        CorruptCheckpointError: The message names the first file that is missing, truncated or altered.
        UnavailableError: A remote store did not answer.
    """
    check_sizes(source, files.items())
    transfer(source, files, {}, segments_of(files))


def problems(source: Source, files: Mapping[str, FileEntry]) -> list[str]:
    """Reads every file and says what is wrong with which, one line each; raises :class:`UnavailableError` alone."""
    found = []
    for name, entry in files.items():
        try:
            verify(source, {name: entry})
        except CorruptCheckpointError as error:
            found.append(error.message)
    return found
