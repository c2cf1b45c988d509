"""SIGKILL at any moment: what was acknowledged is there, once; what was not may be sent again; everything goes on."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import httpx

from overnight.testing.server import RunningServer, ScriptedNode

NUM_KILLS = 3
NUM_WRITERS = 3


class Persistent:
    """Sends until it is answered, wherever the server is by then."""

    def __init__(self, server: RunningServer, over: threading.Event) -> None:
        self.server = server
        self.over = over
        self.client = httpx.Client(trust_env=False, verify=False, timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def send(self, method: str, path: str, body: Any) -> Any:
        while not self.over.is_set():
            try:
                headers = {"Authorization": f"Bearer {self.server.token}"}
                answer = self.client.request(method, self.server.url + path, content=json.dumps(body), headers=headers)
                if answer.status_code < 500:
                    assert answer.status_code == 200, answer.text
                    return answer.json()
            except (httpx.HTTPError, AssertionError) as error:
                if isinstance(error, AssertionError) and "not listening" not in str(error):
                    raise
            self.over.wait(0.02)
        return None


def proposal(key: str) -> dict[str, Any]:
    config = {"experiment": "storm", "run": {"kind": "script", "target": "t.py"}}
    return {"config": config, "params": {"key": key}, "key": key, "hold": True}


def test_nothing_acknowledged_is_lost_and_nothing_is_doubled(tmp_path: Path) -> None:
    rng = random.Random(7)
    over, failures = threading.Event(), list[BaseException]()
    acknowledged: dict[str, str] = {}
    acked_steps = [0]
    with RunningServer(tmp_path / "home") as server:
        node = ScriptedNode(server.client, 1)
        node.hello()
        run = {"kind": "script", "target": "t.py"}
        answer = server.client.post("/v1/proposals", json={"config": {"experiment": "worker", "run": run}}).json()
        worker = answer["trials"][0]["name"]
        attempt = node.launches()[0]["attempt_id"]
        node.start(attempt)

        def submit(writer: int) -> None:
            with Persistent(server, over) as sender:
                for i in range(100_000):
                    answer = sender.send("POST", "/v1/proposals", proposal(f"{writer}-{i}"))
                    if answer is None:
                        return
                    acknowledged[f"{writer}-{i}"] = answer["trials"][0]["id"]

        def report() -> None:
            with Persistent(server, over) as sender:
                for step in range(1, 100_000):
                    event = {"seq": step + 1, "kind": "metrics", "generation": 1, "at": 1.0}
                    event["data"] = {"rows": [["loss", step, float(step), 1.0]]}
                    post = {"counter": step, "generation": 1, "events": [event]}
                    answer = sender.send("POST", f"/v1/attempts/{attempt}/spool", post)
                    if answer is None:
                        return
                    assert answer["acked"] == step + 1
                    acked_steps[0] = step

        def guarded(work: Any, *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:
                failures.append(error)
                over.set()

        threads = [threading.Thread(target=guarded, args=(submit, i)) for i in range(NUM_WRITERS)]
        threads.append(threading.Thread(target=guarded, args=(report,)))
        for thread in threads:
            thread.start()

        def until_it_goes_on() -> None:
            num_acknowledged, steps = len(acknowledged), acked_steps[0]
            deadline = time.monotonic() + 30
            while (len(acknowledged) < num_acknowledged + 10 or acked_steps[0] < steps + 3) and not over.is_set():
                assert time.monotonic() < deadline, "it does not go on after the restart"
                time.sleep(0.01)

        for _ in range(NUM_KILLS):
            until_it_goes_on()
            time.sleep(rng.uniform(0, 0.3))  # the moment is the test's input, not a wait for something
            server.kill()
            server.start()
        until_it_goes_on()
        over.set()
        for thread in threads:
            thread.join(60)
        assert not failures, failures

        stored = _all_trials(server, "storm")
        by_key = Counter(t["params"]["key"] for t in stored)
        assert max(by_key.values()) == 1, "a proposal was taken twice"
        ids = {t["params"]["key"]: t["id"] for t in stored}
        assert {key: ids.get(key) for key in acknowledged} == acknowledged
        assert len(stored) <= len(acknowledged) + NUM_WRITERS, "only the last of each writer may be unanswered"
        steps = [p["step"] for p in _pages(server, f"/v1/trials/{worker}/metrics")]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) in (acked_steps[0], acked_steps[0] + 1)
        events = _pages(server, "/v1/events", follow="after")
        assert [e["seq"] for e in events] == list(range(1, len(events) + 1)), "events have a gap"
        node.client = server.client
        node.hello(attempts=(attempt,))
        node._seqs[attempt] = len(steps) + 1
        node.exit(attempt)
        done = server.client.get(f"/v1/trials/{worker}").json()
        assert done["state"] == "completed" and len(done["attempts"]) == 1


def _pages(server: RunningServer, path: str, follow: str = "cursor", **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        params = {"limit": 1000} | query | ({follow: cursor} if cursor else {})
        page = server.client.get(path, params=params).json()
        found += page["items"]
        cursor = page["cursor"]
        if not cursor or not page["items"]:
            return found


def _all_trials(server: RunningServer, experiment: str) -> list[dict[str, Any]]:
    return _pages(server, "/v1/trials", experiment=experiment)


def test_a_thousand_proposals_at_once(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "home") as server:
        pid = server.process.pid if server.process else 0
        before = _memory_mb(pid)
        answers: list[tuple[int, float]] = []
        options: dict[str, Any] = {"headers": server.client.headers, "timeout": 60, "trust_env": False, "verify": False}

        def flood(worker: int) -> None:
            with httpx.Client(base_url=server.url, **options) as own:
                for i in range(worker * 50, worker * 50 + 50):
                    began = time.monotonic()
                    status = own.post("/v1/proposals", content=json.dumps(proposal(str(i)))).status_code
                    answers.append((status, time.monotonic() - began))

        workers = [threading.Thread(target=flood, args=(i,)) for i in range(20)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert [status for status, _ in answers] == [200] * 1000
        assert max(seconds for _, seconds in answers) < 10
        items = [proposal(f"batch-{i}") for i in range(1000)]
        batch = server.client.post("/v1/proposals/batch", json={"items": items}).json()["items"]
        assert {item["status"] for item in batch} == {"accepted"} and len(batch) == 1000
        assert server.client.get("/v1/status").json()["trials_by_state"] == {"held": 2000}
        assert _memory_mb(pid) - before < 200


def _memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
