"""Whether a data set still holds what it did at the save: found out where reading it early does no harm."""

import warnings
from typing import Any

from overnight.core.errors import DatasetChangedError
from overnight.trainer.data.augment import draws_nothing
from overnight.trainer.data.fingerprint import UNSTABLE, content_hash


class Content:
    """The identity of a data set's content, once it is known.

    Args:
        dataset: The data set.
        fingerprint: The user's own; None hashes a few samples.
        num_workers: Processes that read the data set; with any, the first of them hashes.
        name: Of the loader, for errors.
    """

    def __init__(self, dataset: Any, fingerprint: str | None, num_workers: int, name: str) -> None:
        self._dataset = dataset
        self._known = None if fingerprint is None else f"user:{fingerprint}"
        self._expected: str | None = None
        self._num_workers = num_workers
        self._name = name

    @property
    def is_found_by_worker(self) -> bool:
        """Whether a worker has to tell it, see :class:`overnight.trainer.data.augment.Fetched`."""
        return self._known is None and self._num_workers > 0

    def fingerprint(self) -> str | None:
        """The identity; None while only a worker can tell it."""
        # A data set that opens its files on first use must not do so here if it is to be copied to workers: forked
        # workers would share the file offset, spawned ones could not pickle the handle.
        if self._known is None and (self._num_workers == 0 or draws_nothing(self._dataset)):
            self._known = content_hash(self._dataset)
        return self._known

    def expect(self, fingerprint: str | None) -> None:
        """Compares the content with that of a save: now, or as soon as a worker tells it.

        Args:
            fingerprint: At the save; None was not known then.

        Raises:
            DatasetChangedError: It is another one.
        """
        self._expected = fingerprint
        if (known := self.fingerprint()) is not None:
            self.found(known)

    def found(self, fingerprint: str) -> None:
        """Takes note of the identity, and compares it once with what is expected.

        Args:
            fingerprint: Of the content as it is.

        Raises:
            DatasetChangedError: It is not what it was at the save.
        """
        self._known = fingerprint
        expected, self._expected = self._expected, None
        if expected is None or (fingerprint == expected and fingerprint != UNSTABLE):
            return
        if UNSTABLE in (fingerprint, expected):
            warnings.warn(
                "samples differ each time they are read, so it cannot be told whether the data set changed since the "
                "state was saved; pass fingerprint= to the loader",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        raise DatasetChangedError(
            f"the content of the data set of loader {self._name!r} changed since the state was saved "
            f"({expected} then, {fingerprint} now)",
            hint="Restore the data, start afresh, or pass allow_changed=True to continue at the same position in it.",
        )
