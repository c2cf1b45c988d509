"""Metrics on their way to the supervisor: kept as tensors until fetching costs nothing, one value for all ranks."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overnight.core.errors import BadInputError
from overnight.trainer.journal import Entry, Journal, Reduce, require_reduce
from overnight.trainer.link import Link, wire_number
from overnight.trainer.phases import Ledger
from overnight.trainer.reduction import Reduction, fetch

MAX_KEY = 250
"""Longest name of a metric, as MLflow has it."""

SEND_SECONDS = 0.25
"""How often metrics and ledger leave the loop at most."""


@dataclass(frozen=True)
class Announcement:
    """A report of this rank that waits for the others: its texts, and the number of its values in the journal."""

    step: int
    texts: dict[str, str]
    num_values: int


class Metrics:
    """Gathers what the loop logs and sends it now and then; in a gang, rank 0 sends what all ranks logged as one.

    Args:
        link: The line to the supervisor.
        ledger: Its new amounts travel along.
        rank: Global rank.
        group: A gloo group of all ranks, or None if there is one rank.
    """

    def __init__(self, link: Link, ledger: Ledger, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.journal = Journal(shared=group is not None)
        self._link = link
        self._ledger = ledger
        self._rank = rank
        self._group = group
        self._reduction: Reduction | None = None
        self._rows: list[list[Any]] = []
        self._sent_at = time.monotonic()
        self._asked_at = time.monotonic()
        self.reported: dict[str, Any] = {}
        self._due_at: dict[float, float] = {}

    def log(
        self, step: int, values: Mapping[str, Any], reduce: Reduce = "mean", weight: float = 1.0, num_peers: int = 1
    ) -> None:
        """Keeps values; a tensor is detached and copied, not fetched.

        Args:
            step: Updates done, counting the current one.
            values: Numbers or tensors of one number, by name.
            reduce: How the values of all ranks become one.
            weight: Number of samples behind them on this rank.
            num_peers: Number of ranks that have the same samples.

        Raises:
            BadInputError: A value is no single number, or the rule is none.
        """
        require_reduce(reduce)
        now = time.time()
        names = sorted(values) if self._group is not None else values
        entries = [Entry(name, step, _kept(name, values[name]), now, reduce, weight, num_peers) for name in names]
        self.journal.add(f"logged {', '.join(names)} ({reduce}) at step {step}", entries)

    def announce(
        self, step: int, values: Mapping[str, Any], reduce: Reduce = "mean", weight: float = 1.0, num_peers: int = 1
    ) -> Announcement:
        """Keeps what is going to be reported once all ranks are there. Nothing may be logged before :meth:`report`.

        Raises:
            BadInputError: A value is neither a number nor text, or the rule is none.
        """
        require_reduce(reduce)
        for name in values:
            _require_key(name)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        numbers = {name: number(name, value) for name, value in values.items() if name not in texts}
        names = sorted(numbers) if self._group is not None else numbers
        now = time.time()
        entries = [Entry(name, step, numbers[name], now, reduce, weight, num_peers) for name in names]
        self.journal.add(f"reported {', '.join(sorted(values))} ({reduce}) at step {step}", entries)
        return Announcement(step, texts, len(entries))

    def report(self, announced: Announcement, phase: str) -> None:
        """Sends what was announced at once, behind what was logged before. All ranks are here and agree."""
        rows = self._collect()
        split = len(rows) - announced.num_values
        self._keep(rows[:split])
        self.flush(announced.step, phase, everything=True)
        values = {entry.key: wire_number(value) for entry, value in rows[split:]}
        told = announced.texts | values
        self.reported |= told
        if self._rank == 0:
            self._link.send("/v1/report", {"step": announced.step, "values": told})

    def wants_reduction(self) -> bool:
        """Whether it is time to make one of what all ranks logged; rank 0 decides for all. True once per period."""
        now = time.monotonic()
        if self._group is None or self._rank != 0 or now - self._asked_at < SEND_SECONDS:
            return False
        self._asked_at = now
        return True

    def advance(self, *, start: bool) -> None:
        """Takes in a reduction that was under way; starts the next if all ranks agreed to. Nothing to do for one rank.

        Raises:
            RuntimeError: A peer has gone.
        """
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            self._keep(reduction.rows())
        if start and self._group is not None and (entries := self.journal.take()):
            self._reduction = Reduction(self._group, entries)

    def gather(self) -> None:
        """Makes one of everything that all ranks logged, at once. All ranks are here and agree."""
        self._keep(self._collect())

    def _collect(self) -> list[tuple[Entry, float]]:
        self.advance(start=False)
        entries = self.journal.take()
        if self._group is None or not entries:
            return list(zip(entries, fetch([entry.value for entry in entries]), strict=True))
        return Reduction(self._group, entries).rows()

    def _keep(self, rows: list[tuple[Entry, float]]) -> None:
        if self._rank == 0:
            self._rows += [[entry.key, entry.step, wire_number(value), entry.at] for entry, value in rows]

    def flush(self, step: int, phase: str, *, everything: bool = False) -> bool:
        """Sends what is ready, if it is time or ``everything`` is wanted; returns whether it did.

        In a gang only what is reduced is ready.
        """
        now = time.monotonic()
        if not everything and now - self._sent_at < SEND_SECONDS:
            return False
        self._sent_at = now
        if self._group is None:
            self._keep(self._collect())
        rows, self._rows = self._rows, []
        self._link.push(step, phase, rows, self._ledger.take())
        return True

    def numbers(self) -> dict[str, float]:
        """The finite numbers that were reported last, by name."""
        found = {name: value for name, value in self.reported.items() if isinstance(value, int | float)}
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    def due(self, seconds: float) -> bool:
        """Whether ``seconds`` have passed since this was last true for the same number."""
        now = time.monotonic()
        since = self._due_at.setdefault(seconds, now)
        if now - since < seconds:
            return False
        self._due_at[seconds] = now
        return True


def _kept(name: str, value: Any) -> Any:
    """A number, or a copy of a tensor that the loop may change."""
    _require_key(name)
    if not isinstance(value, torch.Tensor):
        return number(name, value)
    if value.numel() != 1 or value.is_complex():
        form = "complex" if value.is_complex() else f"of shape {list(value.shape)}"
        raise BadInputError(f"{name} is {form}, a metric is one real number", hint="Log its mean.")
    return value.detach().clone()


def _require_key(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY:
        raise BadInputError(f"a metric's name has 1 to {MAX_KEY} characters, not {len(key)}: {key[:40]!r}")


def number(key: str, value: Any) -> float:
    """A single number as a float.

    Raises:
        BadInputError: It is none.
    """
    try:
        result = float(value.item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInputError(f"{key}={value!r:.80} is no number: {error}", hint="Metrics are single numbers.") from None
    return int(result) if isinstance(value, int) and math.isfinite(result) else result
