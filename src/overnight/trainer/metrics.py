"""Metrics on their way to the supervisor: kept as tensors until fetching them costs nothing."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from overnight.core.errors import BadInputError
from overnight.trainer.link import Link, wire_number
from overnight.trainer.phases import Ledger

MAX_KEY = 250
"""Longest name of a metric, as MLflow has it."""

SEND_SECONDS = 0.25
"""How often metrics and ledger leave the loop at most."""


class Metrics:
    """Gathers what the loop logs and sends it now and then.

    Args:
        link: The line to the supervisor.
        ledger: Its new amounts travel along.
    """

    def __init__(self, link: Link, ledger: Ledger) -> None:
        self._link = link
        self._ledger = ledger
        self._kept: list[tuple[str, int, Any, float]] = []
        self._sent_at = time.monotonic()
        self._due_at: dict[float, float] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Keeps values; a tensor is detached and copied, not fetched.

        Raises:
            BadInputError: A value is no single number.
        """
        now = time.time()
        for key, value in values.items():
            _require_key(key)
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise BadInputError(
                        f"{key} has shape {list(value.shape)}, a metric is one number", hint="Log its mean."
                    )
                value = value.detach().clone()
            else:
                value = number(key, value)
            self._kept.append((key, step, value, now))

    def report(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends values at once, behind what was logged before.

        Raises:
            BadInputError: A value is neither a number nor text.
        """
        for key in values:
            _require_key(key)
        numbers = {k: v if isinstance(v, str) else wire_number(number(k, v)) for k, v in values.items()}
        self.flush(step, "", everything=True)
        self._link.send("/v1/report", {"step": step, "values": numbers})

    def flush(self, step: int, phase: str, *, everything: bool = False) -> bool:
        """Fetches and sends what is kept, if it is time or ``everything`` is wanted; returns whether it did."""
        now = time.monotonic()
        if not everything and now - self._sent_at < SEND_SECONDS:
            return False
        self._sent_at = now
        kept, self._kept = self._kept, []
        rows = [[key, at_step, wire_number(float(value)), at] for key, at_step, value, at in kept]
        self._link.push(step, phase, rows, self._ledger.take())
        return True

    def due(self, seconds: float) -> bool:
        """Whether ``seconds`` have passed since this was last true for the same number."""
        now = time.monotonic()
        since = self._due_at.setdefault(seconds, now)
        if now - since < seconds:
            return False
        self._due_at[seconds] = now
        return True


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
