"""What a run keeps of itself in a checkpoint, beside what the script tracks: where its loops and loaders are.

The random numbers are kept too; they are put back later, see :mod:`overnight.trainer.first_round`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overnight.trainer import rng
from overnight.trainer.checkpoint.reading.restored import Restored
from overnight.trainer.checkpoint.saver import INTERNAL
from overnight.trainer.cursor import Cursor
from overnight.trainer.loops import Loops, State
from overnight.trainer.meshes import Arrangement

RUN = f"{INTERNAL}run"
RNG = f"{INTERNAL}rng"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of the run itself; as it is here at step 0.

    Attributes:
        step: Updates done.
        peers: See :attr:`overnight.trainer.meshes.Arrangement.peers`.
        loops: See :meth:`overnight.trainer.loops.Loops.export`.
        loop_path: Names of the loops that were open, outermost first.
        loaders: States of the loaders by name.
    """

    step: int = 0
    peers: list[list[str | int]] = field(default_factory=list)
    loops: State | None = None
    loop_path: Sequence[str] = ()
    loaders: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, restored: Restored | None) -> "Saved":
        """Of the checkpoint from which a run goes on, None where it begins."""
        if restored is None:
            return cls()
        own = restored.state(RUN)
        path = restored.manifest.position["loops"]
        return cls(own["step"], own.get("peers", []), own["loops"], path, own["loaders"])


class OwnState:
    """The run's own state at this moment.

    Args:
        cursor: Knows the step, and where each loader is.
        loops: The loops.
        arrangement: How the ranks stand to each other.
    """

    def __init__(self, cursor: Cursor, loops: Loops, arrangement: Arrangement) -> None:
        self._cursor = cursor
        self._loops = loops
        self._arrangement = arrangement

    def capture(self) -> Mapping[str, Any]:
        """What a checkpoint shall hold of it, by name."""
        own = {
            "step": self._cursor.step,
            "peers": self._arrangement.peers,
            "loops": self._loops.export(),
            "loaders": self._cursor.loader_states(),
        }
        return {RUN: own, RNG: rng.capture()}

    def position(self) -> dict[str, Any]:
        """Which loops are open and where each loader is, for a manifest's readers."""
        return {"loops": self._loops.path, "loaders": self._cursor.places()}
