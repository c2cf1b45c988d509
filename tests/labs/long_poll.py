"""Requests that wait at the server: a test may go on as soon as one has arrived there, not some time later."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx

DEADLINE_SECONDS = 20.0
_ESTABLISHED = "01"


class LongPoll:
    """A request in a thread and with a connection of its own.

    Args:
        like: A client of the same server.
        path: What is asked for.
        params: Of the query.
    """

    def __init__(self, like: httpx.Client, path: str, **params: Any) -> None:
        self.response: httpx.Response | None = None
        self.answered_at = 0.0
        self._port = 0
        self._sent = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(like, path, params), daemon=True)
        self._thread.start()

    def _ask(self, like: httpx.Client, path: str, params: dict[str, Any]) -> None:
        with httpx.Client(base_url=like.base_url, headers=like.headers, timeout=60, trust_env=False) as own:
            response = own.get(path, params=params, extensions={"trace": self._trace})
            self.answered_at = time.monotonic()
            self.response = response

    def _trace(self, name: str, info: dict[str, Any]) -> None:
        if name == "connection.connect_tcp.complete":
            self._port = info["return_value"].get_extra_info("client_addr")[1]
        elif name == "http11.send_request_body.complete":
            self._sent.set()

    def until_arrived(self) -> "LongPoll":
        """Waits until the server has read all of it."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        assert self._sent.wait(DEADLINE_SECONDS), "it was not even sent"
        while not _is_read(self._port):
            assert time.monotonic() < deadline, "the server does not read it"
            time.sleep(0.002)
        return self

    def until_answered(self) -> httpx.Response:
        """Waits for the answer."""
        self._thread.join(DEADLINE_SECONDS)
        assert self.response is not None, "no answer"
        return self.response


def _is_read(port: int) -> bool:
    """Whether nothing from this port of ours lies unread at the other end (proc_net_tcp: remote, state, queues)."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[2].rpartition(":")[2], 16) == port and words[3] == _ESTABLISHED:
            return int(words[4].rpartition(":")[2], 16) == 0
    return False
