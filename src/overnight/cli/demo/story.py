"""The story of the demo: its beats, and why each of them matters. Drawn live by `view`, moved on by `scenario`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum


class BeatState(StrEnum):
    """Where a beat is."""

    WAITING = "waiting"
    HAPPENING = "happening"
    DONE = "done"


@dataclass(frozen=True)
class Beat:
    """One thing that happens.

    Attributes:
        why: What it means for somebody who sleeps while this happens.
        detail: The newest fact about it.
    """

    key: str
    title: str
    why: str
    state: BeatState = BeatState.WAITING
    detail: str = ""


BEATS = (
    Beat("start", "Server and node start", "One command; SQLite and MLflow in a folder, nothing to configure."),
    Beat("sweep", "A TPE sweep keeps four devices busy", "Each trial that ends makes room for the next: no barrier."),
    Beat("fault", "A device breaks", "It is quarantined; its trial goes on elsewhere from its last checkpoint."),
    Beat(
        "urgent",
        "An urgent trial comes in",
        "An exploratory trial yields, keeps its place and loses nothing.",
    ),
    Beat(
        "kill",
        "The server is killed (SIGKILL)",
        "Workers train on; the next server adopts them.",
    ),
    Beat("finish", "The sweep ends", "Every proposal has become a result in MLflow."),
    Beat("proof", "One interrupted trial runs again, undisturbed", "The final weights must be equal, bit for bit."),
)


@dataclass
class Story:
    """The beats and who wants to know when one changes."""

    beats: tuple[Beat, ...] = BEATS
    listeners: list[Callable[[Beat], None]] = field(default_factory=list)

    def begin(self, key: str, detail: str = "") -> None:
        """The beat is happening now."""
        self._change(key, BeatState.HAPPENING, detail)

    def note(self, key: str, detail: str) -> None:
        """A newer fact about a beat."""
        self._change(key, next(b.state for b in self.beats if b.key == key), detail)

    def done(self, key: str, detail: str = "") -> None:
        """The beat is over."""
        self._change(key, BeatState.DONE, detail)

    def _change(self, key: str, state: BeatState, detail: str) -> None:
        for beat in self.beats:
            if beat.key == key:
                changed = replace(beat, state=state, detail=detail or beat.detail)
                if changed == beat:
                    return
                self.beats = tuple(changed if b.key == key else b for b in self.beats)
                for listener in self.listeners:
                    listener(changed)
