"""Fences: who may write to a checkpoint place, and from where each start forked.

A token claims the place by creating its fence file exclusively, *before* it restores. From then on every lower token is
refused when it wants to publish. The fence names the checkpoint from which the token goes on; that is the lineage.

Fences also give a place its identity, which every checkpoint made in it carries: a folder that somebody copies from
another trial's place looks like one of this trial's, but was never part of it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from overnight.core.errors import FencedError, SaveFailedError
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token, fence_name, settled_claims

_HASH = "xxh3_128"
"""Of the rest: one altered letter must not move a fork, nor make all checkpoints those of another place."""


@dataclass(frozen=True)
class Fence:
    """A token's claim.

    Attributes:
        token: Who.
        parent: The checkpoint from which it goes on, None at step 0.
        fresh: It began anew on purpose: what older tokens have committed does not count any more.
        place: Identity of the place, empty if the token was started by a version that knew none.
        readable: False if the file was damaged and nothing but the token is known.
    """

    token: Token
    parent: CheckpointName | None = None
    fresh: bool = False
    place: str = ""
    readable: bool = True


def claim(
    place: Place, token: Token, parent: CheckpointName | None, *, fresh: bool = False, parent_place: str = ""
) -> Fence:
    """Creates the fence of a token, durably.

    Args:
        place: Where.
        token: Who.
        parent: The checkpoint from which it goes on, None at step 0.
        fresh: It begins anew on purpose.
        parent_place: The identity that the parent carries; it becomes the place's where no fence tells another.

    Raises:
        FencedError: The token was used before, or a higher one owns the place.
    """
    refuse_stale(place, token)
    identity = _identity(read_fences(place)) or parent_place or os.urandom(16).hex()
    body = {
        "attempt": token.attempt,
        "generation": token.generation,
        "step": parent.step if parent else 0,
        "parent": str(parent) if parent else None,
        "fresh": fresh,
        "place": identity,
    }
    if not place.create(fence_name(token), json.dumps(body | {_HASH: _hash_of(body)}).encode()):
        raise FencedError(
            f"attempt {token.attempt}, generation {token.generation} has already been started in {place}",
            hint="Each start needs a token of its own; two processes of one attempt would overwrite each other.",
        )
    return Fence(token, parent, fresh, identity)


def clear_claims(place: Place, seen: Place) -> list[str]:
    """Removes what starts that were killed while they claimed the place have left; none of a start under way.

    Args:
        place: A store; folders know no such files.
        seen: A glance at it; it is told of what goes.

    Returns:
        Names of the files.

    Raises:
        OSError: The place refuses.
    """
    claims = settled_claims(seen.entries())
    for entry in claims:
        place.remove(entry)
        seen.gone(entry)
    return claims


def refuse_stale(place: Place, token: Token) -> None:
    """Checks that no higher token owns the place.

    Raises:
        FencedError: One does.
    """
    newest = max(place.tokens(), default=token)
    if newest > token:
        raise FencedError(
            f"attempt {newest.attempt}, generation {newest.generation} owns {place} now; "
            f"this is attempt {token.attempt}, generation {token.generation}",
            hint="This process is a left-over of an earlier start: nothing that it computes will be used.",
        )


def require_own(place: Place, token: Token, identity: str = "") -> None:
    """Checks that the place is still the one that a token has claimed.

    Args:
        place: The place.
        token: Who.
        identity: Of the place that it claimed; empty if it is not known.

    Raises:
        SaveFailedError: Its fence is gone, or is that of another place.
    """
    if token in place.tokens() and (not identity or _read(place, token).place in ("", identity)):
        return
    raise SaveFailedError(
        f"the checkpoint place was deleted or replaced while the run was at work: {place} does not hold the fence of "
        f"attempt {token.attempt}, generation {token.generation} any more",
        hint="Its folder was deleted, moved, or is not mounted. Bring it back, or start the run again.",
    )


def is_foreign(fences: Mapping[Token, Fence], token: Token, identity: str) -> bool:
    """Whether a checkpoint was made in another place than the one it lies in.

    Args:
        fences: Of the place in which it lies.
        token: Who wrote it.
        identity: Of the place in which it was made, as its manifest says; empty if that is not known.
    """
    own = fences.get(token)
    known = {own.place} if own is not None and own.place else {fence.place for fence in fences.values() if fence.place}
    return bool(identity and known) and identity not in known


def next_attempt(place: Place) -> int:
    """The lowest attempt number above all that are known in the place."""
    known = [*place.tokens(), *(name.token for name in place.checkpoints())]
    return max((token.attempt for token in known), default=0) + 1


def read_fences(place: Place) -> dict[Token, Fence]:
    """All fences of a place."""
    return {token: _read(place, token) for token in place.tokens()}


def _identity(fences: Mapping[Token, Fence]) -> str:
    return next((fences[token].place for token in sorted(fences, reverse=True) if fences[token].place), "")


def _read(place: Place, token: Token) -> Fence:
    try:
        body = json.loads(place.read(fence_name(token)))
        if body.pop(_HASH, None) not in (None, _hash_of(body)):  # fences of earlier versions have none
            return Fence(token, readable=False)
        parent = CheckpointName.parse(body["parent"]) if body["parent"] is not None else None
        if body["parent"] is not None and parent is None:
            return Fence(token, readable=False)
        return Fence(token, parent, bool(body.get("fresh", False)), str(body.get("place", "")))
    except (ConnectionError, TimeoutError):  # a store that is away: nothing is known of the fence, not even damage
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Fence(token, readable=False)


def _hash_of(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
