"""The supervisor's side of a rank's line, for tests that look at what arrives."""

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Supervisor:
    """An HTTP server on a Unix socket that keeps what it gets and long-polls as the contract says."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.directive: dict[str, Any] = {"version": 0, "action": "continue", "grace_seconds": 30.0, "reason": ""}
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

            def handle_error(self, *args: object) -> None:
                pass  # a client that hangs up is what some tests are about

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

    def of(self, route: str) -> list[dict[str, Any]]:
        """Bodies that arrived at a route, in order."""
        return [body for at, body in self.received if at == route]

    @property
    def rows(self) -> list[list[Any]]:
        """Metric rows ``[key, step, value, time]`` in the order of their arrival."""
        return [row for body in self.of("/v1/push") for row in body.get("metrics", [])]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        Path(self.path).unlink(missing_ok=True)
