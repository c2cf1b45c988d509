"""MLflow, where people read results. The only server-side module that imports mlflow; only the outbox imports it.

Every call may be repeated: a run is found by its tag before one is made, and a metric that is sent twice with the same
time is one row in MLflow. All errors become two: :class:`TrackingAwayError` (try later, nothing is lost) and
:class:`TrackingRefusedError` (trying again cannot help).
"""

import math
import posixpath
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from overnight.core.errors import OvernightError, UnavailableError

P = ParamSpec("P")
R = TypeVar("R")

MetricPoint = tuple[str, float, int, int]
"""key, value (may be NaN or infinite), Unix milliseconds, step."""

TRIAL_TAG = "overnight.trial_id"
METRICS_PER_CALL = 1_000
ITEMS_PER_CALL = 100
_KEY_CHARACTERS = 250
_PARAM_CHARACTERS = 6_000
_TAG_CHARACTERS = 8_000
_BUSY_SECONDS = 20.0
_PERMANENT = frozenset(
    {"INVALID_PARAMETER_VALUE", "MALFORMED_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"}
)
_GONE = frozenset({"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"})


class TrackingAwayError(UnavailableError):
    """MLflow does not answer, is busy, or does not let us in."""

    code = "tracking_away"


class TrackingRefusedError(OvernightError):
    """MLflow will never take this."""

    code = "tracking_refused"


class RunGoneError(TrackingRefusedError):
    """MLflow has no such run or experiment (any more)."""

    code = "tracking_run_gone"


def _translated(method: Callable[P, R]) -> Callable[P, R]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except MlflowException as error:
            text = f"MLflow: {error.message}"[:2_000]
            if error.error_code in _GONE:
                raise RunGoneError(text) from error
            if error.error_code in _PERMANENT:
                raise TrackingRefusedError(text) from error
            raise TrackingAwayError(text) from error
        except OSError as error:  # those of requests are OSErrors too
            raise TrackingAwayError(f"MLflow: {type(error).__name__}: {error}"[:2_000]) from error

    return call


class Tracker:
    """What the outbox tells MLflow.

    Args:
        uri: MLflow's tracking URI.
        artifacts: Where artifacts of new experiments go when MLflow is a database of our own; None leaves it to the
            MLflow server.
    """

    def __init__(self, uri: str, artifacts: Path | None = None) -> None:
        self.uri = uri
        self._artifacts = artifacts
        self._lazy: MlflowClient | None = None

    @property
    def _client(self) -> MlflowClient:
        # Made late: on a database it creates the tables, which may fail and is then tried again.
        if self._lazy is None:
            self._lazy = MlflowClient(tracking_uri=self.uri)
        return self._lazy

    def answers(self) -> bool:
        """Whether MLflow answers a small question."""
        try:
            self._client.search_experiments(max_results=1)
        except (MlflowException, OSError):
            return False
        return True

    @_translated
    def experiment(self, name: str) -> str:
        """The id of the experiment of that name; made, or taken back from the bin, if need be."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            location = (self._artifacts / name).as_uri() if self._artifacts else None
            return str(self._client.create_experiment(name, artifact_location=location))
        if found.lifecycle_stage != "active":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    @_translated
    def run(self, experiment_id: str, trial_id: str, name: str, start_ms: int, tags: Mapping[str, str]) -> str:
        """The id of the trial's one run: the tag is looked for first, so that a crash cannot make a second one."""
        found = self._client.search_runs(
            [experiment_id], f"tags.`{TRIAL_TAG}` = '{trial_id}'", ViewType.ACTIVE_ONLY, max_results=1
        )
        if found:
            return str(found[0].info.run_id)
        everything = {**_texts(tags), TRIAL_TAG: trial_id}
        return str(self._client.create_run(experiment_id, start_ms, everything, run_name=name).info.run_id)

    @_translated
    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Adds points to the history; one that is there already with the same time is not added again."""
        for chunk in _chunks(points, METRICS_PER_CALL):
            self._client.log_batch(run_id, metrics=[Metric(metric_key(k), v, ms, step) for k, v, ms, step in chunk])

    @_translated
    def log_params(self, run_id: str, values: Mapping[str, str]) -> dict[str, str]:
        """Adds params; returns those that the run has already with another value, which MLflow never changes."""
        have = self._client.get_run(run_id).data.params
        wanted = {metric_key(key): value[:_PARAM_CHARACTERS] for key, value in values.items()}
        for chunk in _chunks([(k, v) for k, v in wanted.items() if k not in have], ITEMS_PER_CALL):
            self._client.log_batch(run_id, params=[Param(key, value) for key, value in chunk])
        return {key: value for key, value in wanted.items() if have.get(key, value) != value}

    @_translated
    def set_tags(self, run_id: str, values: Mapping[str, str]) -> None:
        """Sets tags, replacing what they were."""
        for chunk in _chunks(list(_texts(values).items()), ITEMS_PER_CALL):
            self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in chunk])

    @_translated
    def set_status(self, run_id: str, status: str, end_ms: int | None = None) -> None:
        """``RUNNING``, ``SCHEDULED``, or with an end time ``FINISHED``, ``FAILED``, ``KILLED``."""
        if end_ms is None:
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status=status, end_time=end_ms)

    @_translated
    def told(self, run_id: str, key: str) -> dict[int, float]:
        """What the run's history of a metric holds: step to value."""
        return {m.step: m.value for m in self._client.get_metric_history(run_id, metric_key(key))}


def prepare_database(path: Path) -> None:
    """Makes an MLflow database of our own, and makes it readable while it is written: people look at it all the time.

    It appears whole or not at all. MLflow's migrations are no transaction on SQLite: an outbox that was killed in the
    middle of them would leave a database that MLflow refuses for ever.

    With the rollback journal that SQLite starts with, each reader holds up the writer, and each commit syncs twice as
    often (measured: half the throughput). The mode stays in the file.

    Raises:
        TrackingAwayError: The file cannot be opened or stays locked.
    """
    try:
        if not path.exists():
            _make_database(path)
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    except sqlite3.Error as error:
        raise TrackingAwayError(f"MLflow's database {path}: {error}") from error


@_translated
def _make_database(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    draft = path.with_name(f"{path.name}.draft")
    for leftover in path.parent.glob(f"{draft.name}*"):  # and its journal
        leftover.unlink()
    store = SqlAlchemyStore(f"sqlite:///{draft}", str(path.parent / "artifacts"))  # type: ignore[no-untyped-call]
    store.engine.dispose()
    draft.rename(path)


def metric_key(name: str) -> str:
    """The name as MLflow takes it: letters, digits, ``_ - . : /`` and spaces, no odd paths, at most 250 characters."""
    text = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/")[:_KEY_CHARACTERS]
    text = re.sub(r"^\.\.?(?=/|$)|/+$", "_", text)
    return text if posixpath.normpath(text) == text and text not in ("", ".") else re.sub(r"[/.]", "_", text) or "_"


def milliseconds(seconds: float) -> int:
    """MLflow's time; what is no time becomes 0."""
    return round(seconds * 1_000) if math.isfinite(seconds) and seconds > 0 else 0


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {metric_key(key): value[:_TAG_CHARACTERS] for key, value in values.items()}


def _chunks(items: Iterable[R], size: int) -> Iterable[list[R]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
