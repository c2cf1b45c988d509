"""The little HTTP/1.1 that supervisors speak: a client with keep-alive, a server for Unix sockets and loopback TCP.

It exists because a user's interpreter has the standard library only, whose HTTP client blocks and whose server is
threaded; a supervisor forks, so it must do neither. JSON bodies, Content-Length or chunked, nothing else.
"""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_HEADERS = 100
ACCEPT_PAUSE_SECONDS = 1.0
"""How long nobody is accepted once there are no descriptors left."""

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


class WireError(OSError):
    """The peer is away, or speaks no HTTP that we understand."""


class HttpError(Exception):
    """What a handler raises to refuse a request.

    Args:
        status: HTTP status.
        message: Why.
        code: Stable code for programs.
    """

    def __init__(self, status: int, message: str, code: str = "bad_input") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


@dataclass(frozen=True)
class Request:
    """A request as a handler sees it; header names are lower-case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        """The body as an object; an empty body is an empty one.

        Raises:
            HttpError: 400, the body is not a JSON object.
        """
        try:
            value = json.loads(self.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise HttpError(400, f"the body is a {type(value).__name__}, not an object")
        return value


Handler = Callable[[Request], Awaitable[tuple[int, Any]]]
"""Answers (status, JSON-able value)."""


async def _read_headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await reader.readline()
        if line in (b"\r\n", b"\n"):
            return headers
        if not line.endswith(b"\n"):
            raise WireError("the connection closed inside the headers")
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise HttpError(400, "too many headers")


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader)
    try:
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise HttpError(400, "Content-Length is no number") from None
    if not 0 <= length <= MAX_BODY_BYTES:
        raise HttpError(413, f"a body is at most {MAX_BODY_BYTES} bytes")
    return await reader.readexactly(length)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        try:
            size = int((await reader.readline()).split(b";")[0], 16)
        except ValueError:
            raise WireError("a chunk without a size") from None
        if size == 0:
            await _read_headers(reader)  # trailers
            return bytes(body)
        if len(body) + size > MAX_BODY_BYTES:
            raise HttpError(413, f"a body is at most {MAX_BODY_BYTES} bytes")
        body += await reader.readexactly(size)
        await reader.readline()


@dataclass
class Server:
    """Serves one handler on any number of listening sockets.

    Attributes:
        handler: Called for each request; an unexpected exception answers 500 and keeps the connection.
    """

    handler: Handler
    _listening: list[socket.socket] = field(default_factory=list)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)
    _answering: set[asyncio.Task[None]] = field(default_factory=set)

    async def listen(self, listening: socket.socket) -> None:
        """Accepts on a bound and listening socket, Unix or TCP."""
        listening.setblocking(False)
        self._listening.append(listening)
        self._watch(listening)

    async def close(self) -> None:
        """Stops accepting and drops every connection."""
        loop = asyncio.get_running_loop()
        listening, self._listening = self._listening, []
        for one in listening:
            loop.remove_reader(one)
            one.close()
        await self._drop()

    async def hear_out(self, seconds: float) -> None:
        """Answers what clients that are gone have still sent, then drops every connection.

        Afterwards no request of theirs can come. Those that wait in a handler have sent nothing more.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._accept_waiting() or self._connections > self._answering:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        self._accept_waiting()
        await self._drop()

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept_waiting)

    def _accept_waiting(self) -> bool:
        """Takes in everybody who waits; each is known from this moment on, which an asyncio server cannot say."""
        accepted = False
        for listening in self._listening:
            try:
                while True:
                    self._begin(listening.accept()[0])
                    accepted = True
            except (BlockingIOError, ConnectionAbortedError):
                pass
            except OSError:  # no descriptors left: to be told at once again would take the whole processor
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(ACCEPT_PAUSE_SECONDS, self._watch, listening)
        return accepted

    def _begin(self, connected: socket.socket) -> None:
        def end(task: asyncio.Task[None]) -> None:
            self._connections.discard(task)
            if task.cancelled():  # before it began
                connected.close()

        task = asyncio.create_task(self._serve(connected))
        self._connections.add(task)
        task.add_done_callback(end)

    async def _drop(self) -> None:
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, connected: socket.socket) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=connected)
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError):
            pass  # the peer left, or we are closing: nobody is there to be told
        finally:
            (connected if writer is None else writer).close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        keep = True
        try:
            method, target, _ = line.decode("latin-1").split(" ", 2)
            headers = await _read_headers(reader)
            keep = headers.get("connection", "").lower() != "close"
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            parts = urlsplit(target)
            body = await _read_body(reader, headers)
            request = Request(method, unquote(parts.path), dict(parse_qsl(parts.query)), headers, body)
        except HttpError as error:
            status, answer, keep = error.status, _refusal(error), False
        else:
            status, answer = await self._answer_tracked(request)
        data = json.dumps(answer, separators=(",", ":")).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        )
        writer.write(head.encode() + (b"" if line.startswith(b"HEAD") else data))
        await writer.drain()
        return keep

    async def _answer_tracked(self, request: Request) -> tuple[int, Any]:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            return await self._answer(request)
        finally:
            self._answering.discard(task)

    async def _answer(self, request: Request) -> tuple[int, Any]:
        try:
            return await self.handler(request)
        except HttpError as error:
            return error.status, _refusal(error)
        except Exception as error:  # a bug here must not cost the trial its supervisor
            return 500, {"error": {"code": "error", "message": f"{type(error).__name__}: {error}"}}


def _refusal(error: HttpError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message}, "error_code": error.code, "message": error.message}


class Client:
    """One connection to one server, kept alive, used by one task at a time.

    Args:
        url: ``http://host:port``, ``https://host`` or ``unix:/path``.
        token: Bearer token, or None.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._token = token
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_seconds: float = 30.0
    ) -> tuple[int, Any]:
        """Sends a request and returns (status, parsed answer).

        A kept connection that the server has closed in the meantime is opened again once; so a request may arrive
        twice.

        Raises:
            WireError: No server there, no answer in time, or an answer that is not JSON over HTTP.
        """
        data = b"" if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        message = self._head(method, path, len(data)) + data
        try:
            async with asyncio.timeout(timeout_seconds):
                reused = self._writer is not None
                try:
                    return await self._exchange(message)
                except (OSError, asyncio.IncompleteReadError):
                    self.close()
                    if not reused:
                        raise
                    return await self._exchange(message)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, HttpError) as error:
            self.close()
            raise WireError(f"{method} {path} at {self._url}: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self.close()  # the answer would be taken for that of the next request
            raise

    def close(self) -> None:
        """Drops the connection; the next request opens a new one."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, message: bytes) -> tuple[int, Any]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await self._connect()
        self._writer.write(message)
        await self._writer.drain()
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("closed without an answer")
        status = int(line.split(b" ", 2)[1])
        headers = await _read_headers(self._reader)
        answer = b"" if status == 204 else await _read_body(self._reader, headers)
        if headers.get("connection", "").lower() == "close":
            self.close()
        return status, json.loads(answer) if answer else None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._url.startswith("unix:"):
            return await asyncio.open_unix_connection(self._url.removeprefix("unix:"))
        parts = urlsplit(self._url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        return await asyncio.open_connection(parts.hostname, port, ssl=secure)

    def _head(self, method: str, path: str, length: int) -> bytes:
        parts = urlsplit(self._url)
        host = "localhost" if self._url.startswith("unix:") else parts.netloc
        lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "accept: application/json", f"content-length: {length}"]
        if length:
            lines.append("content-type: application/json")
        if self._token:
            lines.append(f"authorization: Bearer {self._token}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()
