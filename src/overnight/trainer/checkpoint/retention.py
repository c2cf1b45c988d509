"""Keeping the newest checkpoints of one token; whatever others wrote is not ours to delete."""

import shutil

from overnight.trainer.checkpoint.place import PARTIAL, CheckpointName, Place


def prune(place: Place, newest: CheckpointName, keep: int) -> list[CheckpointName]:
    """Deletes what this token wrote and needs no longer, after ``newest`` was committed and verified.

    The newest ``keep`` checkpoints of the token stay; its unfinished folders of earlier saves go. A folder first loses
    its name, so that a reader never meets half a checkpoint.

    Args:
        place: The place.
        newest: What has just been committed.
        keep: How many of the token's checkpoints stay, at least 1.

    Returns:
        The deleted checkpoints.
    """
    own = [name for name in place.checkpoints() if name.token == newest.token]
    doomed = [name for name in own[: -max(1, keep)] if name != newest]
    for name in doomed:
        trash = place.root / f".trash-{name}"
        place.path(name).rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
    for entry in place.entries():
        name_or_none = CheckpointName.parse(entry.removesuffix(PARTIAL)) if entry.endswith(PARTIAL) else None
        if name_or_none is not None and name_or_none.token == newest.token and name_or_none < newest:
            shutil.rmtree(place.root / entry, ignore_errors=True)
    return doomed
