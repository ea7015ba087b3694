"""A token bucket: how often something may happen.

Sans-I/O: time is an argument, in seconds of any monotonic clock.
"""


class TokenBucket:
    """`rate` tokens a second, at most `burst` saved up; full at the start."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._then: float | None = None

    def take(self, now: float) -> bool:
        """Whether one may happen at `now`; if so, its token is gone."""
        if self._then is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._then) * self._rate)
        self._then = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
