"""What one rank was told: by signals and by the supervisor's directives."""

import time

from overnight.core.enums import DirectiveAction
from overnight.trainer.boundary import Leave, Signals
from overnight.trainer.link import Link

SIGNAL_GRACE_SECONDS = 30.0
"""How long a run may take after a signal, which unlike a directive does not say so."""


class Orders:
    """Reads signals and directives as wishes of this rank.

    Args:
        signals: Of this process.
        link: The line to the supervisor.
    """

    def __init__(self, signals: Signals, link: Link) -> None:
        self._signals = signals
        self._link = link
        self._saved_version = 0

    @property
    def reason(self) -> str:
        """Why the supervisor wants what it wants, in a word."""
        return self._link.directive.reason

    def leave(self) -> tuple[Leave, float]:
        """Whether to leave and how, and the seconds of grace that remain."""
        leave, since, grace_seconds = self._signals.leave, self._signals.received, SIGNAL_GRACE_SECONDS
        directive = self._link.directive
        if directive.action in (DirectiveAction.YIELD, DirectiveAction.STOP):
            told = Leave.STOP if directive.action is DirectiveAction.STOP else Leave.YIELD
            leave, since, grace_seconds = max(leave, told), directive.received, directive.grace_seconds
        return leave, grace_seconds - (time.monotonic() - since if since is not None else 0.0)

    def take_save(self) -> bool:
        """Whether a checkpoint was ordered; true once per order."""
        directive = self._link.directive
        asked = directive.action is DirectiveAction.CHECKPOINT and directive.version > self._saved_version
        if asked:
            self._saved_version = directive.version
        return asked
