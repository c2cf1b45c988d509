"""From which checkpoints a new token may go on.

Tokens are walked newest first; a token that has committed hides what its ancestors committed after the fork.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from overnight.trainer.checkpoint.fence import Fence, read_fences
from overnight.trainer.checkpoint.place import CheckpointName, Place, Token

Limit = tuple[int, int] | None
"""Step and save up to which a token's checkpoints count; None: all of them."""


def lineage(place: Place, without: Collection[CheckpointName] = ()) -> Iterator[CheckpointName]:
    """Published checkpoints from which a new token may go on, best first; their content is not looked at.

    Args:
        place: The place.
        without: Folders that are known to be none of the trial's checkpoints: nobody has committed them here.
    """
    by_token = _by_token(place, without)
    for token, limit in _line(by_token, read_fences(place)):
        for name in sorted(by_token[token], reverse=True):
            if limit is None or (name.step, name.save) <= limit:
                yield name


def outrun(place: Place, without: Collection[CheckpointName] = ()) -> Iterator[tuple[CheckpointName, str]]:
    """Checkpoints of stale attempts, beyond the place at which the newest lineage left theirs, each with the reason.

    Args:
        place, without: As with :func:`lineage`.
    """
    by_token = _by_token(place, without)
    fences = read_fences(place)
    line = dict(_line(by_token, fences))
    newest = max(line, default=None)
    floor = floor_of(fences)
    for token in sorted(token for token in by_token if token >= floor):
        limit = line.get(token, (-1, 0))
        for name in sorted(by_token[token]):
            if limit is not None and (name.step, name.save) > limit:
                where = f"went on from step {limit[0]}" if token in line else "does not go on from that attempt"
                yield name, f"it is of a stale attempt: {newest} {where}"


def _by_token(place: Place, without: Collection[CheckpointName]) -> Mapping[Token, list[CheckpointName]]:
    by_token: dict[Token, list[CheckpointName]] = defaultdict(list)
    for name in place.checkpoints():
        if name not in without:
            by_token[name.token].append(name)
    return by_token


def floor_of(fences: Mapping[Token, Fence]) -> Token:
    """The newest token that began anew on purpose; older ones do not count."""
    return max((token for token, fence in fences.items() if fence.fresh), default=Token(0, 0))


def _line(
    by_token: Mapping[Token, list[CheckpointName]], fences: Mapping[Token, Fence]
) -> Iterator[tuple[Token, Limit]]:
    """Tokens of the newest lineage that have or may have checkpoints, newest first, and how far each counts."""
    floor = floor_of(fences)
    token = max((token for token in by_token if token >= floor), default=None)
    limit: Limit = None
    while token is not None:
        yield token, limit
        token, limit = _ancestor(fences.get(token), token, by_token)


def _ancestor(
    fence: Fence | None, token: Token, by_token: Mapping[Token, list[CheckpointName]]
) -> tuple[Token | None, Limit]:
    if fence is None or not fence.readable:
        older = [other for other in by_token if other < token]
        return max(older, default=None), None
    if fence.parent is None:
        return None, None
    return fence.parent.token, (fence.parent.step, fence.parent.save)
