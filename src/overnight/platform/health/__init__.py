"""What device signals mean: causes as data, verdicts from reports and history, the look before a lease.

Pools, in the node daemon, use ``causes`` alone; :class:`Health` needs the store and is loaded when it is asked for.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["Health"]

if TYPE_CHECKING:
    from overnight.platform.health.ward import Health


def __getattr__(name: str) -> Any:
    if name == "Health":
        from overnight.platform.health.ward import Health

        return Health
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
