"""The line to the supervisor: in order, once, and never in the way."""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from overnight.core.enums import DirectiveAction
from overnight.core.errors import BadInputError
from overnight.trainer.link import Link, wire_number
from overnight.trainer.metrics import Metrics
from overnight.trainer.phases import Ledger


class Supervisor:
    """An HTTP server on a Unix socket that keeps what it gets and long-polls as the contract says."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.directive = {"version": 0, "action": "continue", "grace_seconds": 30.0, "reason": ""}
        self.changed = threading.Condition()
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if supervisor.status == 200:
                    supervisor.received.append((self.path, body))
                self._answer(supervisor.status, {"directive": supervisor.directive})

            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                after, wait = int(query["after"][0]), float(query["wait"][0])
                with supervisor.changed:
                    supervisor.changed.wait_for(lambda: supervisor.directive["version"] != after, min(wait, 1.0))
                self._answer(200, supervisor.directive)

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def get_request(self) -> Any:
                request, _ = super().get_request()
                return request, ("local", 0)

        self._server = Server(self.path, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def tell(self, action: str) -> None:
        with self.changed:
            self.directive = {**self.directive, "version": self.directive["version"] + 1, "action": action}
            self.changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        Path(self.path).unlink(missing_ok=True)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "s.sock")
    yield supervisor
    supervisor.close()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_messages_arrive_in_order_with_metrics_before_what_followed_them(supervisor: Supervisor) -> None:
    link = Link(supervisor.path, rank=0, pid=42)
    link.open()
    link.push(1, "", [["loss", 1, 0.5, 9.0]], {"seconds": {"compute": 1.0}, "counts": {}})
    link.push(2, "", [["loss", 2, 0.4, 9.5]], {"seconds": {"compute": 2.0}, "counts": {"updates": 1}})
    link.send("/v1/report", {"step": 2, "values": {"acc": 0.9}})
    assert link.flush()
    assert [route for route, _ in supervisor.received] == ["/v1/hello", "/v1/push", "/v1/report"]
    hello, push, report = (body for _, body in supervisor.received)
    assert hello == {"rank": 0, "pid": 42, "trainer": True}
    assert push["metrics"] == [["loss", 1, 0.5, 9.0], ["loss", 2, 0.4, 9.5]]
    assert push["ledger"] == {"seconds": {"compute": 3.0}, "counts": {"updates": 1.0}}
    assert (push["step"], report["values"]) == (2, {"acc": 0.9})
    assert link.close()


def test_a_directive_arrives_in_milliseconds(supervisor: Supervisor) -> None:
    link = Link(supervisor.path, 0, 1)
    link.open()
    assert link.flush()
    started = time.monotonic()
    supervisor.tell("yield")
    wait_until(lambda: link.directive.action is DirectiveAction.YIELD)
    assert time.monotonic() - started < 0.5
    link.close()


def test_what_was_said_while_the_supervisor_was_away_arrives_once_it_is_there(tmp_path: Path) -> None:
    link = Link(str(tmp_path / "s.sock"), 0, 1)
    link.open()
    for step in range(5):
        link.push(step, "", [["loss", step, 1.0, 0.0]])
    started = time.monotonic()
    assert not link.flush(30.0)
    assert time.monotonic() - started < 5.0, "an absent supervisor must not hold up a save"
    supervisor = Supervisor(tmp_path / "s.sock")
    try:
        wait_until(lambda: link.flush(1.0))
        rows = [row for _, body in supervisor.received for row in body.get("metrics", [])]
        assert [row[1] for row in rows] == [0, 1, 2, 3, 4]
    finally:
        link.close()
        supervisor.close()


def test_server_errors_are_retried_and_refusals_are_not(supervisor: Supervisor) -> None:
    supervisor.status = 503
    link = Link(supervisor.path, 0, 1)
    link.open()
    assert not link.flush(0.3)
    supervisor.status = 200
    wait_until(lambda: link.flush(1.0))
    assert [route for route, _ in supervisor.received] == ["/v1/hello"]
    supervisor.status = 400
    link.send("/v1/report", {"step": 1, "values": {}})
    wait_until(lambda: link.flush(1.0))
    link.close()


def test_without_a_supervisor_nothing_is_kept() -> None:
    link = Link(None, 0, 1)
    link.open()
    link.push(1, "", [["a", 1, 1.0, 0.0]])
    assert link.flush() and link.close()


def test_numbers_that_json_lacks_travel_as_text(supervisor: Supervisor) -> None:
    assert [wire_number(x) for x in (float("nan"), float("inf"), float("-inf"), 2, 0.5)] == [
        "nan",
        "inf",
        "-inf",
        2,
        0.5,
    ]
    link = Link(supervisor.path, 0, 1)
    link.open()
    Metrics(link, Ledger()).report(3, {"loss": float("nan"), "note": "ok"})
    assert link.flush()
    assert supervisor.received[-1][1]["values"] == {"loss": "nan", "note": "ok"}
    link.close()


@pytest.mark.parametrize("values", [{"x": [1, 2]}, {"x": object()}, {"y" * 300: 1.0}, {"": 1.0}])
def test_what_is_no_metric_is_refused_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        Metrics(Link(None, 0, 1), Ledger()).log(1, values)
