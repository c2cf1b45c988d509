"""Only one scheduler decides: it holds a row and raises its counter; others wait until that stands still."""

from datetime import datetime
from typing import TYPE_CHECKING

from overnight.core.errors import ConflictError
from overnight.platform.scheduler.expiry import SilenceWatch
from overnight.store import leaders

if TYPE_CHECKING:
    from overnight.store.engine import Connection

ROLE = "scheduler"


class Leadership:
    """This scheduler's claim to the role.

    Args:
        holder: Names the installation, not the process: whoever holds the home's lock is its only server, so a server
            that comes after a killed one takes the role over at once.
        lease_seconds: After this long without a sign of another holder the role is free.
    """

    def __init__(self, holder: str, lease_seconds: float) -> None:
        self._holder = holder[-200:]
        self._watch = SilenceWatch(lease_seconds)
        self._renew_seconds = lease_seconds / 4
        self._renews_at = float("-inf")
        self.is_held = False

    def is_due(self, monotonic_now: float) -> bool:
        """Whether it is time to renew the role, or to look again whether it is free."""
        return monotonic_now >= self._renews_at

    @property
    def renews_at(self) -> float:
        """When :meth:`is_due` becomes true."""
        return self._renews_at

    def hold(self, conn: "Connection", *, wall_now: datetime, monotonic_now: float) -> bool:
        """Renews the role or tries to take it, inside a store write; whether this scheduler may decide."""
        self._renews_at = monotonic_now + self._renew_seconds
        if self.is_held and leaders.renew(conn, holder=self._holder, now=wall_now, name=ROLE):
            return True
        seen = leaders.read(conn, ROLE)
        if seen is not None and seen.holder != self._holder:
            silent = self._watch.look({seen.holder: seen.counter}, monotonic_now)
            if not silent:
                self.is_held = False
                return False
        self.is_held = leaders.acquire(conn, holder=self._holder, now=wall_now, seen=seen, name=ROLE)
        return self.is_held

    def require(self, conn: "Connection") -> None:
        """Refuses a write of a scheduler that is no longer the one that decides.

        Raises:
            ConflictError: Another holds the role.
        """
        seen = leaders.read(conn, ROLE)
        if seen is None or seen.holder != self._holder:
            self.is_held = False
            self._renews_at = float("-inf")
            raise ConflictError("another scheduler decides now", holder=seen.holder if seen else None)
