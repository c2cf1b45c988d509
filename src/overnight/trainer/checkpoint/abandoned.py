"""What starts that were killed in the middle of claiming a place have left there, once none that lives can own it.

In a store that is the announcement of a fence newer than all others, which no later start has settled; in a folder the
hidden file that was to become a fence. Nothing tells one of a start under way from one of a dead start but its age. The
clock of whoever keeps the files says how old they are: it dates them and a file that is made for the comparison.
"""

import re
from typing import Final

from overnight.trainer.checkpoint.place import NOW_NAME, PASSING, Place, is_claim

ABANDONED_SECONDS: Final = 86_400.0
"""Far beyond :data:`~overnight.trainer.checkpoint.place.CLAIM_SECONDS`, after which a start gives up its own claim."""

_HALF_A_FENCE = re.compile(rf"\.fence-\d+\.\d+\.json\.[0-9a-f]+{re.escape(PASSING)}")


def abandoned(place: Place, seen: Place) -> list[str]:
    """Names of files of starts that are over.

    Args:
        place: The place.
        seen: A glance at it.

    Raises:
        OSError: The place does not answer.
    """
    found = [entry for entry in seen.entries() if is_claim(entry) or is_passing(entry)]
    ages = place.ages(found) if found else {}
    return [entry for entry in found if ages.get(entry, 0.0) > ABANDONED_SECONDS]


def is_passing(entry: str) -> bool:
    """Whether a file of this name is for a moment only, in any place."""
    return _HALF_A_FENCE.fullmatch(entry) is not None or NOW_NAME.fullmatch(entry) is not None
