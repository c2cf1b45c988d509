"""A small MLflow tracking server for scripts that call ``mlflow`` themselves.

Their calls land in the attempt's spool, so that they are fenced, survive a server that is away, and reach the real
MLflow through the same outbox as everything else. Whatever experiment or run a script asks for, it gets the trial's
own. A param that changes between attempts becomes a tag instead of an error, and the run's status is the platform's
to say, not the script's.

The REST API is MLflow's (https://mlflow.org/docs/latest/rest-api.html), the part that tracking clients use while
training.
Standard library only: runs in the user's interpreter too.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overnight.platform.node.command import as_text, flatten
from overnight.platform.node.files import read_json, write_json
from overnight.platform.node.objective import as_value
from overnight.platform.node.wire import HttpError

PREFIXES = ("/api/2.0/mlflow/", "/ajax-api/2.0/mlflow/", "/api/2.1/mlflow/")
MAX_ENTRIES = 10_000
EXPERIMENT_ID = "1"

Route = Callable[[dict[str, Any]], dict[str, Any]]


def run_id_of(order: Mapping[str, Any]) -> str:
    """The run's id: MLflow's own where it exists already, else one derived from the trial, the same in each attempt."""
    known = order.get("mlflow_run_id")
    return str(known) if known else hashlib.sha256(str(order["trial_id"]).encode()).hexdigest()[:32]


class MlflowEndpoint:
    """Answers a tracking client about one run.

    Args:
        order: The attempt's order.
        on_metrics: Called with rows [[key, step, value, time], …].
        on_facts: Called with (params, tags) that are new.
    """

    def __init__(
        self,
        order: Mapping[str, Any],
        on_metrics: Callable[[list[list[Any]]], None],
        on_facts: Callable[[dict[str, str], dict[str, str]], None],
    ) -> None:
        self.run_id = run_id_of(order)
        self._order = order
        self._on_metrics = on_metrics
        self._on_facts = on_facts
        self._experiment = str(order["mlflow_experiment"])
        self._memory = Path(order["trial_dir"], "mlflow-params.json")
        self._params = {name: as_text(value) for name, value in flatten(order["params"])}
        self._params |= {str(k): str(v) for k, v in (read_json(self._memory) or {}).items()}
        self._tags: dict[str, str] = {}
        self._metrics: dict[str, dict[str, Any]] = {}
        self._started_ms = int(time.time() * 1000)
        self._name = str(order["trial_name"])
        self._routes = self._make_routes()

    def handles(self, path: str) -> bool:
        """Whether a path belongs to MLflow's API."""
        return path.startswith(("/api/", "/ajax-api/"))

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answers one call.

        Args:
            method: HTTP method.
            path: As asked for, without the query.
            body: The JSON body, or the query of a GET.

        Raises:
            HttpError: A call that this endpoint does not have; MLflow's client shows the message.
        """
        name = next((path.removeprefix(prefix) for prefix in PREFIXES if path.startswith(prefix)), path)
        route = self._routes.get(f"{method} {name}")
        if route is None:
            raise HttpError(
                404, f"overnight's MLflow endpoint has no {method} {path}: log through the trainer instead",
                "ENDPOINT_NOT_FOUND",
            )  # fmt: skip
        return 200, route(body)

    def _make_routes(self) -> dict[str, Route]:
        return {
            "POST runs/create": self._create_run,
            "POST runs/update": self._update_run,
            "GET runs/get": lambda body: {"run": self._run()},
            "POST runs/search": lambda body: {"runs": [self._run()]},
            "POST runs/log-metric": self._log_metric,
            "POST runs/log-batch": self._log_batch,
            "POST runs/log-parameter": lambda body: self._log_params([body]),
            "POST runs/set-tag": lambda body: self._set_tags([body]),
            "POST runs/delete-tag": lambda body: {},
            "POST runs/log-inputs": lambda body: {},
            "POST runs/log-model": lambda body: {},
            "POST runs/outputs": lambda body: {},
            "GET metrics/get-history": self._history,
            "GET artifacts/list": lambda body: {"root_uri": self._artifact_uri, "files": []},
            "GET experiments/get-by-name": self._experiment_by_name,
            "GET experiments/get": lambda body: {"experiment": self._experiment_info()},
            "POST experiments/create": self._create_experiment,
            "POST experiments/search": lambda body: {"experiments": [self._experiment_info()]},
            "GET experiments/search": lambda body: {"experiments": [self._experiment_info()]},
            "POST experiments/update": lambda body: {},
            "POST experiments/set-experiment-tag": lambda body: {},
        }

    @property
    def _artifact_uri(self) -> str:
        return Path(self._order["trial_dir"], "mlflow-artifacts").as_uri()

    def _run(self) -> dict[str, Any]:
        info = {
            "run_id": self.run_id,
            "run_uuid": self.run_id,
            "run_name": self._name,
            "experiment_id": EXPERIMENT_ID,
            "user_id": "overnight",
            "status": "RUNNING",
            "start_time": self._started_ms,
            "artifact_uri": self._artifact_uri,
            "lifecycle_stage": "active",
        }
        tags = {"mlflow.runName": self._name, **self._tags}
        data = {
            "metrics": list(self._metrics.values()),
            "params": [{"key": key, "value": value} for key, value in self._params.items()],
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        return {"info": info, "data": data, "inputs": {}, "outputs": {}}

    def _experiment_info(self) -> dict[str, Any]:
        return {
            "experiment_id": EXPERIMENT_ID,
            "name": self._experiment,
            "artifact_location": self._artifact_uri,
            "lifecycle_stage": "active",
            "tags": [],
        }

    def _experiment_by_name(self, body: dict[str, Any]) -> dict[str, Any]:
        # Any name is the trial's own experiment: a script's set_experiment() must neither fail nor lead elsewhere.
        return {"experiment": {**self._experiment_info(), "name": str(body.get("experiment_name", self._experiment))}}

    def _create_experiment(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"experiment_id": EXPERIMENT_ID}

    def _create_run(self, body: dict[str, Any]) -> dict[str, Any]:
        self._set_tags(_items(body, "tags"))
        return {"run": self._run()}

    def _update_run(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"run_info": self._run()["info"]}  # a status set by the script is not the trial's

    def _log_metric(self, body: dict[str, Any]) -> dict[str, Any]:
        self._log_metrics([body])
        return {}

    def _log_batch(self, body: dict[str, Any]) -> dict[str, Any]:
        self._log_metrics(_items(body, "metrics"))
        self._log_params(_items(body, "params"))
        self._set_tags(_items(body, "tags"))
        return {}

    def _log_metrics(self, items: list[dict[str, Any]]) -> None:
        rows = []
        for item in items:
            key, step, stamp = _text(item, "key"), _whole(item, "step"), _whole(item, "timestamp")
            rows.append([key, step, as_value(item.get("value")), stamp / 1000])
            if key in self._metrics or len(self._metrics) < MAX_ENTRIES:
                self._metrics[key] = {"key": key, "value": item.get("value"), "timestamp": stamp, "step": step}
        if rows:
            self._on_metrics(rows)

    def _log_params(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        params: dict[str, str] = {}
        changed: dict[str, str] = {}
        for item in items:
            key, value = _text(item, "key"), str(item.get("value", ""))[:6_000]
            before = params.get(key, self._params.get(key))
            if before is None:
                params[key] = value
            elif before != value:
                changed[f"overnight.attempt-{self._order['number']}.param.{key}"] = value
        if params and len(self._params) < MAX_ENTRIES:
            self._params |= params
            write_json(self._memory, self._params)
        self._tags |= changed
        if params or changed:
            self._on_facts(params, changed)
        return {}

    def _set_tags(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        tags = {_text(item, "key"): str(item.get("value", ""))[:8_000] for item in items}
        new = {key: value for key, value in tags.items() if self._tags.get(key) != value}
        if len(self._tags) < MAX_ENTRIES:
            self._tags |= new
        if new:
            self._on_facts({}, new)
        return {}

    def _history(self, body: dict[str, Any]) -> dict[str, Any]:
        latest = self._metrics.get(str(body.get("metric_key")))
        return {"metrics": [latest] if latest else []}


def _items(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = body.get(name) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise HttpError(400, f"{name} is not a list of objects", "INVALID_PARAMETER_VALUE")
    return items


def _text(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 250:
        raise HttpError(400, f"{name} must be a text of 1 to 250 characters", "INVALID_PARAMETER_VALUE")
    return value


def _whole(item: dict[str, Any], name: str) -> int:
    try:
        return int(item.get(name) or 0)
    except (TypeError, ValueError):
        raise HttpError(400, f"{name} is no whole number", "INVALID_PARAMETER_VALUE") from None
