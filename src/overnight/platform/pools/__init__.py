"""Where devices come from."""

from overnight.platform.pools.pool import Pool, open_pool

__all__ = ["Pool", "open_pool"]
