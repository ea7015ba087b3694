import asyncio

import pytest

from dataplane.loopmonitor import LAG_BUCKETS, LoopMonitor


class Clock:
    """Wakes up later than asked for, by the delays that it is given; then ends the task."""

    def __init__(self, *delays):
        self.now = 10.0
        self.delays = list(delays)

    async def sleep(self, seconds):
        if not self.delays:
            raise asyncio.CancelledError
        self.now += seconds + self.delays.pop(0)


async def watch(*delays):
    clock = Clock(*delays)
    monitor = LoopMonitor(lambda: clock.now, clock.sleep, period=0.5)
    beats = []
    monitor.add_beat(lambda: beats.append(round(clock.now, 6)))
    with pytest.raises(asyncio.CancelledError):
        await monitor.run()
    return monitor, beats


async def test_delays_are_noted_and_beats_given():
    monitor, beats = await watch(0.0, 0.004, 7.0, 0.002)
    assert monitor.lag_seconds == pytest.approx(0.002)
    assert monitor.worst_lag_seconds == pytest.approx(7.0)
    assert beats == [10.0, 10.5, 11.004, 18.504, 19.006]


async def test_the_histogram_is_cumulative():
    monitor, _ = await watch(0.0, 0.004, 7.0, 0.002)
    report = monitor.report()
    assert report["count"] == 4
    assert report["sum"] == pytest.approx(7.006)
    expected = {0.001: 1, 0.0025: 2, 0.005: 3}
    assert report["buckets"] == [[bound, expected.get(bound, 3)] for bound in LAG_BUCKETS]


async def test_waking_early_is_no_delay():
    monitor, _ = await watch(-0.01)
    assert (monitor.lag_seconds, monitor.report()["sum"]) == (0.0, 0.0)


async def test_a_loop_that_hangs_is_seen_on_the_real_clock():
    import time

    monitor = LoopMonitor(period=0.01)
    task = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)  # it sleeps now
    time.sleep(0.08)  # noqa: ASYNC251 - the loop hangs
    for _ in range(10):  # and finds that it is time
        await asyncio.sleep(0)
    assert monitor.report()["count"] == 1
    task.cancel()
    assert 0.03 < monitor.worst_lag_seconds < 5
