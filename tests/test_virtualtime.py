"""A loop whose waiting takes no time."""

import asyncio
import socket
import time

import pytest

from dataplane.overlay import StalledError, VirtualLoop


@pytest.fixture
def loop():
    made = VirtualLoop()
    yield made
    made.close()


def test_waiting_moves_the_clock_and_takes_no_time(loop):
    started = time.monotonic()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == pytest.approx(3600)
    loop.run_until_complete(asyncio.sleep(86_400 * 30))  # longer than asyncio's longest single wait
    assert loop.time() == pytest.approx(3600 + 86_400 * 30)
    assert time.monotonic() - started < 60


def test_what_is_due_comes_in_its_order_and_at_its_instant(loop):
    seen = []

    async def story() -> None:
        async def at(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((seconds, round(loop.time(), 6)))

        await asyncio.gather(*(at(seconds) for seconds in (3.0, 1.0, 2.0, 1.5, 0.0)))

    loop.run_until_complete(story())
    assert seen == [(0.0, 0.0), (1.0, 1.0), (1.5, 1.5), (2.0, 2.0), (3.0, 3.0)]


def test_timeouts_are_virtual_too(loop):
    async def story() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return loop.time()

    assert loop.run_until_complete(story()) == pytest.approx(30)


def test_a_loop_that_waits_for_nothing_says_so_and_does_not_hang(loop):
    async def story() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(story())
    with pytest.raises(StalledError, match="no timer is set"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))


def test_timers_in_the_background_go_off_in_their_turn_while_others_let_time_pass(loop):
    seen = []

    def again(when: float) -> None:
        seen.append((loop.time(), "background"))
        loop.call_at_in_background(when + 10, lambda: again(when + 10))

    loop.call_at_in_background(10, lambda: again(10))
    loop.call_at_in_background(12, lambda: seen.append("never")).cancel()
    loop.call_at(15, lambda: seen.append((loop.time(), "timer")))
    loop.run_until_complete(asyncio.sleep(35))
    background = [(10, "background"), (15, "timer"), (20, "background"), (30, "background")]
    assert seen == background
    assert loop.time() == pytest.approx(35)


def test_timers_in_the_background_are_nothing_to_wait_for(loop):
    timer = loop.call_at_in_background(10, lambda: None)
    with pytest.raises(StalledError, match="but those in the background"):
        loop.run_until_complete(loop.create_future())
    assert loop.time() == 0
    assert not timer.cancelled()
    loop.run_until_complete(asyncio.sleep(20))  # it is good for more


def test_a_timer_in_the_background_that_is_late_goes_off_as_soon_as_time_passes(loop):
    loop.run_until_complete(asyncio.sleep(5))
    seen = []
    loop.call_at_in_background(3, lambda: seen.append(loop.time()))
    loop.run_until_complete(asyncio.sleep(1))
    assert seen == [pytest.approx(5)]


def test_a_closed_loop_takes_no_timer_in_the_background():
    loop = VirtualLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_at_in_background(1, lambda: None)


def test_work_for_a_thread_is_done_in_its_turn(loop):
    async def story() -> tuple[int, float]:
        value = await asyncio.to_thread(lambda: 6 * 7)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return value, loop.time()

    assert loop.run_until_complete(story()) == (42, 0.0)


def test_a_real_socket_is_waited_for_when_no_timer_is_set(loop):
    ours, other = socket.socketpair()
    ours.setblocking(False)
    with ours, other:

        async def story() -> bytes:
            waiting = asyncio.ensure_future(loop.sock_recv(ours, 10))
            await asyncio.sleep(0)
            other.send(b"here")
            return await waiting

        assert loop.run_until_complete(story()) == b"here"
    assert loop.time() == 0.0
