"""Loops that remember where they are: the bookkeeping behind ``batches``, ``steps`` and ``epochs``.

A resumed script runs again from its top. Each loop finds its own state by its path (its name inside the loop around
it): a finished one yields nothing, the one that was under way continues, later ones are new.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from overnight.core.errors import BadInputError

State = dict[str, Any]


@dataclass
class Loop:
    """A loop under way.

    Attributes:
        name: Its name, unique inside the loop around it.
        kind: ``batches``, ``steps`` or ``epochs``.
        number: How many loops this process had opened before it, from 1.
        state: What survives: ``count`` of finished rounds, ``first_epoch`` of the loader, ``seconds``, ``done`` (left
        early, for good), and the
            states of the loops ``inside`` the current round.
        opened: How often each name was opened inside the current round.
    """

    name: str
    kind: str
    number: int
    state: State
    opened: dict[str, int] = field(default_factory=dict)

    def next_round(self) -> None:
        """Counts a round as finished; the loops inside begin anew."""
        self.state["count"] += 1
        self.state["inside"] = {}
        self.opened = {}


class Loops:
    """The loops of a run, open ones innermost last.

    Args:
        saved: What :meth:`export` returned at the save, None at step 0.
        saved_path: What :attr:`path` was then.
    """

    def __init__(self, saved: State | None = None, saved_path: Sequence[str] = ()) -> None:
        self._root = Loop("", "root", 0, {"count": 0, "inside": saved if saved else {}})
        self._open = [self._root]
        self._num_opened = 0
        self._saved_path = list(saved_path)

    @property
    def path(self) -> list[str]:
        """Names of the open loops, outermost first."""
        return [loop.name for loop in self._open[1:]]

    @property
    def innermost(self) -> Loop:
        """The open loop that no other open loop is inside of; the root if none is open."""
        return self._open[-1]

    @property
    def was_here(self) -> bool:
        """Whether exactly these loops were open at the save."""
        return bool(self._saved_path) and self.path == self._saved_path

    def inside(self, kind: str) -> bool:
        """Whether a loop of that kind is open around the innermost one."""
        return any(loop.kind == kind for loop in self._open[1:-1])

    @contextmanager
    def enter(self, name: str, kind: str) -> Iterator[Loop]:
        """Opens a loop inside the innermost one.

        A name that was used before in this round gets a number: ``batches``, ``batches.2`` ...

        Raises:
            BadInputError: The saved state under that path is of another kind of loop.
        """
        around = self._open[-1]
        times = around.opened[name] = around.opened.get(name, 0) + 1
        unique = name if times == 1 else f"{name}.{times}"
        fresh = {"kind": kind, "count": 0, "seconds": 0.0, "first_epoch": None, "done": False, "inside": {}}
        state = around.state["inside"].setdefault(unique, fresh)
        if state["kind"] != kind:
            raise BadInputError(
                f"loop {unique!r} was a {state['kind']} loop at the save and is a {kind} loop now",
                hint="Give the loops names: run.batches(loader, name=...), so that each finds its own state.",
            )
        self._num_opened += 1
        loop = Loop(unique, kind, self._num_opened, state)
        self._open.append(loop)
        try:
            yield loop
        finally:
            if loop in self._open:
                del self._open[self._open.index(loop) :]

    def export(self) -> State:
        """JSON-able state of all loops by name."""
        inside: State = self._root.state["inside"]
        return inside
