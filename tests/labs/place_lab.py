"""Checkpoint places for tests of what tidies them: real folders with small real files, thousands of them a second."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from overnight.trainer.checkpoint.fence import claim
from overnight.trainer.checkpoint.manifest import MANIFEST, FileEntry, Manifest, describe, now_text
from overnight.trainer.checkpoint.place import CheckpointName, LocalPlace, Token


def lay(
    place: LocalPlace,
    step: int,
    token: Token = Token(1),
    *,
    save: int = 1,
    metrics: Mapping[str, float] | None = None,
    bases: Iterable[str] = (),
    num_bytes: int = 8,
    **body: Any,
) -> CheckpointName:
    """A published checkpoint with one data file, good to the last byte, from which no script could go on."""
    name = CheckpointName(step, token, save)
    folder = place.path(name)
    folder.mkdir(parents=True)
    files = {"data": _write(folder / "data", b"x" * num_bytes)}
    for base in bases:
        (place.root / base).mkdir(exist_ok=True)
        files[f"../{base}/data"] = _write(place.root / base / "data", b"frozen")
    manifest = Manifest(
        step=step, attempt=token.attempt, generation=token.generation, save=save, parent=None, created_at=now_text(),
        world_size=1, versions={}, threads=1, seed=0, position={}, content="", metrics=dict(metrics or {}), files=files,
        **body,
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return name


def _write(path: Path, data: bytes) -> FileEntry:
    path.write_bytes(data)
    return describe(data)


def begin(place: LocalPlace, token: Token, parent: CheckpointName | None = None, *, fresh: bool = False) -> None:
    """A start of the trial: its fence."""
    claim(place, token, parent, fresh=fresh)


def steps(place: LocalPlace) -> list[tuple[int, int]]:
    """Attempt and step of every published checkpoint, sorted."""
    return sorted((name.token.attempt, name.step) for name in place.checkpoints())


def fingerprint(folder: Path) -> str:
    """Of every file below a folder, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
