"""Code snapshots: what runs is what was submitted, whatever happens to the working directory afterwards.

A snapshot is a deterministic tar of the files that a run needs: sorted names, no times, no owners, so that the same
files have the same hash on every machine. What belongs in: the patterns of ``code: include:``, else the text files of
the script's folder. Inside a git work tree git says what is ignored.
"""

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from overnight.core.errors import BadInputError, ScriptError

DEFAULT_INCLUDE = ("*.py", "*.json", "*.yaml", "*.yml", "*.toml", "*.txt", "*.sh")
MAX_BYTES = 100 * 1024 * 1024
MAX_FILES = 20_000
MAX_VISITED = 200_000
SKIPPED_FOLDERS = frozenset({".git", ".overnight", "__pycache__", ".hg", ".svn", "node_modules"})
RACY_SECONDS = 2.0
"""A file changed this shortly before it was read may change again within the same time stamp; its hash is not kept
(the same trap as git's index: https://git-scm.com/docs/racy-git)."""

_NARROW = "Name what is needed in the spec, e.g. code: {include: ['*.py', conf/]}, and link data: code: {link: [data]}."


@dataclass(frozen=True)
class File:
    """One file of a snapshot."""

    name: str
    path: Path
    size: int
    mtime_ns: int
    executable: bool


@dataclass(frozen=True)
class Git:
    """Where the code comes from.

    Attributes:
        commit: Full hash of HEAD.
        dirty: Whether tracked files differ from it, or untracked ones are not ignored.
    """

    commit: str
    dirty: bool


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is ready to be sent.

    Attributes:
        digest: SHA-256 of the tar, in hex.
        root: The folder it was taken of.
        files: What is in it.
        git: None outside git.
        links: Absolute targets by the name under which they appear in a run's copy.
    """

    digest: str
    root: Path
    files: tuple[File, ...]
    git: Git | None
    links: dict[str, str]

    def read(self) -> bytes:
        """The tar.

        Raises:
            ScriptError: The files changed since the snapshot was taken.
        """
        data = pack(self.files)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise ScriptError(f"files in {self.root} changed while they were submitted", hint="Submit again.")
        return data

    @property
    def manifest(self) -> dict[str, object]:
        """What people see of it."""
        return {
            "hash": self.digest,
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "git_commit": self.git.commit if self.git else None,
            "git_dirty": self.git.dirty if self.git else None,
        }


def take(
    root: Path,
    *,
    include: Sequence[str] = (),
    links: Iterable[str] = (),
    required: Sequence[str] = (),
    without: Path | None = None,
    cache: Path | None = None,
    now: Callable[[], float] = time.time,
) -> Snapshot:
    """Takes a snapshot of a folder.

    Args:
        root: The folder.
        include: Patterns: without a slash they fit a file's name at any depth, ``conf/`` a whole folder, others
            the path from the root (``**`` spans folders). Default: :data:`DEFAULT_INCLUDE`.
        links: Names below ``root`` that each run sees as symlinks to where they are now.
        required: Names below ``root`` that must be in, whatever the patterns say (the script itself).
        without: Folder that is no code, wherever it lies: overnight's home, which holds all earlier snapshots.
        cache: Folder that remembers hashes by (path, size, mtime).
        now: Wall clock in seconds, to tell fresh files.

    Raises:
        BadInputError: Too large, a pattern that fits nothing, a path or symlink that leaves the folder.
    """
    root = root.resolve()
    targets = _links(root, links)
    names = _select(_outside(root, without, _candidates(root)), include or DEFAULT_INCLUDE, strict=bool(include))
    names |= {_inside(root, name) for name in required}
    names = {name for name in names if not any(PurePosixPath(name).is_relative_to(link) for link in targets)}
    files = tuple(_file(root, name) for name in sorted(names))
    _check_size(root, files)
    return Snapshot(_digest(root, files, cache, now()), root, files, git_state(root), targets)


def pack(files: Iterable[File]) -> bytes:
    """The deterministic tar: sorted as given, no times, no owners, modes 0644 or 0755, contents of symlinks."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            info = tarfile.TarInfo(file.name)
            data = _read(file)
            info.size, info.mode = len(data), 0o755 if file.executable else 0o644
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _read(file: File) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{file.path} cannot be read: {error.strerror}", hint=_NARROW) from None


def _inside(root: Path, name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BadInputError(f"{name!r} leaves the folder {root}", hint="Submit from a folder that holds all the code.")
    return str(path)


def _links(root: Path, names: Iterable[str]) -> dict[str, str]:
    targets = {}
    for name in names:
        relative = _inside(root, name.rstrip("/"))
        if not (root / relative).exists():
            raise BadInputError(
                f"code.link: there is no {name!r} in {root}", hint="Name what is there, or leave it out."
            )
        targets[relative] = str((root / relative).resolve())
    return targets


def _candidates(root: Path) -> list[str]:
    names = _git_files(root)
    return names if names is not None else list(_walk(root))


def _outside(root: Path, folder: Path | None, names: Iterable[str]) -> list[str]:
    """The names that do not lie in a folder, which may be anywhere."""
    if folder is None or not (folder := folder.resolve()).is_relative_to(root) or folder == root:
        return list(names)
    below = f"{folder.relative_to(root).as_posix()}/"
    return [name for name in names if not name.startswith(below)]


def _git(root: Path, *words: str) -> str | None:
    """Output of a git command in the folder; None if git is missing or the folder is not in a work tree."""
    command = ["git", "-C", str(root), *words]
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=True, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout)


def _git_files(root: Path) -> list[str] | None:
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", ".")
    if listed is None:
        return None
    names = [name for name in listed.split("\0") if name and not SKIPPED_FOLDERS & set(name.split("/")[:-1])]
    return [name for name in names if (root / name).is_file() or (root / name).is_symlink()]


def git_state(root: Path) -> Git | None:
    """Commit and cleanliness of the work tree that holds the folder; None outside git or before the first commit."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    return Git(commit.strip(), bool(_git(root, "status", "--porcelain", "--", ".")))


def _walk(root: Path) -> Iterator[str]:
    visited = 0
    for folder, folders, names in os.walk(root):
        visited += len(names) + len(folders)
        if visited > MAX_VISITED:
            raise BadInputError(f"{root} holds more than {MAX_VISITED:,} files", hint=_NARROW)
        folders[:] = sorted(name for name in folders if _enters(Path(folder) / name))
        for name in names:
            path = Path(folder) / name
            if path.is_file() or path.is_symlink():
                yield path.relative_to(root).as_posix()


def _enters(folder: Path) -> bool:
    return folder.name not in SKIPPED_FOLDERS and not folder.is_symlink() and not (folder / "pyvenv.cfg").exists()


def _select(names: Iterable[str], patterns: Sequence[str], *, strict: bool) -> set[str]:
    found: set[str] = set()
    unused = set(patterns)
    for name in names:
        for pattern in patterns:
            if _fits(name, pattern):
                found.add(name)
                unused.discard(pattern)
    if strict and unused:
        raise BadInputError(f"code.include: no file fits {sorted(unused)[0]!r}", hint=f"Patterns: {_PATTERN_HELP}")
    return found


_PATTERN_HELP = "'*.py' at any depth, 'conf/' a whole folder, 'src/**/*.json' from the spec's folder."


def _fits(name: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./")
    if pattern.endswith("/"):
        return name.startswith(pattern)
    if "/" not in pattern:
        return fnmatchcase(name.rpartition("/")[2], pattern)
    return _parts_fit(name.split("/"), pattern.split("/"))


def _parts_fit(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return _parts_fit(parts, patterns[1:]) or bool(parts and _parts_fit(parts[1:], patterns))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _parts_fit(parts[1:], patterns[1:])


def _file(root: Path, name: str) -> File:
    path = root / name
    real = path.resolve()
    if not real.is_relative_to(root):
        hint = "Copy it into the folder, or link it: code: {link: [...]}."
        raise BadInputError(f"{name} is a symlink that leaves the folder: {real}", hint=hint)
    try:
        status = real.stat()
    except OSError as error:
        raise ScriptError(f"{path} cannot be read: {error.strerror}", hint="Remove it or name it correctly.") from None
    if not real.is_file():
        raise ScriptError(f"{path} is no regular file", hint=_NARROW)
    return File(name, real, status.st_size, status.st_mtime_ns, bool(status.st_mode & 0o100))


def _check_size(root: Path, files: Sequence[File]) -> None:
    if len(files) > MAX_FILES:
        raise BadInputError(f"the code in {root} is {len(files):,} files, more than {MAX_FILES:,}", hint=_NARROW)
    total = sum(file.size for file in files)
    if total > MAX_BYTES:
        largest = max(files, key=lambda file: file.size)
        raise BadInputError(
            f"the code in {root} is {total / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB; "
            f"the largest file is {largest.name} ({largest.size / 1e6:.0f} MB)",
            hint=_NARROW,
        )


def _digest(root: Path, files: Sequence[File], cache: Path | None, now: float) -> str:
    """SHA-256 of the tar: remembered while no file's (path, size, mtime, mode) changed, else computed."""
    signature = hashlib.sha256()
    for file in files:
        signature.update(
            f"{file.path}\0{file.name}\0{file.size}\0{file.mtime_ns}\0{file.executable}\n".encode(
                errors="surrogateescape"
            )
        )
    entry = cache / f"{signature.hexdigest()}.json" if cache else None
    if entry is not None and (known := _remembered(entry)) is not None:
        return known
    digest = hashlib.sha256(pack(files)).hexdigest()
    newest = max((file.mtime_ns for file in files), default=0) / 1e9
    if entry is not None and newest < now - RACY_SECONDS:
        _remember(entry, digest, root)
    return digest


def _remembered(entry: Path) -> str | None:
    try:
        digest = json.loads(entry.read_text())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _remember(entry: Path, digest: str, root: Path) -> None:
    """Best effort: a cache that cannot be written only costs time."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump({"digest": digest, "root": str(root)}, file)
        Path(file.name).replace(entry)
    except OSError:
        return
