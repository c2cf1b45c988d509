# ruff: noqa: E501 (tables of calls stay on their lines)
"""The HTTP API against a real server process: every route, and every kind of bad call."""

import hashlib
import io
import json
import sqlite3
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from long_poll import LongPoll

from overnight.testing.server import RunningServer, ScriptedNode

OBJECTIVE = {"metric": "acc", "mode": "max"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("home"), OVERNIGHT_LEASE_SECONDS="300") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> httpx.Client:
    return server.client


@pytest.fixture(scope="module")
def node(client: httpx.Client) -> ScriptedNode:
    node = ScriptedNode(client)
    node.hello()
    return node


def config(experiment: str, **more: Any) -> dict[str, Any]:
    return {"experiment": experiment, "run": {"kind": "script", "target": "train.py"}, **more}


def propose(client: httpx.Client, experiment: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings = more.pop("config", {})
    response = client.post("/v1/proposals", json={"config": config(experiment, **settings), "params": params, **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def trial(client: httpx.Client, ref: str) -> dict[str, Any]:
    response = client.get(f"/v1/trials/{ref}")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["code"] == code, found
    assert set(found) == {"code", "message", "hint", "retryable", "details"}
    assert "Traceback" not in response.text
    return found


# -- who may call ------------------------------------------------------------------------------------------------------


def test_health_needs_no_token_and_everything_else_does(server: RunningServer, client: httpx.Client) -> None:
    health = httpx.get(f"{server.url}/v1/health", trust_env=False).json()
    assert health["status"] == "ok" and health["home"] == str(server.home.root)
    paths = client.get("/v1/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            if path != "/v1/health":
                answer = httpx.request(method, server.url + path.replace("{", "").replace("}", ""), trust_env=False)
                assert answer.status_code == 401, (method, path)


def test_a_wrong_token_is_refused(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer " + "x" * 43}
    answer = httpx.get(f"{server.url}/v1/status", headers=headers, trust_env=False)
    error(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:80", ""])
def test_a_page_that_rebinds_its_name_is_refused(client: httpx.Client, host: str) -> None:
    error(client.get("/v1/status", headers={"Host": host}), 403, "forbidden")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:7"])
def test_names_of_this_machine_pass(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/health", headers={"Host": host}).status_code == 200


# -- bad calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"{", "invalid_params", "not JSON"),
        (b'{"a": 1, "a": 2}', "invalid_params", "'a' comes twice"),
        (b'{"params": {"lr": NaN}}', "invalid_params", "NaN"),
        (b'{"params": {"lr": -Infinity}}', "invalid_params", "Infinity"),
        (b"[]", "invalid_spec", "got []"),
        (b"7", "invalid_spec", "got 7"),
        (b"", "invalid_spec", "config"),
        (b"\xff\xfe", "invalid_params", "not JSON"),
        (b"[" * 100_000, "invalid_params", "not JSON"),
        (b'{"config": {"experiment": "e"}}', "invalid_spec", "config.run: Field required"),
        (b'{"config": {"experiment": "../x", "run": {"kind": "script", "target": "t"}}}', "invalid_spec", "'../x'"),
        (b'{"config": {"experiment": "e", "run": {"kind": "jar", "target": "t"}}}', "invalid_spec", "'jar'"),
        (b'{"config": {"experiment": "e", "run": {"kind": "script", "target": "t"}, "gpu": 1}}', "invalid_spec", "gpu"),
        (b'{"config": {"experiment": "e", "run": {"kind": "script", "target": "t"}}, "replicates": 0}', "invalid_spec", "0"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value)[:30],
)  # fmt: skip
def test_a_bad_proposal_names_the_field_and_the_value(client: httpx.Client, body: bytes, code: str, words: str) -> None:
    found = error(client.post("/v1/proposals", content=body), 422, code)
    assert words in found["message"]
    assert len(found["message"]) < 1000


def test_params_beyond_the_canonical_form_are_refused(client: httpx.Client) -> None:
    for params, words in [
        ({"n": 2**64}, "64 bits"),
        ({"a": {"b": "x" * 300_000}}, "256 KiB"),
        ({"e\u0301": 1, "\u00e9": 2}, "twice"),
    ]:
        body = {"config": config("canon"), "params": params}
        assert words in error(client.post("/v1/proposals", json=body), 422, "invalid_params")["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
        ("DELETE", "/v1/trials", 405),
        ("GET", "/v1/trials/none-1", 404),
        ("GET", "/v1/trials/%2e%2e%2f%2e%2e%2fetc", 404),
        ("GET", "/v1/trials/none-1/logs", 404),
        ("GET", "/v1/trials/none-1/why", 404),
        ("GET", "/v1/trials/none-1/metrics", 404),
        ("POST", "/v1/trials/none-1/cancel", 404),
        ("GET", "/v1/experiments/none", 404),
        ("GET", "/v1/experiments/none/leaderboard", 404),
        ("GET", "/v1/experiments/none/digest", 404),
        ("GET", "/v1/sweeps/none", 404),
        ("GET", "/v1/wait?trial=none-1", 404),
        ("GET", "/v1/events?trial=none-1", 404),
        ("POST", "/v1/nodes/none/reports", 422),
        ("GET", "/v1/nodes/none/work", 404),
        ("GET", "/v1/attempts/none/directive", 404),
        ("GET", "/v1/trials?limit=0", 422),
        ("GET", "/v1/trials?limit=x", 422),
        ("GET", "/v1/trials?state=sleeping", 422),
        ("GET", "/v1/trials?cursor=%00", 422),
        ("GET", "/v1/wait", 422),
        ("GET", "/v1/wait?trial=a&wait=nan", 422),
        ("GET", "/v1/events?after=-1", 422),
    ],
)  # fmt: skip
def test_unknown_things_and_bad_queries(client: httpx.Client, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status, answer.text
    assert "error" in answer.json() and "Traceback" not in answer.text


def test_a_body_that_is_too_large_is_refused_without_reading_it_all(client: httpx.Client) -> None:
    error(client.post("/v1/proposals", content=b" " * (17 * 2**20)), 413, "body_too_large")

    def endless() -> Iterator[bytes]:
        for _ in range(18):
            yield b" " * 2**20

    error(client.post("/v1/proposals", content=endless()), 413, "body_too_large")
    assert client.get("/v1/health").status_code == 200


def test_an_error_of_our_own_is_told_with_an_id_that_is_in_the_log(server: RunningServer, client: httpx.Client) -> None:
    """A row that an older or newer program has broken is the kind of surprise that no check foresees."""
    name = propose(client, "broken", {"x": 1}, hold=True)["trials"][0]["name"]
    set_config(server, name, "{}")
    found = error(client.get(f"/v1/trials/{name}"), 500, "error")
    assert found["details"]["id"] in found["hint"]
    assert f"internal error {found['details']['id']}" in server.log
    set_config(server, name, json.dumps(config("broken")))


def set_config(server: RunningServer, name: str, text: str) -> None:
    with closing(sqlite3.connect(server.home.root / "overnight.db", timeout=10)) as conn, conn:
        conn.execute("update trials set config = ? where name = ?", (text, name))


def test_openapi_describes_every_route(client: httpx.Client) -> None:
    schema = client.get("/v1/openapi.json").json()
    refs = set(_refs(schema))
    assert refs <= set(schema["components"]["schemas"]), "a reference leads nowhere"
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), (method, path)
            if method == "post":
                assert "requestBody" in operation, path


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].rpartition("/")[2]
        for item in value.values():
            yield from _refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)


# -- proposals ---------------------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_answer_and_another_body_is_refused(client: httpx.Client) -> None:
    first = propose(client, "keys", {"a": 1}, key="k1", hold=True)
    assert first["status"] == "accepted"
    again = propose(client, "keys", {"a": 1}, key="k1", hold=True)
    assert [t["id"] for t in again["trials"]] == [t["id"] for t in first["trials"]]
    body = {"config": config("keys"), "params": {"a": 2}, "key": "k1", "hold": True}
    error(client.post("/v1/proposals", json=body), 409, "key_reused")


def test_the_same_configuration_is_the_same_trial(client: httpx.Client) -> None:
    first = propose(client, "twins", {"lr": 1, "n": -0.0}, hold=True)
    again = propose(client, "twins", {"n": 0, "lr": 1.0}, hold=True)
    assert again["status"] == "duplicate"
    assert again["trials"][0]["id"] == first["trials"][0]["id"]


def test_a_dry_run_answers_and_stores_nothing(client: httpx.Client) -> None:
    answer = propose(client, "dry", {"a": 1}, dry_run=True)
    assert answer["status"] == "accepted"
    error(client.get("/v1/experiments/dry"), 404, "not_found")


def test_more_devices_than_there_are_is_refused_at_once(client: httpx.Client, node: ScriptedNode) -> None:
    body = {"config": config("big", compute={"gpus": 5}), "params": {}}
    found = error(client.post("/v1/proposals", json=body), 422, "unsatisfiable")
    assert "4" in found["message"] and "5" in found["message"]
    body = {"config": config("big", compute={"gpus": 1, "type": ["h100"]}), "params": {}}
    assert "h100" in error(client.post("/v1/proposals", json=body), 422, "unsatisfiable")["message"]
    error(client.get("/v1/experiments/big"), 404, "not_found")


def test_an_unknown_sweep_or_snapshot_is_refused(client: httpx.Client) -> None:
    body = {"config": config("none"), "params": {}, "sweep_id": "swp-none"}
    error(client.post("/v1/proposals", json=body), 404, "not_found")
    body = {"config": config("none", code="a" * 64), "params": {}}
    assert "a" * 64 in error(client.post("/v1/proposals", json=body), 404, "not_found")["message"]


def test_in_a_batch_each_gets_its_own_answer(client: httpx.Client) -> None:
    items = [
        {"config": config("batch"), "params": {"i": 0}, "hold": True},
        {"config": config("batch", compute={"gpus": 9_999}), "params": {}, "hold": True},
        {"config": config("batch", code="b" * 32), "params": {}, "hold": True},
        {"config": config("batch"), "params": {"i": 0}, "hold": True},
        {"config": config("batch"), "params": {"i": 1}, "hold": True, "dry_run": True},
        {"config": config("batch"), "params": {"i": 2}, "hold": True},
    ]
    answers = client.post("/v1/proposals/batch", json={"items": items}).json()["items"]
    assert [a.get("status") or a["error"]["code"] for a in answers] == [
        "accepted", "unsatisfiable", "not_found", "duplicate", "accepted", "accepted",
    ]  # fmt: skip
    assert len(client.get("/v1/trials", params={"experiment": "batch"}).json()["items"]) == 2


def test_hostile_text_is_stored_as_given(client: httpx.Client) -> None:
    text = "[/bold] \x1b]0;title\x07 \u202e evil <script> '; drop table trials; -- 😀\n"
    answer = propose(client, "text", {text: text}, note=text, hold=True)
    assert trial(client, answer["trials"][0]["name"])["params"] == {text: text}


# -- a trial's way -----------------------------------------------------------------------------------------------------


def test_a_trial_from_proposal_to_the_leaderboard(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "digits", {"lr": 0.1}, config={"objective": OBJECTIVE})["trials"][0]["name"]
    order = node.launches()[0]
    assert order["trial_name"] == name and order["params"] == {"lr": 0.1}
    assert order["mtbf_seconds"] > 0, "what is known of the failures of its devices"
    attempt = order["attempt_id"]
    node.start(attempt)
    assert trial(client, name)["state"] == "running"
    node.spool(
        attempt,
        ("metrics", {"rows": [["loss", 1, 2.0, 1.0], ["loss", 2, "nan", 2.0]]}),
        ("report", {"step": 2, "values": {"acc": 0.9}}),
        ("progress", {"step": 2, "phase": "train"}),
    )
    now = trial(client, name)
    assert (now["value"], now["step"]) == (0.9, 2)
    points = client.get(f"/v1/trials/{name}/metrics", params={"key": "loss"}).json()["items"]
    assert [(p["step"], p["value"], p["text"]) for p in points] == [(1, 2.0, None), (2, None, "nan")]
    node.exit(attempt)
    done = trial(client, name)
    assert (done["state"], done["value"]) == ("completed", 0.9)
    assert [a["outcome"] for a in done["attempts"]] == ["completed"]
    assert done["attempts"][0]["lease_state"] == "clean"
    board = client.get("/v1/experiments/digits/leaderboard").json()
    assert [(row["trial"], row["value"]) for row in board["rows"]] == [(name, 0.9)]
    digest = client.get("/v1/experiments/digits/digest").json()
    assert digest["best"][0]["trial"] == name and digest["recent"][0]["trial"] == name
    states = [e["after"] for e in events_of(client, name) if e["before"] is not None and e["trial_id"]]
    assert states == ["starting", "running", "completed"]


def events_of(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get("/v1/events", params={"trial": name}).json()["items"]
    return items


def test_an_objective_that_never_came_fails_the_trial_with_its_last_lines(
    client: httpx.Client, node: ScriptedNode
) -> None:
    name = propose(client, "silent", {}, config={"objective": OBJECTIVE})["trials"][0]["name"]
    attempt = node.launches()[0]["attempt_id"]
    node.start(attempt)
    node.exit(attempt, 0, last_lines=["epoch 1", "done"])
    failed = trial(client, name)
    assert failed["state"] == "failed"
    assert "'acc' was never reported" in failed["error"]["message"]
    assert failed["error"]["last_lines"] == ["epoch 1", "done"]
    causes = client.get("/v1/experiments/silent/digest").json()["failures"]
    assert causes[0]["trials"] == 1 and causes[0]["example"] == name


def test_an_exception_is_shown(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "raises", {})["trials"][0]["name"]
    attempt = node.launches()[0]["attempt_id"]
    node.start(attempt)
    told = {"type": "ValueError", "message": "boom", "traceback": "Trace…", "step": 3}
    node.exit(attempt, 1, error=told, last_lines=["ValueError: boom"])
    failed = trial(client, name)
    assert failed["state"] == "failed" and failed["state_cause"] == "ValueError: boom at step 3"
    assert failed["error"]["traceback"] == "Trace…" and failed["error"]["last_lines"] == ["ValueError: boom"]
    again = client.post(f"/v1/trials/{name}/rerun", json={"reason": "fixed"}).json()
    assert again["state"] in ("queued", "starting")
    attempt = node.launches()[0]["attempt_id"]
    node.start(attempt)
    node.exit(attempt)
    assert trial(client, name)["state"] == "completed"


def test_an_infrastructure_fault_is_retried_elsewhere(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "fault", {})["trials"][0]["name"]
    order = node.launches()[0]
    node.start(order["attempt_id"])
    node.exit(order["attempt_id"], -9)
    waiting = trial(client, name)
    assert waiting["state"] == "queued" and waiting["retries_used"] == 1
    assert waiting["attempts"][0]["outcome"] == "infra_fault"
    second = node.launches()[0]
    assert second["devices"][0]["id"] != order["devices"][0]["id"], "it must run elsewhere"
    node.report(ended=[{"attempt_id": second["attempt_id"], "vanished": True, "cause": "its supervisor is gone"}])
    gone = trial(client, name)
    assert gone["attempts"][1]["outcome"] == "vanished" and gone["retries_used"] == 2
    client.post(f"/v1/trials/{name}/cancel", json={})
    assert trial(client, name)["state"] == "cancelled"


def test_a_launch_that_cannot_be_made(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "nolaunch", {})["trials"][0]["name"]
    attempt = node.launches()[0]["attempt_id"]
    failed = {"attempt_id": attempt, "user": True, "type": "ScriptError", "message": "train.py is missing"}
    node.report(failed=[failed])
    node.report(failed=[failed])  # a report may come twice
    shown = trial(client, name)
    assert shown["state"] == "failed" and shown["error"]["message"] == "train.py is missing"
    assert shown["attempts"][0]["lease_state"] == "clean"


def test_cancel_reaches_the_worker_at_once(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "cancel", {})["trials"][0]["name"]
    attempt = node.launches()[0]["attempt_id"]
    node.start(attempt)
    listener = LongPoll(client, f"/v1/attempts/{attempt}/directive", after=0, wait=20).until_arrived()
    asked_at = time.monotonic()
    assert client.post(f"/v1/trials/{name}/cancel", json={"reason": "no use"}).json()["state"] == "stopping"
    directive = listener.until_answered().json()
    assert directive["action"] == "stop" and directive["reason"] == "cancelled"
    assert listener.answered_at - asked_at < 0.2
    assert node.spool(attempt)["directive"] == directive, "every heartbeat's answer repeats it"
    node.exit(attempt, 0, left="stop", saved=True)
    assert trial(client, name)["state"] == "cancelled"
    assert client.get(f"/v1/attempts/{attempt}/directive").json()["reason"] == "stale"


def test_a_stale_worker_is_refused(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "stale", {})["trials"][0]["name"]
    attempt = node.launches()[0]["attempt_id"]
    node.start(attempt)
    node.report(ended=[{"attempt_id": attempt, "vanished": True}])
    late = node.post_spool(attempt, ("metrics", {"rows": [["loss", 1, 0.1, 1.0]]}))
    error(late, 409, "stale_attempt")
    assert client.get(f"/v1/trials/{name}/metrics").json()["items"] == []
    client.post(f"/v1/trials/{name}/cancel", json={})


def test_an_answer_that_was_lost_is_given_again(client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "twice", {})["trials"][0]["name"]
    attempt = node.launches()[0]["attempt_id"]
    node.start(attempt)
    events = [("metrics", {"rows": [["loss", 1, 0.1, 1.0]]}), ("exit", {"exit_codes": [0]})]
    first = node.post_spool(attempt, *events, first=2).json()
    again = node.post_spool(attempt, *events, first=2).json()
    assert first["acked"] == again["acked"] == 3
    assert len(client.get(f"/v1/trials/{name}/metrics").json()["items"]) == 1
    node.report(ended=[{"attempt_id": attempt}])
    assert [a["outcome"] for a in trial(client, name)["attempts"]] == ["completed"]


def test_hold_unhold_bump_and_the_queue(client: httpx.Client, node: ScriptedNode) -> None:
    busy = [propose(client, "busy", {"i": i})["trials"][0]["name"] for i in range(4)]
    attempts = [order["attempt_id"] for order in node.launches(4)]
    first, second = (propose(client, "line", {"i": i})["trials"][0]["name"] for i in range(2))
    assert [t["name"] for t in client.get("/v1/queue").json()["items"]][:2] == [first, second]
    why = client.get(f"/v1/trials/{second}/why").json()
    assert why["state"] == "queued" and why["reason"]
    client.post(f"/v1/trials/{second}/bump", json={"reason": "urgent"})
    assert [t["name"] for t in client.get("/v1/queue").json()["items"]][:2] == [second, first]
    assert client.post(f"/v1/trials/{first}/hold", json={}).json()["state"] == "held"
    assert client.post(f"/v1/trials/{first}/unhold", json={}).json()["state"] == "queued"
    error(client.post(f"/v1/trials/{busy[0]}/hold", json={}), 409, "illegal_transition")
    error(client.post(f"/v1/trials/{first}/hold", json={"because": 1}), 422, "invalid_spec")
    for name in (first, second):
        client.post(f"/v1/trials/{name}/cancel", json={})
    for attempt in attempts:
        node.start(attempt)
        node.exit(attempt)


def test_wait_answers_when_the_first_ends(client: httpx.Client, node: ScriptedNode) -> None:
    names = [propose(client, "wait", {"i": i}, hold=True)["trials"][0]["name"] for i in range(2)]
    assert client.get("/v1/wait", params={"trial": names, "wait": 0.05}).json()["items"] == []
    url = client.base_url.join(f"/v1/trials/{names[1]}/cancel")
    timer = threading.Timer(
        0.2,
        lambda: httpx.post(url, headers={"Authorization": client.headers["Authorization"]}, json={}, trust_env=False),
    )
    timer.start()
    began = time.monotonic()
    answer = client.get("/v1/wait", params={"trial": names, "wait": 30}).json()["items"]
    assert [t["name"] for t in answer] == [names[1]]
    assert time.monotonic() - began < 5
    timer.join()


# -- devices, nodes, status --------------------------------------------------------------------------------------------


def test_devices_are_taken_out_and_back_with_a_reason(client: httpx.Client, node: ScriptedNode) -> None:
    device = client.get("/v1/devices").json()["items"][3]
    path = f"/v1/devices/{device['id']}"
    error(client.post(f"{path}/quarantine", json={"reason": "  "}), 422, "bad_input")
    assert client.post(f"{path}/quarantine", json={"reason": "smells"}).json()["state"] == "quarantined"
    assert client.get("/v1/devices").json()["items"][3]["cause"] == "smells"
    assert client.post(f"{path}/drain", json={"reason": "later"}).json()["state"] == "draining"
    assert client.post(f"{path}/release", json={"reason": "aired"}).json()["state"] == "healthy"
    error(client.post("/v1/devices/none/drain", json={"reason": "x"}), 404, "not_found")


def test_status_and_lists(client: httpx.Client, node: ScriptedNode) -> None:
    status = client.get("/v1/status").json()
    assert len(status["devices"]) == 4 and status["nodes"][0]["name"] == "box" and status["nodes"][0]["connected"]
    assert client.get("/v1/nodes").json()["items"][0]["id"] == node.id
    assert {e["name"] for e in client.get("/v1/experiments").json()["items"]} >= {"digits", "silent"}
    page = client.get("/v1/trials", params={"limit": 2}).json()
    assert len(page["items"]) == 2 and page["cursor"]
    following = client.get("/v1/trials", params={"limit": 2, "cursor": page["cursor"]}).json()
    assert not {t["id"] for t in page["items"]} & {t["id"] for t in following["items"]}
    completed = client.get("/v1/trials", params={"state": ["completed", "failed"]}).json()["items"]
    assert {t["state"] for t in completed} <= {"completed", "failed"}


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_logs_from_any_byte_on(server: RunningServer, client: httpx.Client, node: ScriptedNode) -> None:
    name = propose(client, "logs", {})["trials"][0]["name"]
    error(client.get(f"/v1/trials/{name}/logs", params={"attempt": 7}), 404, "not_found")
    order = node.launches()[0]
    path = server.home.attempt_dir(order["trial_id"], 1) / "out.log"
    path.parent.mkdir(parents=True)
    path.write_text("one\ntwo\n")
    chunk = client.get(f"/v1/trials/{name}/logs").json()
    assert chunk == {"attempt": 1, "offset": 0, "next_offset": 8, "text": "one\ntwo\n", "end": False}
    assert client.get(f"/v1/trials/{name}/logs", params={"offset": -4}).json()["text"] == "two\n"
    threading.Timer(0.2, append, [path, "three\n"]).start()
    more = client.get(f"/v1/trials/{name}/logs", params={"offset": 8, "wait": 20}).json()
    assert more["text"] == "three\n"
    threading.Timer(0.2, node.exit, [order["attempt_id"]]).start()
    last = client.get(f"/v1/trials/{name}/logs", params={"offset": 14, "wait": 20}).json()
    assert last["end"] and last["text"] == ""


# -- events ------------------------------------------------------------------------------------------------------------


def read_stream(
    client: httpx.Client, count: int, last: int | None = None, opened: threading.Event | None = None
) -> list[int]:
    found: list[int] = []
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    with client.stream("GET", "/v1/events", headers={"Accept": "text/event-stream"} | headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if opened is not None:
                opened.set()
            if line.startswith("id: "):
                found.append(int(line[4:]))
            if len(found) >= count:
                return found
    return found


def test_a_stream_goes_on_where_it_broke(client: httpx.Client) -> None:
    first = read_stream(client, 5)
    assert first == [1, 2, 3, 4, 5], "events are numbered without gaps"
    assert read_stream(client, 3, last=3) == [4, 5, 6]
    error(client.get("/v1/events", headers={"Accept": "text/event-stream", "Last-Event-ID": "x"}), 422, "invalid_spec")


def test_a_stream_tells_of_a_commit_at_once(client: httpx.Client) -> None:
    last = client.get("/v1/events", params={"limit": 1000}).json()["items"][-1]["seq"]
    found, opened = list[int](), threading.Event()
    reader = threading.Thread(target=lambda: found.extend(read_stream(client, 1, last, opened)))
    reader.start()
    assert opened.wait(20)
    with httpx.Client(base_url=client.base_url, headers=client.headers, trust_env=False) as other:
        propose(other, "streamed", {"x": 1}, hold=True)
        reader.join(10)
    assert found == [last + 1]


def test_pages_of_events_long_poll(client: httpx.Client) -> None:
    page = client.get("/v1/events", params={"after": 0, "limit": 2}).json()
    assert [e["seq"] for e in page["items"]] == [1, 2] and page["cursor"] == "2"
    last = client.get("/v1/events", params={"limit": 1000}).json()["items"][-1]["seq"]
    began = time.monotonic()
    assert client.get("/v1/events", params={"after": last, "wait": 0.1}).json()["items"] == []
    assert 0.09 < time.monotonic() - began < 5


# -- code --------------------------------------------------------------------------------------------------------------


def test_code_is_uploaded_once_and_verified(server: RunningServer, client: httpx.Client) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("train.py")
        info.size = 8
        tar.addfile(info, io.BytesIO(b"print(1)"))
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    assert client.head(f"/v1/code/{digest}").status_code == 404
    error(client.put(f"/v1/code/{'0' * 64}", content=data), 422, "bad_input")
    error(client.put("/v1/code/..%2Fx", content=data), 404, "not_found")
    assert client.put(f"/v1/code/{digest}", content=data).json() == {"hash": digest, "stored": True}
    assert client.put(f"/v1/code/{digest}", content=data).json() == {"hash": digest, "stored": False}
    assert client.head(f"/v1/code/{digest}").status_code == 200
    assert (server.home.code_dir(digest) / "train.py").read_text() == "print(1)"
    assert propose(client, "coded", {}, config={"code": digest}, hold=True)["status"] == "accepted"
