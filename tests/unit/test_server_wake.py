"""Long-polls: no wake-up is lost, none waits longer than asked, and a stopping server lets everybody go."""

import asyncio
import threading
import time

from overnight.platform.server.wake import Hub, poll


def hub() -> Hub:
    return Hub(asyncio.get_running_loop())


async def test_a_commit_from_a_thread_wakes_only_its_topic() -> None:
    house = hub()
    with house.watch("trials") as trials, house.watch("devices", "nodes") as others:
        threading.Thread(target=house.publish, args=(frozenset({"trials"}),)).start()
        assert await trials.wait(5)
        assert not await others.wait(0.02)
        house.publish(frozenset({"nodes", "x"}))
        assert await others.wait(5)


async def test_a_commit_between_the_read_and_the_wait_is_not_missed() -> None:
    house = hub()
    values = iter([1, 2])

    def read() -> int:
        value = next(values)
        house.publish(frozenset({"t"}))  # the world changes right after this read
        return value

    with house.watch("t") as watch:
        assert await poll(watch, read, lambda v: v == 2, 5) == 2


async def test_the_answer_comes_when_the_time_is_over() -> None:
    began = time.monotonic()
    with hub().watch("t") as watch:
        assert await poll(watch, lambda: "old", lambda v: False, 0.05) == "old"
    assert 0.04 < time.monotonic() - began < 2


async def test_without_wait_it_answers_at_once() -> None:
    with hub().watch("t") as watch:
        assert await poll(watch, lambda: 1, lambda v: False, 0) == 1


async def test_closing_lets_everybody_go_and_nobody_in() -> None:
    house = hub()
    with house.watch("a") as first, house.watch("b") as second:
        waiting = [asyncio.ensure_future(w.wait(60)) for w in (first, second)]
        await asyncio.sleep(0)
        house.close()
        async with asyncio.timeout(5):
            assert await asyncio.gather(*waiting) == [False, False]
        assert not await first.wait(60)


async def test_watches_leave_nothing_behind() -> None:
    house = hub()
    for _ in range(100):
        with house.watch("a", "b"):
            pass
    assert house._watches == {}


def test_a_commit_after_the_loop_has_gone_is_harmless() -> None:
    loop = asyncio.new_event_loop()
    house = Hub(loop)
    loop.close()
    house.publish(frozenset({"trials"}))
