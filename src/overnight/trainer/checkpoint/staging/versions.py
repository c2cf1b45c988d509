"""Version counters of what is copied while training goes on: they see the one row that random blocks miss.

torch counts the in-place operations on a tensor and on all that shares its counter. What moves a counter before a step
is no optimizer: an embedding with ``max_norm``, a script that sets a row anew. Counters are no proof of the contrary,
since writes through ``.data``, numpy or a fused kernel need not move them: blocks are compared too.
"""

import threading
from collections.abc import Sequence

import torch


class Versions:
    """The counters at a boundary.

    Args:
        tensors: Live ones, or what shares their counters, as ``detach()`` does.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = self._take()

    def _take(self) -> list[int]:
        try:
            return [tensor._version for tensor in self._tensors]
        except RuntimeError:  # of inference tensors, which have none
            return [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]

    def moved(self) -> list[int]:
        """Indices of the tensors that were changed in place since the boundary."""
        pairs = zip(self._before, self._take(), strict=True)
        return [index for index, (before, now) in enumerate(pairs) if before != now]


class LastLook:
    """What had moved by the time that a step could begin, looked at once by whoever comes first.

    Args:
        versions: Of a save.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._lock = threading.Lock()
        self._moved: list[int] | None = None

    def take(self) -> list[int]:
        """The same answer each time; a step that waits for its own call begins after the look."""
        with self._lock:
            if self._moved is None:
                self._moved = self._versions.moved()
            return self._moved
