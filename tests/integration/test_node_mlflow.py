"""The supervisor's MLflow endpoint against the real client, as a script uses it."""

import json
from collections.abc import Iterator
from typing import Any

import node_lab
import pytest

SCRIPT = """
import os, sys, time
import mlflow
RUN_ID = os.environ["MLFLOW_RUN_ID"]
from mlflow.entities import Metric, Param, RunTag
mlflow.set_experiment("quite another experiment")
with mlflow.start_run() as run:
    assert run.info.run_id == RUN_ID, run.info
    mlflow.log_metric("loss", 0.5, step=1)
    mlflow.log_metrics({"loss": 0.25, "acc": float("nan")}, step=2)
    mlflow.log_params({"width": 64, "lr": "0.5"})
    mlflow.log_param("lr", 0.001)
    mlflow.set_tag("note", "hi")
    client = mlflow.MlflowClient()
    now = int(time.time() * 1000)
    client.log_batch(run.info.run_id, [Metric("val", 0.125, now, 3), Metric("val", 0.0625, now, 4)],
        [Param("optimizer", "adam")], [RunTag("kind", "batch")])
    mlflow.log_dict({"a": 1}, "a.json")
    found = client.get_run(run.info.run_id)
    assert found.data.params["width"] == "64" and found.data.metrics["loss"] == 0.25, found.data
    assert mlflow.active_run().info.run_id == run.info.run_id
    client.set_terminated(run.info.run_id, "FAILED")
    assert len(mlflow.search_runs(output_format="list")) == 1
    assert client.get_experiment_by_name("anything").experiment_id == run.info.experiment_id
    with mlflow.start_run(nested=True, run_name="child"):
        mlflow.log_metric("child", 1.0)
mlflow.log_metric("after", 1.0, step=9)
print("DONE")
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with node_lab.lab() as made:
        made.daemon(cold=True)  # nothing here needs torch
        yield made


def test_the_real_client_is_satisfied_and_everything_is_spooled(lab: Any) -> None:
    lab.script(SCRIPT)
    objective = {"metric": "val", "mode": "min", "reduce": "best", "source": "report", "pattern": None}
    attempt_id = lab.run(
        "train.py", params={"lr": 0.001}, objective={**objective, "evaluator": None}, mlflow_run_id="f" * 32
    )
    report = lab.server.exit_of(attempt_id, 90)
    assert report["exit_codes"] == [0] and "DONE" in lab.log(attempt_id), lab.log(attempt_id)
    rows = {(r[0], r[1]): r[2] for e in lab.server.events(attempt_id, "metrics") for r in e["data"]["rows"]}
    assert rows == {
        ("loss", 1): 0.5, ("loss", 2): 0.25, ("acc", 2): "nan", ("val", 3): 0.125, ("val", 4): 0.0625,
        ("child", 0): 1.0, ("after", 9): 1.0,
    }  # fmt: skip
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    for event in lab.server.events(attempt_id, "mlflow"):
        assert not params.keys() & event["data"]["params"].keys()
        params |= event["data"]["params"]
        tags |= event["data"]["tags"]
    assert params == {"width": "64", "optimizer": "adam"}
    assert tags["overnight.attempt-1.param.lr"] == "0.5"
    assert tags["note"] == "hi" and tags["kind"] == "batch"
    reports = [e["data"] for e in lab.server.events(attempt_id, "report")]
    assert {"step": 4, "values": {"val": 0.0625}} in reports
    artifacts = lab.home.trial_dir(f"tri-{attempt_id[4:]}") / "mlflow-artifacts"
    assert json.loads((artifacts / "a.json").read_text()) == {"a": 1}


def test_the_loopback_port_asks_for_the_token(lab: Any) -> None:
    lab.script("""
import os, urllib.request, urllib.error
for token in ("wrong", os.environ["MLFLOW_TRACKING_TOKEN"]):
    url = os.environ["MLFLOW_TRACKING_URI"] + "/api/2.0/mlflow/runs/get?run_id=x"
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
    try:
        print(urllib.request.urlopen(request).status)
    except urllib.error.HTTPError as error:
        print(error.code)
request = urllib.request.Request(os.environ["MLFLOW_TRACKING_URI"] + "/v1/control", b"{}",
    {"Authorization": "Bearer " + os.environ["MLFLOW_TRACKING_TOKEN"]})
try:
    urllib.request.urlopen(request)
except urllib.error.HTTPError as error:
    print(error.code)
""")
    attempt_id = lab.run("train.py")
    lab.server.exit_of(attempt_id, 60)
    assert lab.log(attempt_id).split() == ["401", "200", "404"]
