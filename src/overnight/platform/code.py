"""Code snapshots on the server: what runs is what was submitted.

A snapshot is an uncompressed tar, named by the SHA-256 of its bytes (hex, at least the first 32 digits). It is stored
unpacked under ``home/code/<hash>``: written beside it first and renamed when whole, so a name that exists is complete.
"""

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path
from types import TracebackType

from overnight.core.errors import BadInputError, InvalidSpecError, NotFoundError
from overnight.core.paths import Home

MAX_BYTES = 256 * 1024 * 1024
"""Largest snapshot, packed and unpacked. Data belongs into links, not into snapshots."""

MAX_FILES = 20_000
_LEAVE_OUT = "Name what is needed in the spec (code: include), and link data instead of copying it (code: link)."
_DIGEST = re.compile(r"[0-9a-f]{32,64}")
_INCOMING = ".incoming-"


class CodeStore:
    """The snapshots of one home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def has(self, digest: str) -> bool:
        """Whether the snapshot is there, whole."""
        return _DIGEST.fullmatch(digest) is not None and self._home.code_dir(digest).is_dir()

    def require(self, digest: str | None) -> None:
        """Checks that a snapshot that a trial names exists.

        Raises:
            NotFoundError: It does not.
        """
        if digest is not None and not self.has(digest):
            raise NotFoundError(
                f"there is no code snapshot {digest}", hint="Upload it first: PUT /v1/code/{hash}.", code=digest
            )

    def receive(self, digest: str) -> "Upload":
        """Starts an upload; feed it with :meth:`Upload.write`, end it with :meth:`Upload.commit`.

        Raises:
            InvalidSpecError: ``digest`` is no hash.
        """
        if not _DIGEST.fullmatch(digest):
            raise InvalidSpecError(
                f"{digest[:80]!r} is no hash", hint="Use the SHA-256 of the tar: 32 to 64 lower-case hex digits."
            )
        self._home.code.mkdir(parents=True, exist_ok=True)
        return Upload(self._home.code_dir(digest), digest)

    def clean(self) -> None:
        """Removes what uploads left that a killed server did not finish. Only at start."""
        for path in self._home.code.glob(f"{_INCOMING}*"):
            shutil.rmtree(path, ignore_errors=True)


class Upload:
    """One snapshot on its way in; a context manager that leaves nothing behind when it was not committed."""

    def __init__(self, target: Path, digest: str) -> None:
        self._target = target
        self._digest = digest
        self._hash = hashlib.sha256()
        self._size = 0
        self._work = Path(tempfile.mkdtemp(dir=target.parent, prefix=_INCOMING))
        self._file = (self._work / "code.tar").open("wb")

    def __enter__(self) -> "Upload":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        shutil.rmtree(self._work, ignore_errors=True)

    def write(self, chunk: bytes) -> None:
        """Takes the next bytes.

        Raises:
            BadInputError: Larger than :data:`MAX_BYTES`.
            OSError: No space.
        """
        self._size += len(chunk)
        if self._size > MAX_BYTES:
            raise BadInputError(
                f"the code snapshot is larger than {MAX_BYTES // 2**20} MiB",
                hint="Leave data and checkpoints out with 'code: include:', and link what trials only read.",
            )
        self._hash.update(chunk)
        self._file.write(chunk)

    def commit(self) -> None:
        """Verifies the hash, unpacks and publishes. Blocks: call it from a thread.

        Raises:
            BadInputError: The hash differs, or the tar has something that a snapshot must not have.
        """
        self._file.close()
        found = self._hash.hexdigest()
        if not found.startswith(self._digest):
            raise BadInputError(
                f"the code snapshot arrived as {found[: len(self._digest)]}, not {self._digest}",
                hint="Upload it again.",
            )
        unpacked = self._work / "tree"
        unpacked.mkdir(mode=0o755)
        _unpack(self._work / "code.tar", unpacked)
        try:
            unpacked.rename(self._target)
        except OSError:
            if not self._target.is_dir():
                raise
            # The same snapshot arrived twice at once: equal hash, equal content.


def _unpack(path: Path, target: Path) -> None:
    try:
        with tarfile.open(path, mode="r:") as tar:
            members = tar.getmembers()
            _check(members)
            tar.extractall(target, members=members, filter="data")
    except tarfile.TarError as error:
        raise BadInputError(f"the code snapshot is not a usable tar: {error}") from None
    for folder, _, names in os.walk(target):
        for name in names:
            _fsync(Path(folder) / name)


def _check(members: list[tarfile.TarInfo]) -> None:
    if len(members) > MAX_FILES:
        raise BadInputError(f"the code snapshot has {len(members)} files, more than {MAX_FILES}", hint=_LEAVE_OUT)
    if sum(member.size for member in members) > MAX_BYTES:
        raise BadInputError(f"the code snapshot unpacks to more than {MAX_BYTES // 2**20} MiB", hint=_LEAVE_OUT)
    for member in members:
        if not (member.isreg() or member.isdir() or member.issym()):
            raise BadInputError(f"the code snapshot has {member.name[:200]!r}, which is no file, folder or symlink")


def _fsync(path: Path) -> None:
    if path.is_symlink():
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
