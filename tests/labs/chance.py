"""Statistics for tests of what must look random, imported only by those: scipy takes longer than most tests do."""

from typing import Any


def stats() -> Any:
    """``scipy.stats``."""
    from scipy import stats  # type: ignore[import-untyped]

    return stats
