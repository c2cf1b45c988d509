"""After a commit: old checkpoints go, and with them the bases that nothing mentions any more.

A base may go only if a deleted checkpoint mentioned it and no other does. The newest commit stays in any case, and
ranks that prepare the next checkpoint use no bases but those of the newest one or new ones, so none is pulled away
from under them.
"""

from overnight.trainer.checkpoint.place import CheckpointName, Place
from overnight.trainer.checkpoint.retention import Retention, prune
from overnight.trainer.checkpoint.summary import summarize


class Tidying:
    """Remembers from commit to commit which checkpoint mentions which bases."""

    def __init__(self) -> None:
        self._bases: dict[CheckpointName, frozenset[str]] = {}

    def after(self, place: Place, newest: CheckpointName, retention: Retention) -> list[CheckpointName]:
        """Deletes what is not needed once ``newest`` is committed.

        Returns:
            The deleted checkpoints.

        Raises:
            Exception: Whatever the place raises.
        """
        self._look_at(place)
        deleted = prune(place, newest, retention)
        mentioned = {base for name in deleted for base in self._bases.pop(name, ())}
        if mentioned and self._look_at(place):
            for base in mentioned - set().union(*self._bases.values()):
                place.remove(base)
        return deleted

    def _look_at(self, place: Place) -> bool:
        """Reads manifests that are new; whether all say what they mention."""
        if not place.bases():
            return False
        names = place.checkpoints()
        summaries = [summarize(place, name) for name in names]
        self._bases = {summary.name: summary.bases for summary in summaries}
        return all(summary.readable for summary in summaries)
