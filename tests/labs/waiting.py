"""Waiting for a condition, with a deadline: a test that sleeps is slow on a fast machine and wrong on a busy one."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_SECONDS = 60.0
"""A busy machine may take that long for anything."""


def wait_for(look: Callable[[], T | None], what: str = "it", seconds: float = LIMIT_SECONDS) -> T:
    """Looks again and again until what it sees is true; returns that."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)
    return value
