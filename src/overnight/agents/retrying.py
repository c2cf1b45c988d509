"""When a request is sent again, and when to give up: pure decisions that both clients share.

A server that restarts is away for a second or two. Whoever was just talking to it waits; whoever finds nobody at home
is told so at once.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from overnight.agents.calls import Call
from overnight.core.errors import OvernightError


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a client is.

    Attributes:
        patience_seconds: For how long a call is retried once the server is known to exist (it has answered this client,
            or an ``overnight up`` looks after the home).
        stranger_seconds: For how long otherwise.
        base_seconds, max_seconds: Pauses grow from the first to the second, by doubling, with full jitter
            (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/).
        uniform: Randomness of the jitter.
        on_pause: Told before each pause what the last try brought, and the seconds since the first try when the next
            one will be made: for whoever would rather not wait in silence.
    """

    patience_seconds: float = 30.0
    stranger_seconds: float = 0.0
    base_seconds: float = 0.1
    max_seconds: float = 2.0
    uniform: Callable[[float, float], float] = field(default=random.uniform, repr=False)
    on_pause: Callable[[OvernightError, float], None] | None = field(default=None, repr=False)


class Patience:
    """The retries of one call.

    Args:
        policy: How patient.
        started_at: Monotonic seconds at the first try.
    """

    def __init__(self, policy: RetryPolicy, started_at: float) -> None:
        self._policy = policy
        self._started_at = started_at
        self._tries = 0

    def pause_after(self, error: OvernightError, *, resend: bool, known: bool, now: float) -> float:
        """Seconds to wait before the next try.

        Args:
            error: What the last try brought.
            resend: Sending again can do no harm.
            known: The server is known to exist.
            now: Monotonic seconds.

        Raises:
            OvernightError: ``error`` itself, when trying again would be wrong or patience has run out.
        """
        patience = self._policy.patience_seconds if known else self._policy.stranger_seconds
        left = self._started_at + patience - now
        if not error.retryable or not resend or left <= 0:
            raise error
        ceiling = min(self._policy.max_seconds, self._policy.base_seconds * 2**self._tries)
        self._tries = min(self._tries + 1, 30)
        pause_seconds = min(left, self._policy.uniform(ceiling / 2, ceiling))
        if self._policy.on_pause is not None:
            self._policy.on_pause(error, now + pause_seconds - self._started_at)
        return pause_seconds


def may_resend(call: Call[Any], *, unsent: bool, answered: bool) -> bool:
    """Whether a failed call may be sent again: it is repeatable, never left, or the server refused to take it."""
    return call.repeatable or unsent or answered
