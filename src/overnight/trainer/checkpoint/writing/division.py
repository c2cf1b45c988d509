"""Which rank stores what: what is equal on all ranks once, spread over them; the rest each rank for itself.

Equality is proved by hash. Every rank computes the same division from the same hashes, so none has to tell the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overnight.core.errors import SaveFailedError

Unit = tuple[str, tuple[int, ...] | None]
"""Key and, for a chunk of a distributed tensor, its place."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank has of one unit: the hash of its content and its bytes."""

    digest: str
    num_bytes: int


@dataclass(frozen=True)
class Division:
    """One rank's share.

    Attributes:
        shared: Units that it stores for all.
        private: Keys of its own, which it stores under a key of its own.
    """

    shared: frozenset[Unit]
    private: frozenset[str]


def divide(holdings: Sequence[dict[Unit, Held]], rank: int) -> Division:
    """The share of one rank.

    Args:
        holdings: What each rank has.
        rank: Whose share.

    Raises:
        SaveFailedError: Two ranks hold the same chunk of a distributed tensor with different values.
    """
    holders: dict[Unit, list[int]] = defaultdict(list)
    for number, held in enumerate(holdings):
        for unit in held:
            holders[unit].append(number)
    shared, private = [], []
    for unit, ranks in holders.items():
        key, at = unit
        equal = len({holdings[number][unit].digest for number in ranks}) == 1
        if at is not None and not equal:
            raise SaveFailedError(
                f"ranks {', '.join(map(str, ranks))} hold different values of the part of {key} at {list(at)}",
                hint="Replicas of a distributed tensor have drifted apart: their updates are not the same.",
            )
        if at is not None or (equal and len(ranks) == len(holdings)):
            shared.append(unit)
        elif rank in ranks:
            private.append(key)
    owners = _spread([(unit, holdings[holders[unit][0]][unit].num_bytes, holders[unit]) for unit in shared])
    return Division(frozenset(unit for unit, owner in owners.items() if owner == rank), frozenset(private))


def _spread(units: Iterable[tuple[Unit, int, list[int]]]) -> dict[Unit, int]:
    """An owner for each unit among its holders, so that all store about as many bytes: largest first, least laden."""
    load: dict[int, int] = defaultdict(int)
    owners: dict[Unit, int] = {}
    for unit, num_bytes, ranks in sorted(units, key=lambda item: (-item[1], item[0][0], item[0][1] or ())):
        owner = min(ranks, key=lambda number: (load[number], number))
        load[owner] += num_bytes + 1
        owners[unit] = owner
    return owners
