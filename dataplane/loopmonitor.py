"""How late the event loop is.

Theory of operation: a task sleeps for a period and notes how much later than that it runs again. That is the time during
which the loop did something else, or the machine did: a batch of packets, a callback that takes too long, no processor.
Each time it also calls the beats: signs of life for who must know that the loop moves, which are the health server and
systemd's watchdog. When the loop hangs, nothing is noted and nobody is told, until it moves again; then the delay is noted
whole.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds in seconds. A wake-up of the engine takes well under a millisecond; five seconds are a stall."""


class LoopMonitor:
    """Watches the loop that `run` runs in, once a `period` (seconds). `now` is a monotonic clock.

    `lag_seconds` is the last delay, `worst_lag_seconds` the longest since the start.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        period: float = 0.5,
    ) -> None:
        self.lag_seconds = 0.0
        self.worst_lag_seconds = 0.0
        self._now, self._sleep, self._period = now, sleep, period
        self._beats: list[Callable[[], None]] = []
        self._counts = [0] * len(LAG_BUCKETS)
        self._count = 0
        self._sum = 0.0

    def add_beat(self, beat: Callable[[], None]) -> None:
        """Call `beat` in every period from now on. It must neither block nor raise."""
        self._beats.append(beat)

    async def run(self) -> None:
        """For ever."""
        while True:
            for beat in self._beats:
                beat()
            due = self._now() + self._period
            await self._sleep(self._period)
            self._note(max(0.0, self._now() - due))

    def _note(self, lag: float) -> None:
        self.lag_seconds = lag
        self.worst_lag_seconds = max(self.worst_lag_seconds, lag)
        self._count += 1
        self._sum += lag
        for index, bound in enumerate(LAG_BUCKETS):
            if lag <= bound:
                self._counts[index] += 1

    def report(self) -> dict[str, Any]:
        """For status: both delays, and the histogram with cumulative buckets [upper bound, count]; all in seconds."""
        return {
            "lag_seconds": self.lag_seconds,
            "worst_lag_seconds": self.worst_lag_seconds,
            "buckets": [[bound, count] for bound, count in zip(LAG_BUCKETS, self._counts, strict=True)],
            "sum": self._sum,
            "count": self._count,
        }
