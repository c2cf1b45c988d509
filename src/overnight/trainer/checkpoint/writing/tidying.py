"""After a commit: old checkpoints go, and with them the bases that nothing mentions any more.

An attempt deletes only what it wrote itself. If nobody else tidies its place, since no server knows of the run, it also
deletes what earlier attempts have left: the fences keep those from ever committing again. What somebody has put aside
by beginning anew on purpose (``--fresh``) is theirs to delete.

A base may go only if a deleted checkpoint mentioned it and no other does. The newest commit stays in any case, and
ranks that prepare the next checkpoint use no bases but those of the newest one or new ones, so none is pulled away
from under them.
"""

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from overnight.trainer.checkpoint.fence import clear_claims, read_fences
from overnight.trainer.checkpoint.pins import PinWatch
from overnight.trainer.checkpoint.place import PARTIAL, CheckpointName, Place, Token
from overnight.trainer.checkpoint.reading.lineage import floor_of
from overnight.trainer.checkpoint.retention import Retention, prune
from overnight.trainer.checkpoint.summary import summarize

if TYPE_CHECKING:
    from overnight.trainer.checkpoint.sweep import Deletion


class Tidying:
    """Remembers from commit to commit which checkpoint mentions which bases."""

    def __init__(self) -> None:
        self._bases: dict[CheckpointName, frozenset[str]] = {}
        self._watch = PinWatch()
        self._glance: tuple[CheckpointName, Place] | None = None

    def after(self, place: Place, newest: CheckpointName, retention: Retention) -> list[CheckpointName]:
        """Deletes what is not needed once ``newest`` is committed.

        Returns:
            The deleted checkpoints.

        Raises:
            Exception: Whatever the place raises.
        """
        seen = place.glance()
        self._glance = newest, seen
        self._look_at(place, seen)
        deleted = prune(place, newest, retention, seen=seen)
        mentioned = {base for name in deleted for base in self._bases.pop(name, ())}
        if self._not_mentioned(mentioned) and self._look_at(place, place.glance()):
            for base in self._not_mentioned(mentioned):
                place.remove(base)
                seen.gone(base)
        clear_claims(place, seen)
        return deleted

    def _not_mentioned(self, bases: AbstractSet[str]) -> AbstractSet[str]:
        return bases - set().union(*self._bases.values())

    def of_earlier(self, place: Place, newest: CheckpointName, parent: CheckpointName | None) -> "list[Deletion]":
        """Deletes what earlier attempts left and the run's rules would not keep, while this one goes on.

        Right behind :meth:`after` it knows what is there, and need not ask a store for it again.

        Args:
            place: The place.
            newest: What has just been committed, and so verified: the last good one.
            parent: From which the run went on. It stays: objects that are tracked later are read from it.

        Raises:
            Exception: Whatever the place raises.
        """
        seen = self._glance[1] if self._glance is not None and self._glance[0] == newest else place.glance()
        self._glance = None
        if not any(_is_earlier(entry, newest.token) for look in (seen.entries, seen.unfinished) for entry in look()):
            return []
        return self._sweep(place, seen, newest, at_rest=False, reading=parent)

    def at_end(self, place: Place, newest: CheckpointName) -> "list[Deletion]":
        """As :meth:`of_earlier`, once this run will neither read nor write any more.

        Raises:
            Exception: Whatever the place raises.
        """
        return self._sweep(place, place.glance(), newest, at_rest=True, reading=None)

    def _sweep(
        self, place: Place, seen: Place, newest: CheckpointName, *, at_rest: bool, reading: CheckpointName | None
    ) -> "list[Deletion]":
        # They bring thread pools and logging along, of no use to a writer whose place is tidy.
        from overnight.trainer.checkpoint.survey import survey
        from overnight.trainer.checkpoint.sweep import mark, sweep

        found = survey(place, self._watch, seen=seen)
        if max(found.tokens, default=newest.token) != newest.token or newest not in found.line[:1]:
            return []  # a newer start knows better, or somebody has taken the newest away
        floor = floor_of(read_fences(seen))
        spared = {row.name for row in found.rows if row.name == reading or row.name.token < floor}
        return sweep(found, mark(found, at_rest=at_rest, good=newest, spared=spared), self._watch)

    def _look_at(self, place: Place, seen: Place) -> bool:
        """Reads manifests that are new; whether all say what they mention."""
        if not seen.bases():
            return False
        names = seen.checkpoints()
        summaries = [summarize(place, name) for name in names]
        self._bases = {summary.name: summary.bases for summary in summaries}
        return all(summary.readable for summary in summaries)


def _is_earlier(entry: str, token: Token) -> bool:
    """Whether an earlier token's checkpoint, finished or not, has this name."""
    name = CheckpointName.parse(entry.partition(PARTIAL)[0])
    return name is not None and name.token < token
