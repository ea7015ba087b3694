"""An event loop whose time is not the world's: waiting takes no time, and whatever is due comes in its order.

Theory of operation: asyncio asks its selector to wait until the next timer is due. The selector here does not wait: it
moves the loop's clock to that moment. So an hour of timers runs as fast as their callbacks do, and as often as it is
repeated the same things happen at the same instants. Nothing else about the loop is changed; tasks, timeouts and queues
are asyncio's.

Two things would let the world in. Work given to a thread (`asyncio.to_thread`) is done at once, in the loop's own thread.
And sockets that are really registered are waited for as ever, but only when no timer is set: with virtual time they make a
test depend on who is faster, and do not belong in one.

If every task waits and no timer is set, nothing can ever happen again; that is `StalledError`, not a hang. Timers that are
set in the background do not count: they go off in their turn while something else lets time pass, and never by themselves.
So what renews its leases for ever does not keep alive whoever waits for a datagram that nobody sends. They lie in a heap of
their own, of which asyncio knows nothing; the clock stops at the first of them on its way to asyncio's next timer.
"""

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

_RESOLUTION = 1e-9


class StalledError(RuntimeError):
    """Every task waits for another, and no timer is set but those in the background."""


class BackgroundTimer:
    """A timer that nobody waits for. Made by `VirtualLoop.call_at_in_background`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call."""
        self._call = None

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._call is None

    def go_off(self) -> None:
        """Call, unless it was cancelled."""
        if self._call is not None:
            self._call()


class _Selector(selectors.DefaultSelector):
    """Waits for nobody: tells `jump` how far the clock may be moved on."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None and len(self.get_map()) > 1:  # the loop's own wake-up pipe is always there
            return super().select(None)
        self._jump(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `time()` begins at 0."""

    _clock_resolution: float  # asyncio.BaseEventLoop's

    def __init__(self) -> None:
        self._moment = 0.0
        self._idle: Callable[[], None] | None = None
        self._background: list[tuple[float, int, BackgroundTimer]] = []
        self._order = itertools.count()
        super().__init__(_Selector(self._move_on))

    def time(self) -> float:
        """Seconds since the loop was made, by its own clock."""
        return self._moment

    def when_idle(self, call: Callable[[], None] | None) -> None:
        """From now on `call` is called, instead of time being moved on, whenever nothing is left to do at this instant.

        It must give the loop something to do. None ends it.
        """
        self._idle = call

    def call_at_in_background(self, when: float, call: Callable[[], None]) -> BackgroundTimer:
        """Call `call` at that time, if anything but the background lets time come so far. Raises RuntimeError if closed."""
        if self.is_closed():
            raise RuntimeError("the event loop is closed")
        while self._background and self._background[0][2].cancelled():  # so that planning anew and anew leaves nothing
            heapq.heappop(self._background)
        timer = BackgroundTimer(call)
        heapq.heappush(self._background, (when, next(self._order), timer))
        return timer

    def _move_on(self, seconds: float | None) -> None:
        if self._idle is not None:
            self._idle()
            return
        if seconds is None:
            raise StalledError(
                "every task waits, and no timer is set but those in the background, as for leases; so nothing will ever "
                "happen: is something awaited that nobody sends?"
            )
        self._moment = self._call_background(self._moment + seconds)
        # asyncio takes timers for due that are no later than this ahead; late in a long run the least step of a double is
        # more than the nanosecond that it begins with, and a timer would never be due.
        self._clock_resolution = max(_RESOLUTION, 2 * math.ulp(self._moment))

    def _call_background(self, until: float) -> float:
        """Let the first timers in the background go off that are due until then; returns when that is, or `until`."""
        background = self._background
        moment: float | None = None
        while background and background[0][0] <= (until if moment is None else moment):
            when, _, timer = heapq.heappop(background)
            if not timer.cancelled():
                moment = max(when, self._moment) if moment is None else moment
                self.call_soon(timer.go_off)
        return until if moment is None else moment

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override] # typeshed makes it generic over the arguments
        """Run `func` now, in this thread: a pool's threads would keep the world's time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # belongs to whoever awaits it
            future.set_exception(error)
        return future
