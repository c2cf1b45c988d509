"""From what a person types to checkpoints: ``digits-7``, ``digits-7@2000``, a checkpoint place, or one checkpoint."""

import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from overnight.cli.session import Session

if TYPE_CHECKING:
    from overnight.trainer.checkpoint.place import CheckpointName, Place

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """What a command works on.

    Attributes:
        text: As it was typed, for messages: without a password.
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
    def where(self) -> str:
        """The checkpoint place for messages: without a password."""
        from overnight.core.addresses import shown

        return shown(self.url)

    @property
    def picks(self) -> bool:
        """Whether single checkpoints are meant, and not all of the place."""
        return bool(self.entry) or self.step is not None

    @property
    def place(self) -> "Place":
        """The checkpoint place."""
        from overnight.trainer.checkpoint.place import open_place

        return open_place(self.url)

    def ask(self, request: "Callable[[Place], T]") -> T:
        """What is asked of the place.

        Raises:
            UnavailableError: A store's driver raised an error of its own.
        """
        if "://" not in self.url:
            return request(self.place)
        from overnight.trainer.checkpoint.reading.source import answered

        return answered(self.where, lambda: request(self.place))

    def names(self) -> "list[CheckpointName]":
        """The checkpoints that are meant, oldest first.

        Raises:
            NotFoundError: There is none.
        """
        from overnight.core.errors import NotFoundError

        found = self.ask(lambda place: place.checkpoints())
        if self.entry:
            found = [name for name in found if str(name) == self.entry]
        if self.step is not None:
            found = [name for name in found if name.step == self.step]
        if not found:
            what = "is no such checkpoint" if self.picks else f"are no checkpoints in {self.where}"
            raise NotFoundError(f"{self.text}: there {what}", hint="See: overnight checkpoints list")
        return found

    def one(self) -> str:
        """Path or URL of the checkpoint that is meant; of the place where that is its newest good one.

        Raises:
            NotFoundError: There is none.
        """
        if not self.picks:
            return self.url
        from overnight.trainer.checkpoint.reading.lineage import lineage
        from overnight.trainer.checkpoint.summary import summarize

        names = self.names()
        genuine = self.ask(lambda place: [name for name in names if not summarize(place, name).is_renamed])
        names = genuine or names  # if that is all that was meant, who reads it says what is wrong
        current = [name for name in self.ask(lambda place: list(lineage(place))) if name in names]
        return f"{self.url}/{(current or names[::-1])[0]}"


def find(session: Session, text: str) -> Target:
    """What is meant: a path or URL if it looks like one or exists, else a trial, which the server knows.

    Raises:
        BadInputError: Nothing was typed, or a step that cannot be.
        NotFoundError: There is no such folder or trial.
        ServerAwayError: It is no path, and no server answers.
    """
    from overnight.core.errors import NotFoundError

    bare, step = _parts(text)
    if bare.startswith("file://"):
        bare = urllib.parse.unquote(urllib.parse.urlsplit(bare).path)
    path = Path(bare).expanduser()
    if "://" in bare:
        return _located(text, bare.rstrip("/"), step)
    if "/" in bare or bare in (".", "..") or path.is_dir():
        if not path.is_dir():
            raise NotFoundError(f"there is no folder {bare}", hint="Give a trial, a checkpoint place, or a checkpoint.")
        return _located(text, str(_place_in(path.absolute())), step)
    with session.client() as client:
        return Target(text, bare, client.checkpoints(bare).place, step=step)


def _parts(text: str) -> tuple[str, int | None]:
    """What stands before a step, and the step."""
    from overnight.core.addresses import shown
    from overnight.core.errors import BadInputError

    hint = "Give a trial (digits-7), one step of it (digits-7@2000), or a path or URL."
    bare, at, step = text.rpartition("@")
    if not text.strip() or (at and not bare):
        raise BadInputError(f"{text!r} names no checkpoints", hint=hint)
    if at and re.fullmatch(r"(-\d+)?", step) and not Path(text).expanduser().is_dir():
        raise BadInputError(f"{shown(text)}: {step!r} is no step, which is a number from 0 on", hint=hint)
    return (bare, int(step)) if re.fullmatch(r"\d+", step) and at else (text, None)


def _located(text: str, url: str, step: int | None) -> Target:
    from overnight.core.addresses import shown
    from overnight.trainer.checkpoint.place import CheckpointName

    text = shown(text)
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
            f"{text} has no checkpoints in {target.where} on this machine",
            hint="If there are some, run this command on the machine that has them.",
        )
    return target
