"""The end of a script that ran through: what must be saved and told before it counts as finished."""

import json
from collections.abc import Mapping
from typing import Any

from overnight.core.errors import SaveFailedError
from overnight.trainer.agreement import Spot
from overnight.trainer.checkpoint.place import write_atomic
from overnight.trainer.checkpoint.reader import complain
from overnight.trainer.checkpoint.saver import Saver
from overnight.trainer.cursor import Cursor
from overnight.trainer.metrics import Metrics
from overnight.trainer.saves import Saves
from overnight.trainer.start import Origin
from overnight.trainer.telling import Telling


class Ending:
    """Ends a run.

    Args:
        origin: Where the run went on.
        first_step: At which step it did.
        cursor: Knows the step.
        telling: Brings in what all ranks logged.
        metrics: What was reported.
        saver: The tracked objects.
        saves: Saves once more.
    """

    def __init__(
        self,
        origin: Origin,
        first_step: int,
        cursor: Cursor,
        telling: Telling,
        metrics: Metrics,
        saver: Saver,
        saves: Saves,
    ) -> None:
        self._origin = origin
        self._first_step = first_step
        self._cursor = cursor
        self._telling = telling
        self._metrics = metrics
        self._saver = saver
        self._saves = saves

    def finish(self) -> None:
        """The last save is never skipped, and its failure is the run's.

        Raises:
            RanksDisagreeError: The ranks are not all at the end.
            SaveFailedError, FencedError: The last save, or one before it that nobody was told of, has failed.
        """
        self._cursor.settle()
        self._telling.gather(Spot.END)
        if self._saves.possible:
            self._saves.finish("final")
        self._saves.require_good()
        if self._origin.environment.rank == 0:
            final = {"step": self._cursor.step, "weights": self._saver.fingerprint()}
            self._write(final)
            if self._origin.environment.alone:
                self._tell()

    def _write(self, final: Mapping[str, Any]) -> None:
        path = self._origin.attempt_dir / "final.json"
        try:
            write_atomic(path, json.dumps(final).encode())
        except OSError as error:
            raise SaveFailedError(
                f"the run's result was not written to {path}: {error.strerror or error}",
                hint="The trial's folder must stay where it is until the run has ended, and have room.",
            ) from error

    def _tell(self) -> None:
        """The last line for the person at the terminal; under a supervisor the platform tells it."""
        step = self._cursor.step
        reported = self._metrics.reported.items()
        results = "".join(f", {name} {v:.6g}" if isinstance(v, float) else f", {name} {v}" for name, v in reported)
        if self._origin.restored is not None and step == self._first_step:
            complain(f"no update was left to do after step {step}{results}; --fresh starts anew")
            return
        complain(f"finished at step {step}{results}; saved in {self._origin.trial_dir}")
