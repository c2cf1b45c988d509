"""From what a person types to checkpoints: ``digits-7``, ``digits-7@2000``, a checkpoint place, or one checkpoint."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overnight.cli.session import Session

if TYPE_CHECKING:
    from overnight.trainer.checkpoint.place import CheckpointName, Place


@dataclass(frozen=True)
class Target:
    """What a command works on.

    Attributes:
        text: As it was typed.
        trial: The trial's name or id, None if a path or URL was typed.
        url: Path or URL of the checkpoint place.
        entry: Name of the one checkpoint that was typed, empty for all.
        step: The step that was typed.
    """

    text: str
    trial: str | None
    url: str
    entry: str = ""
    step: int | None = None

    @property
    def place(self) -> "Place":
        """The checkpoint place."""
        from overnight.trainer.checkpoint.place import open_place

        return open_place(self.url)

    def names(self) -> "list[CheckpointName]":
        """The checkpoints that are meant, oldest first.

        Raises:
            NotFoundError: There is none.
        """
        from overnight.core.errors import NotFoundError

        found = self.place.checkpoints()
        if self.entry:
            found = [name for name in found if str(name) == self.entry]
        if self.step is not None:
            found = [name for name in found if name.step == self.step]
        if not found:
            raise NotFoundError(f"{self.text}: there is no such checkpoint", hint="See: overnight checkpoints list")
        return found

    def one(self) -> str:
        """Path or URL of the checkpoint that is meant; of the place where that is its newest good one.

        Raises:
            NotFoundError: There is none.
        """
        if not self.entry and self.step is None:
            return self.url
        from overnight.trainer.checkpoint.reading.lineage import lineage

        names = self.names()
        current = [name for name in lineage(self.place) if name in names]
        return f"{self.url}/{(current or names[::-1])[0]}"


def find(session: Session, text: str) -> Target:
    """What is meant: a path or URL if it looks like one or exists, else a trial, which the server knows.

    Raises:
        NotFoundError: There is no such folder or trial.
        ServerAwayError: It is no path, and no server answers.
    """
    from overnight.core.errors import NotFoundError

    match = re.fullmatch(r"(.+)@(\d+)", text)
    bare, step = (match[1], int(match[2])) if match else (text, None)
    path = Path(bare).expanduser()
    if "://" in bare:
        return _located(text, bare.rstrip("/"), step)
    if "/" in bare or bare in (".", "..") or path.is_dir():
        if not path.is_dir():
            raise NotFoundError(f"there is no folder {bare}", hint="Give a trial, a checkpoint place, or a checkpoint.")
        return _located(text, str(_place_in(path.absolute())), step)
    with session.client() as client:
        return Target(text, bare, client.checkpoints(bare).place, step=step)


def _located(text: str, url: str, step: int | None) -> Target:
    from overnight.trainer.checkpoint.place import CheckpointName

    around, _, last = url.rpartition("/")
    if CheckpointName.parse(last) is not None:
        return Target(text, None, around or "/", last, step)
    return Target(text, None, url, step=step)


def _place_in(folder: Path) -> Path:
    """The folder itself, or what a run's folder has below ``checkpoints``."""
    below = folder / "checkpoints"
    return below if below.is_dir() and not any(folder.glob("fence-*.json")) else folder


def here(session: Session, text: str) -> Target:
    """As :func:`find`, for commands that read the files themselves.

    Raises:
        NotFoundError: As :func:`find`, or the trial's place is not on this machine.
    """
    from overnight.core.errors import NotFoundError

    target = find(session, text)
    if target.trial is not None and "://" not in target.url and not Path(target.url).is_dir():
        raise NotFoundError(
            f"{text} has no checkpoints in {target.url} on this machine",
            hint="If there are some, run this command on the machine that has them.",
        )
    return target
