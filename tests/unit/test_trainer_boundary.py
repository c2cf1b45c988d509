"""When to save and when to leave."""

import os
import signal
import threading

import pytest

from overnight.core.errors import BadInputError
from overnight.trainer.agreement import Agreement, Wishes
from overnight.trainer.boundary import Leave, Policy, Signals, parse_seconds
from overnight.trainer.journal import Journal


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("every", [0, -1, True, "soon", "5", "0s", "-3m", "1d"])
def test_no_interval_is_refused(every: object) -> None:
    with pytest.raises(BadInputError):
        Policy(every)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("1.5m", 90), ("2h", 7200)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


def test_updates_and_epochs_are_due_by_count_alone() -> None:
    clock = Ticks()
    updates, epochs = Policy(10, 1, clock), Policy("epoch", 1, clock)
    clock.now = 1e6
    assert [step for step in range(1, 31) if updates.due_by_count(step, epoch_end=True)] == [10, 20, 30]
    assert epochs.due_by_count(7, epoch_end=True) and not epochs.due_by_count(7, epoch_end=False)
    assert not updates.due_by_time() and not epochs.due_by_time()


def test_the_clock_asks_once_until_something_was_saved() -> None:
    clock = Ticks()
    policy = Policy("30s", 1, clock)
    clock.now = 29.9
    assert not policy.due_by_time()
    clock.now = 31.0
    assert policy.due_by_time() and not policy.due_by_time()
    policy.saved(1.0)
    clock.now = 60.9
    assert not policy.due_by_time()
    clock.now = 61.0
    assert policy.due_by_time()


def test_auto_saves_more_rarely_when_saving_costs_more_and_more_often_with_more_ranks() -> None:
    def interval(cost_seconds: float, ranks: int) -> float:
        clock = Ticks()
        policy = Policy("auto", ranks, clock)
        policy.saved(cost_seconds)
        while not policy.due_by_time():
            clock.now += 0.5
        return clock.now

    assert interval(0.001, 1) < interval(1.0, 1) < interval(10.0, 1) <= 600
    assert interval(1.0, 16) < interval(1.0, 1)


def test_never_means_never() -> None:
    clock = Ticks()
    policy = Policy(None, 1, clock)
    clock.now = 1e9
    assert not policy.due_by_time() and not policy.due_by_count(100, epoch_end=True)


def test_signals_raise_flags_and_the_second_ctrl_c_kills() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    signals = Signals()
    signals.install(alone=True)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.leave is Leave.YIELD and signals.received is not None
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.leave is Leave.INTERRUPT
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) == before[0]
    signal.signal(signal.SIGINT, before[1])


def test_under_a_supervisor_ctrl_c_is_a_yield() -> None:
    before = signal.getsignal(signal.SIGINT)
    signals = Signals()
    signals.install(alone=False)
    os.kill(os.getpid(), signal.SIGINT)
    signals.restore()
    signal.signal(signal.SIGINT, before)
    assert signals.leave is Leave.YIELD


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: Signals().install(alone=True))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_rank_agrees_with_itself_at_once() -> None:
    alone = Agreement(None, Journal(shared=False))
    assert alone.exchange(Wishes(Leave.STOP, 1, 3), step=7) == Wishes(Leave.STOP, 1, 3)
