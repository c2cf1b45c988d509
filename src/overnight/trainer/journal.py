"""What a rank logged and nobody has sent yet, with a hash by which ranks can tell that they logged the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import xxhash

from overnight.core.errors import BadInputError

Reduce = Literal["mean", "sum", "max", "min"]
"""How the values of all ranks become one."""

Values = Mapping[str, Any] | None
"""Numbers or one-element tensors by name."""


def require_reduce(reduce: object) -> None:
    """Makes sure that it is a rule.

    Raises:
        BadInputError: It is none.
    """
    if reduce not in get_args(Reduce):
        raise BadInputError(
            f"reduce={reduce!r:.80} is no rule",
            hint=f"It is one of {', '.join(get_args(Reduce))}. A metric of that name is logged as "
            'run.log({"reduce": value}).',
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of one rank.

    Attributes:
        key: Name of the metric.
        step: Updates done, counting the current one.
        value: A number, or a tensor of one.
        at: Unix time, seconds.
        reduce: How the ranks' values become one.
        weight: Number of samples behind the value; a rank with 0 does not count.
        num_peers: Number of ranks that have the same samples; a sum counts them once.
    """

    key: str
    step: int
    value: Any
    at: float
    reduce: Reduce = "mean"
    weight: float = 1.0
    num_peers: int = 1


class Journal:
    """Entries in order. Those before the mark were part of an exchange; those before the confirmation are known to be
    in every rank's journal.

    Args:
        shared: Whether there are other ranks to compare it with.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._entries: list[Entry] = []
        self._num_marked = 0
        self._num_confirmed = 0
        self._calls: list[str] = []
        self._num_calls_marked = 0
        self._hash = 0

    def add(self, call: str, entries: list[Entry]) -> None:
        """Appends the entries of one call; ``call`` is the same text on every rank that does the same."""
        self._entries += entries
        if self._shared:
            self._calls.append(call)
            self._hash = xxhash.xxh3_64_intdigest(call.encode(), self._hash) >> 1  # the sign is needed for the minimum

    def mark(self) -> int:
        """Begins an exchange: returns the hash of everything ever added, 63 bits."""
        self._num_marked, self._num_calls_marked = len(self._entries), len(self._calls)
        return self._hash

    def confirm(self) -> None:
        """All ranks have what was marked."""
        self._num_confirmed = self._num_marked
        del self._calls[: self._num_calls_marked]
        self._num_calls_marked = 0

    def take(self) -> list[Entry]:
        """Removes and returns what all ranks have."""
        number = self._num_confirmed if self._shared else len(self._entries)
        taken, self._entries = self._entries[:number], self._entries[number:]
        self._num_marked -= min(number, self._num_marked)
        self._num_confirmed = 0
        return taken

    def unconfirmed(self) -> list[str]:
        """The calls that were marked and are not confirmed."""
        return self._calls[: self._num_calls_marked]
