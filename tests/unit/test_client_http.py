"""The client over real HTTP: a small server that misbehaves on demand."""

import asyncio
import json
import os
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight import AsyncClient, Client
from overnight.agents import connect
from overnight.agents.retrying import RetryPolicy
from overnight.agents.sse import SseParser
from overnight.core import errors
from overnight.core.models.api import Event, ProposalIn
from overnight.core.models.spec import Command, TrialConfig
from overnight.core.settings import Settings

PATIENT = RetryPolicy(patience_seconds=5.0, stranger_seconds=5.0, base_seconds=0.01, max_seconds=0.02)
NOW = "2026-11-29T12:00:00Z"


def trial(name="a-1", state="running", attempts_made=1, **more):
    return {
        "id": f"tri-{name}", "name": name, "number": 1, "experiment": "a", "sweep_id": None, "proposal_id": "prop-1",
        "config": {"experiment": "a", "run": {"kind": "script", "target": "x.py"}}, "params": {}, "config_hash": "h",
        "replicate": 0, "state": state, "state_cause": "", "priority": "normal", "rank": 0, "value": None, "step": 0,
        "attempts_made": attempts_made, "retries_used": 0, "preemptions": 0, "mlflow_run_id": None, "created_at": NOW,
        "started_at": None, "ended_at": None,
    } | more  # fmt: skip


def event(seq):
    return {
        "seq": seq, "at": NOW, "actor": "x", "kind": "trial", "subject": "s\u2028\x85", "trial_id": None,
        "attempt_id": None, "before": None, "after": None, "cause": "", "data": {},
    }  # fmt: skip


class Scripted(ThreadingHTTPServer):
    """Answers with what ``answer(request)`` returns; keeps every request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = lambda request: (200, {})
        self.seen = []
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self):
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        length = int(self.headers.get("Content-Length") or 0)
        request = {
            "method": self.command,
            "path": self.path,
            "headers": dict(self.headers),
            "body": self.rfile.read(length),
        }
        self.server.seen.append(request)
        answer = self.server.answer(request)
        if answer is None:  # hang up without a word
            self.close_connection = True
            return
        status, body = answer
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    scripted = Scripted()
    yield scripted
    scripted.stop()


@pytest.fixture
def home(tmp_path):
    return Settings(home=tmp_path, token="secret")


@pytest.fixture
def client(server, home):
    with Client(home, server=server.url, retry=PATIENT) as made:
        yield made


def proposal(**more):
    run = Command(kind="script", target="x.py")
    return ProposalIn(config=TrialConfig(experiment="a", run=run), params={"lr": 0.1}, **more)


ACCEPTED = {"id": "prop-1", "status": "accepted", "hint": "", "trials": []}


def test_every_async_method_has_its_twin():
    sync = {name for name in dir(Client) if not name.startswith("_")} - {"close"}
    other = {name for name in dir(AsyncClient) if not name.startswith("_")} - {"aclose"}
    assert sync == other


def test_the_token_is_sent_and_never_shown(client, server):
    server.answer = lambda request: (200, {"items": [], "cursor": None})
    assert client.trials(state=["running", "queued"], limit=5).items == ()
    assert server.seen[0]["headers"]["Authorization"] == "Bearer secret"
    assert server.seen[0]["path"] == "/v1/trials?state=running&state=queued&limit=5"
    assert "secret" not in repr(client.address) + repr(client.settings)


def test_errors_come_back_as_their_class(client, server):
    sent = errors.UnsatisfiableError("too many", hint="ask for less", most=4)
    server.answer = lambda request: (422, {"error": sent.to_dict()})
    with pytest.raises(errors.UnsatisfiableError) as caught:
        client.propose(proposal())
    assert (caught.value.message, caught.value.hint, caught.value.details) == ("too many", "ask for less", {"most": 4})


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (401, errors.UnauthorizedError),
        (404, errors.NotFoundError),
        (422, errors.BadInputError),
        (500, errors.OvernightError),
    ],
)
def test_answers_of_something_else_are_errors_too(client, server, status, cls):
    server.answer = lambda request: (status, b"<html>[/bold] nope</html>")
    with pytest.raises(cls, match=str(status)):
        client.status()


@pytest.mark.parametrize("body", [b"", b"[1", b"{}", b"null", b'{"id": 3}', b"\xff\xfe"])
def test_an_answer_of_another_version_says_so(client, server, body):
    server.answer = lambda request: (200, body)
    with pytest.raises(errors.OvernightError, match="not what this client expects"):
        client.trial("a-1")


@pytest.mark.parametrize("ref", ["", ".", "..", "../x", "a/b", "/"])
def test_a_name_that_would_change_the_route_is_not_sent(client, server, ref):
    with pytest.raises(errors.NotFoundError, match="there is no trial"):
        client.trial(ref)
    with pytest.raises(errors.NotFoundError) as caught:
        client.stop_sweep(ref)
    assert "overnight sweep --list" in caught.value.hint
    assert server.seen == []


def test_odd_names_are_quoted(client, server):
    server.answer = lambda request: (200, trial())
    client.trial("x?y#z aü")
    assert server.seen[0]["path"] == "/v1/trials/x%3Fy%23z%20a%C3%BC"


def test_a_submit_is_sent_again_with_the_same_key(client, server):
    answers = iter([None, (503, {"error": errors.StoreBusyError("busy").to_dict()}), None, (200, ACCEPTED)])
    server.answer = lambda request: next(answers)
    assert client.propose(proposal()).id == "prop-1"
    keys = {json.loads(request["body"])["key"] for request in server.seen}
    assert len(server.seen) == 4
    assert len(keys) == 1
    assert len(keys.pop()) == 32


def test_a_given_key_stays(client, server):
    server.answer = lambda request: (200, ACCEPTED)
    client.propose(proposal(key="mine"))
    assert json.loads(server.seen[0]["body"])["key"] == "mine"


def test_what_cannot_be_repeated_is_not(client, server):
    server.answer = lambda request: None
    with pytest.raises(errors.ServerAwayError, match="no answer"):
        client.rerun("a-1")
    assert len(server.seen) == 1


def test_errors_that_are_not_retryable_are_raised_at_once(client, server):
    server.answer = lambda request: (409, {"error": errors.KeyReusedError("key").to_dict()})
    with pytest.raises(errors.KeyReusedError):
        client.propose(proposal())
    assert len(server.seen) == 1


def test_whoever_listens_hears_what_is_waited_for(server, home):
    server.answer = lambda request: (503, {"error": errors.StoreFullError("no space").to_dict()})
    now, heard = [0.0], []
    policy = RetryPolicy(
        base_seconds=1.0, max_seconds=4.0, on_pause=lambda error, seconds: heard.append((error, seconds))
    )

    def sleep(seconds):
        now[0] += seconds
        if now[0] > 10:
            server.answer = lambda request: (200, ACCEPTED)

    with Client(home, server=server.url, retry=policy, monotonic=lambda: now[0], sleep=sleep) as client:
        client.propose(proposal())
    assert {error.code for error, _ in heard} == {"store_full"}
    assert [seconds for _, seconds in heard] == sorted(seconds for _, seconds in heard)
    assert heard[-1][1] == now[0] > 10, "the last one ended the wait"


def test_a_stranger_is_told_at_once_that_nobody_is_there(home):
    scripted = Scripted()
    scripted.stop()
    pauses = []
    with (
        Client(home, server=scripted.url, sleep=pauses.append) as client,
        pytest.raises(errors.ServerAwayError) as caught,
    ):
        client.status()
    assert pauses == []
    assert "--server" in caught.value.hint


def test_a_server_elsewhere_is_not_waited_for_because_of_the_home(home):
    scripted = Scripted()
    scripted.stop()
    write_server_file(home, "http://127.0.0.1:1")
    home.paths.server_file.rename(home.paths.up_lock)
    pauses = []
    with Client(home, server=scripted.url, sleep=pauses.append) as client, pytest.raises(errors.ServerAwayError):
        client.status()
    assert pauses == []


@pytest.mark.parametrize(
    "url", ["banana", "127.0.0.1:80", "localhost:8000", "ftp://x", "http://", "http://x:y", "http://[x"]
)
def test_a_server_that_is_no_address_is_named(home, url):
    with pytest.raises(errors.InvalidSpecError, match="is no address"):
        connect.find_server(home.model_copy(update={"server": url}))


@pytest.mark.parametrize("token", ["a\nb", "é", "a b", "t" * 5000, ""])
@pytest.mark.parametrize("server", [None, "http://127.0.0.1:1"])
def test_a_token_that_fits_no_header_is_refused_without_showing_it(home, token, server):
    write_server_file(home, "http://127.0.0.1:1")
    with pytest.raises(errors.InvalidSpecError, match="printable ASCII") as caught:
        connect.find_server(home.model_copy(update={"token": token, "server": server}))
    assert not token or token not in caught.value.message


def write_server_file(home, at, **changes):
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    identity = {"url": at, "pid": os.getpid(), "start": int(fields[19]), "boot": boot} | changes
    home.paths.server_file.write_text(json.dumps(identity))


def test_a_server_that_comes_back_elsewhere_is_found(home, server):
    server.answer = lambda request: (200, {"items": []})
    write_server_file(home, server.url)
    with Client(home, retry=PATIENT) as client:
        assert client.nodes() == ()
        second = Scripted()
        second.answer = server.answer
        server.answer = lambda request: None
        write_server_file(home, second.url)
        assert client.nodes() == ()
        assert len(second.seen) == 1
        second.stop()


@pytest.mark.parametrize(
    "changes", [{"pid": 2**22 + 1}, {"start": 1}, {"boot": "another"}, {"pid": "x"}, {"pid": -1}, {"url": ""}]
)
def test_what_a_dead_server_left_behind_is_not_trusted(home, changes):
    write_server_file(home, "http://127.0.0.1:1", **changes)
    with pytest.raises(errors.ServerAwayError) as caught:
        connect.find_server(home)
    assert "overnight up" in caught.value.hint


@pytest.mark.parametrize("text", [b"", b"a b", b"\xff\xff", b"x\ny", b"\x1b[31m", b"t" * 5000])
def test_a_token_file_of_no_use_is_named(tmp_path, text):
    path = tmp_path / "token"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(errors.BadTokenFileError, match=str(path)):
        connect.read_token(path)


def test_a_token_file_open_to_others_is_refused(tmp_path):
    path = tmp_path / "token"
    assert connect.read_token(path) is None
    path.write_text("abc\n")
    path.chmod(0o644)
    with pytest.raises(errors.BadTokenFileError, match="open to other users"):
        connect.read_token(path)
    path.chmod(0o600)
    assert connect.read_token(path) == "abc"


def test_wait_asks_only_for_those_that_still_run(client, server):
    answers = iter([["a-2"], [], ["a-1"]])

    def answer(request):
        return 200, {"items": [trial(name, "completed") for name in next(answers)], "cursor": None}

    server.answer = answer
    assert [t.name for t in client.wait(["a-1", "tri-a-2", "a-1"])] == ["a-1", "a-2"]
    asked = [request["path"].partition("?")[2].partition("&wait")[0] for request in server.seen]
    assert asked == ["trial=a-1&trial=tri-a-2", "trial=a-1", "trial=a-1"]


def test_wait_gives_up(server, home):
    clock = iter(range(1000))
    server.answer = lambda request: (200, {"items": []})
    with Client(home, server=server.url, retry=PATIENT, monotonic=lambda: float(next(clock))) as client:
        assert client.wait("a-1", timeout=10) == ()


def test_a_followed_log_goes_through_every_attempt(client, server):
    logs = {(1, 0): ("one ", 4, False), (1, 4): ("", 4, True), (2, 0): ("two", 3, True)}
    state = {"attempts": 0}

    def answer(request):
        path = request["path"]
        if path.startswith("/v1/events"):
            state["attempts"] += 1
            return 200, {"items": [event(state["attempts"])], "cursor": None}
        if "/logs" in path:
            query = dict(pair.split("=") for pair in path.partition("?")[2].split("&"))
            at = (int(query["attempt"]), int(query["offset"]))
            text, following, end = logs[at]
            return 200, {"attempt": at[0], "offset": at[1], "next_offset": following, "text": text, "end": end}
        over = state["attempts"] == 3
        made = min(2, state["attempts"])
        return 200, trial(state="completed" if over else "queued", attempts_made=made)

    server.answer = answer
    assert [(chunk.attempt, chunk.text) for chunk in client.logs("a-1", follow=True)] == [(1, "one "), (2, "two")]


def stream(*seqs):
    lines = "".join(f"id: {seq}\ndata: {json.dumps(event(seq), ensure_ascii=False)}\n\n" for seq in seqs)
    return ("retry: 5\n\n: hello\n\n" + lines).encode()


def test_events_go_on_after_a_lost_connection(client, server):
    answers = iter(
        [(200, stream(1, 2)), None, (503, {"error": errors.StoreBusyError("x").to_dict()}), (200, stream(3))]
    )
    server.answer = lambda request: next(answers)
    found = []
    for got in client.events(after=0):
        found.append(got.seq)
        if got.seq == 3:
            break
    assert found == [1, 2, 3]
    assert [request["headers"]["Last-Event-ID"] for request in server.seen] == ["0", "2", "2", "2"]
    assert all(request["headers"]["Accept"] == "text/event-stream" for request in server.seen)


async def test_the_async_client_does_the_same(server, home):
    answers = iter([None, (200, trial()), (200, {"items": [trial("b-1", "failed")]}), (200, stream(7)), (404, b"")])
    server.answer = lambda request: next(answers)
    async with AsyncClient(home, server=server.url, retry=PATIENT) as client:
        assert (await client.trial("a-1")).name == "a-1"
        assert [t.name for t in await client.wait(["b-1"])] == ["b-1"]
        stream_of = client.events()
        assert (await anext(stream_of)).seq == 7
        await stream_of.aclose()
        assert await client.has_code("0" * 64) is False
        task = asyncio.create_task(client.trial("x"))
        server.answer = lambda request: (404, {"error": errors.NotFoundError("no x").to_dict()})
        with pytest.raises(errors.NotFoundError, match="no x"):
            await task


def test_code_is_sent_once(client, server):
    server.answer = lambda request: (404 if request["method"] == "HEAD" else 200, b"")
    client.upload_code("a" * 64, lambda: b"tar")
    assert [(r["method"], r["body"]) for r in server.seen] == [("HEAD", b""), ("PUT", b"tar")]
    server.answer = lambda request: (200, b"")
    client.upload_code("a" * 64, lambda: pytest.fail("read although the server has it"))


@pytest.mark.parametrize(("url", "asked"), [("http://127.0.0.1:1", False), ("https://127.0.0.1:1", True)])
def test_certificates_are_read_where_one_will_be_shown(tmp_path, monkeypatch, url, asked):
    read = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *args, **kwargs: read.append(args))
    with Client(Settings(home=tmp_path, server=url, token="x" * 43)):
        assert bool(read) is asked


def test_a_proxy_of_the_environment_does_not_catch_loopback(home, server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    server.answer = lambda request: (200, {"items": []})
    with Client(home, server=server.url) as client:
        assert client.nodes() == ()


@given(st.lists(st.integers(1, 10**6), max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_a_stream_may_be_cut_anywhere(seqs, ending, data):
    text = ": hi\n\n" + "".join(
        f"event: message\nid: {seq}\ndata: {json.dumps(event(seq), ensure_ascii=False)}\n\n" for seq in seqs
    )
    raw = text.replace("\n", ending).encode() + b"\n"
    parser, found, at = SseParser(), [], 0
    while at < len(raw):
        size = data.draw(st.integers(1, max(1, len(raw) - at)))
        found += parser.feed(raw[at : at + size])
        at += size
    assert [Event.model_validate_json(message.data).seq for message in found] == seqs
    assert [message.id for message in found] == [str(seq) for seq in seqs]
