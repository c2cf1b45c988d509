"""Who belongs to an attempt whose supervisor is gone: its session's members, and no stranger of the same number."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from overnight.platform.node import reaper
from overnight.platform.node.identity import Identity, read_stat

# Two sleepers in a session of their own; the leader ends when its standard input does. None of them has a mark.
SESSION = """
import os, sys
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os.close(1)
        os.execve("/bin/sleep", ["sleep", "60"], {})
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.read()
"""


class Session:
    """A real session: a leader and two members."""

    def __init__(self) -> None:
        self.leader = subprocess.Popen(
            [sys.executable, "-c", SESSION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={},
        )
        assert self.leader.stdout is not None
        self.members = [int(word) for word in self.leader.stdout.readline().split()]
        found = Identity.of(self.leader.pid)
        assert found is not None
        self.identity = found

    def end_leader(self, reap: bool = True) -> None:
        assert self.leader.stdin is not None
        self.leader.stdin.close()
        os.waitid(os.P_PID, self.leader.pid, os.WEXITED | os.WNOWAIT)
        if reap:
            self.leader.wait()

    def close(self) -> None:
        for pid in self.members:
            os.kill(pid, 9)
        self.leader.kill()
        self.leader.wait()
        for pipe in (self.leader.stdin, self.leader.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Session]]:
    started: list[Session] = []

    def begin() -> Session:
        started.append(Session())
        return started[-1]

    yield begin
    for session in started:
        session.close()


def survivors(*known: Identity) -> set[int]:
    return set(reaper.survivors("att-nobody", known))


def test_the_members_of_a_living_ranks_session_belong(start: Callable[[], Session]) -> None:
    session = start()
    assert survivors(session.identity) == {session.leader.pid, *session.members}


def test_a_dead_rank_that_nobody_has_reaped_still_proves_its_session(start: Callable[[], Session]) -> None:
    session = start()
    session.end_leader(reap=False)
    stat = read_stat(session.leader.pid)
    assert stat is not None and stat.state == "Z"
    assert survivors(session.identity) == set(session.members)


def test_a_member_of_the_census_proves_the_session_of_a_dead_rank(start: Callable[[], Session]) -> None:
    session = start()
    one = Identity.of(session.members[0])
    assert one is not None
    session.end_leader()
    assert survivors(session.identity, one) == set(session.members)


def test_a_session_whose_number_was_used_again_is_a_strangers(start: Callable[[], Session]) -> None:
    """The stranger's leader is gone as well, so that its start time cannot be looked at."""
    session = start()
    rank = replace(session.identity, start=session.identity.start - 1)  # the rank that had the number before
    assert survivors(rank) == set()
    session.end_leader()
    assert survivors(rank) == set()


def test_nothing_of_an_earlier_boot_lives(start: Callable[[], Session]) -> None:
    session = start()
    assert survivors(replace(session.identity, boot="another")) == set()
