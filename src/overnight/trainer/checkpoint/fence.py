"""Fences: who may write to a checkpoint place, and from where each start forked.

A token claims the place by creating its fence file exclusively, *before* it restores. From then on every lower token is
refused when it wants to publish. The fence names the checkpoint from which the token goes on; that is the lineage.
"""

import json
from dataclasses import dataclass

from overnight.core.errors import FencedError
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token, fence_name


@dataclass(frozen=True)
class Fence:
    """A token's claim.

    Attributes:
        token: Who.
        parent: The checkpoint from which it goes on, None at step 0.
        fresh: It began anew on purpose: what older tokens have committed does not count any more.
        readable: False if the file was damaged and nothing but the token is known.
    """

    token: Token
    parent: CheckpointName | None = None
    fresh: bool = False
    readable: bool = True


def claim(place: Place, token: Token, parent: CheckpointName | None, *, fresh: bool = False) -> Fence:
    """Creates the fence of a token, durably.

    Raises:
        FencedError: The token was used before, or a higher one owns the place.
    """
    refuse_stale(place, token)
    body = {
        "attempt": token.attempt,
        "generation": token.generation,
        "step": parent.step if parent else 0,
        "parent": str(parent) if parent else None,
        "fresh": fresh,
    }
    if not place.create(fence_name(token), json.dumps(body).encode()):
        raise FencedError(
            f"attempt {token.attempt}, generation {token.generation} has already been started in {place}",
            hint="Each start needs a token of its own; two processes of one attempt would overwrite each other.",
        )
    return Fence(token, parent, fresh)


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


def next_attempt(place: Place) -> int:
    """The lowest attempt number above all that are known in the place."""
    known = [*place.tokens(), *(name.token for name in place.checkpoints())]
    return max((token.attempt for token in known), default=0) + 1


def read_fences(place: Place) -> dict[Token, Fence]:
    """All fences of a place."""
    return {token: _read(place, token) for token in place.tokens()}


def _read(place: Place, token: Token) -> Fence:
    try:
        body = json.loads(place.read(fence_name(token)))
        parent = CheckpointName.parse(body["parent"]) if body["parent"] is not None else None
        if body["parent"] is not None and parent is None:
            return Fence(token, readable=False)
        return Fence(token, parent, bool(body.get("fresh", False)))
    except (OSError, ValueError, KeyError, TypeError):
        return Fence(token, readable=False)
