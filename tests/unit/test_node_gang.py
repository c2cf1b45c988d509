"""Who of a gang failed first, and why, from exits and words alone; no process is forked."""

import signal
import socket

import pytest

from overnight.platform.node.evidence import is_peer_loss, make_error
from overnight.platform.node.gang import Gang
from overnight.platform.node.rank import Seat

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:25301"
YIELD = {"version": 1, "action": "yield", "grace_seconds": 1.0, "reason": ""}
GO_ON = {**YIELD, "action": "continue"}


def gang(num_ranks: int) -> Gang:
    unused = socket.socket()
    unused.close()
    return Gang({rank: Seat(100 + rank, unused) for rank in range(num_ranks)})


@pytest.fixture
def three() -> Gang:
    return gang(3)


def end(made: Gang, rank: int, code: int) -> None:
    made.record(100 + rank, -code if code < 0 else code << 8)
    assert made.statuses[rank] == code


def tell(made: Gang, rank: int, kind: str, message: str) -> None:
    made.error = made.error or {**make_error(kind, message), "rank": rank}


def test_the_first_to_fail_is_to_blame(three: Gang) -> None:
    end(three, 0, 0)
    assert not three.judge(None)
    end(three, 2, 1)
    assert three.judge(None) and three.failed_rank == 2 and three.lost_rank is None
    end(three, 1, 1)
    assert not three.judge(None) and three.failed_rank == 2


def test_of_two_seen_at_once_the_one_that_was_shot_is_to_blame(three: Gang) -> None:
    tell(three, 0, "RuntimeError", CLOSED)
    end(three, 0, 1)
    end(three, 2, -signal.SIGKILL)
    assert three.judge(None) and three.lost_rank == 2


def test_a_peer_that_was_seen_first_hands_the_blame_on(three: Gang) -> None:
    tell(three, 0, "RuntimeError", CLOSED)
    end(three, 0, 1)
    assert three.judge(None) and three.failed_rank == 0
    end(three, 1, -signal.SIGSEGV)
    assert three.judge(None) and three.lost_rank == 1


def test_an_exception_of_the_users_is_never_handed_on(three: Gang) -> None:
    tell(three, 0, "ValueError", "the loss is nan")
    end(three, 0, 1)
    end(three, 1, -signal.SIGABRT)
    three.judge(None)
    assert three.lost_rank is None, "rank 1 broke down because of rank 0"


def test_a_rank_that_told_its_own_exception_is_not_lost(three: Gang) -> None:
    tell(three, 1, "RuntimeError", CLOSED)
    end(three, 1, -signal.SIGABRT)
    three.judge(None)
    assert three.failed_rank == 1 and three.lost_rank is None


def test_what_was_killed_here_is_not_lost(three: Gang) -> None:
    tell(three, 0, "RuntimeError", CLOSED)
    end(three, 0, 1)
    three.judge(None)
    three.about_to_kill()
    end(three, 1, -signal.SIGKILL)
    assert not three.judge(None) and three.lost_rank is None


def test_those_that_left_as_told_did_not_fail(three: Gang) -> None:
    three.left = {0: {"why": "yield", "saved": True}}
    end(three, 0, 75)
    end(three, 1, 42)
    assert not three.judge(42)
    end(three, 2, 43)
    assert three.judge(42) and three.failed_rank == 2


def test_the_report_says_how_they_hang_and_what_they_obeyed() -> None:
    made = gang(1)
    made.hung = "no rank makes progress: rank 0 silent for 9.0 s in compute at step 4"
    made.about_to_kill()
    end(made, 0, -signal.SIGKILL)
    report = made.report(None, GO_ON, None, ["Traceback (most recent call last):", "ValueError: of an earlier day"])
    assert (report["killed"], report["error"], report["exit_codes"], report["left"]) == ("hung", None, [-9], None)
    made = gang(1)
    end(made, 0, 42)
    report = made.report(None, YIELD, 42, [])
    assert (report["left"], report["saved"], report["directive"]) == ("yield", True, YIELD)
    assert made.report("grace", YIELD, 42, [])["left"] is None


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "[gloo/transport/tcp/pair.cc:299] Read error [127.0.0.1]:39093: Connection reset by peer",
        "Connection was likely closed. Did the remote server shutdown or crash?",
        "NCCL error: remote process exited or there was a network error",
        "failed to recv, got 0 bytes",
        "[Errno 32] Broken pipe",
    ],
)
def test_the_words_of_a_lost_peer(message: str) -> None:
    assert is_peer_loss(make_error("RuntimeError", message))


@pytest.mark.parametrize("message", ["the ranks logged different things", "CUDA out of memory", "expected 3 of 4", ""])
def test_other_words(message: str) -> None:
    assert not is_peer_loss(make_error("RuntimeError", message)) and not is_peer_loss(None)
