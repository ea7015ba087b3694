"""When packets are to be sent: as they were captured, at a rate, or as fast as possible; and how late they were.

Theory of operation. A pace says how much of some *unit* passes before each packet (captured nanoseconds, packets, or bits)
and how long a unit takes. When a chunk is loaded, `load` adds the units up to a column of due times, so that inside the
measured time the question "how many of the next packets are due" is one binary search a batch, and recording what was sent
three appends. Due times count from the start of the schedule, whose clock runs only between `start` and `stop`: loading the
next chunk between the two delays everything behind it and makes nothing late. The lateness of each packet is worked out in
`stop`.

Whoever falls behind catches up as fast as it can: the schedule does not move. At a rate, the first packet is due at once
and each other one when those before it have had their time: there are no bursts but those of the scheduling of processes.
"""

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from math import isfinite

from bench.replay.chunk import Chunk
from bench.replay.results import Histogram, Lateness, Pacing

_NS = 1_000_000_000

_FOREVER_NS = 1 << 62
"""The latest due time: 146 years."""

_CLOCK_STEP_NS = _NS
"""A time that is before the last one by more is a clock that was set, and the new time counts; by less, packets that were
captured by several queues and written out of order, which must not make the gaps between them count twice."""

SPIN_NS = 60_000
"""How long before the time sleeping ends and looking at the clock begins: Linux wakes a sleeper up to 50 µs late
(prctl(2), PR_SET_TIMERSLACK), and then it must be scheduled."""


@dataclass(frozen=True)
class Pace:
    """At most one of `speed`, `packets_per_second` and `bits_per_second`; with none, as fast as possible.

    `speed` is a factor on the capture's own pace: 2 takes half the time. Bits are those of inner packets with their
    headers, and `overhead_bytes` more for each packet (`encap.overhead`, 50 for VXLAN over IPv4), to state a rate on the
    underlay. Captured gaps longer than `max_gap_seconds`, before `speed` is applied, are shortened to that. `loops` is how
    often the capture is gone through. Raises ValueError.
    """

    speed: float | None = None
    packets_per_second: float | None = None
    bits_per_second: float | None = None
    overhead_bytes: int = 0
    max_gap_seconds: float | None = None
    loops: int = 1

    def __post_init__(self) -> None:
        wanted = {"speed": self.speed, "packets/s": self.packets_per_second, "bits/s": self.bits_per_second}
        given = {name: value for name, value in wanted.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"one pace at a time, not {' and '.join(given)}")
        for name, value in given.items():
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.max_gap_seconds is not None and not (isfinite(self.max_gap_seconds) and self.max_gap_seconds >= 0):
            raise ValueError(f"the longest gap cannot be {self.max_gap_seconds} s")
        if self.max_gap_seconds is not None and self.speed is None:
            raise ValueError("gaps have a longest one only at a capture's own pace")
        if self.overhead_bytes < 0:
            raise ValueError("the overhead of a packet cannot be below 0 bytes")
        if self.loops < 1:
            raise ValueError("a capture is gone through at least once")

    @property
    def has_schedule(self) -> bool:
        """Whether packets have due times."""
        return self.speed is not None or self.packets_per_second is not None or self.bits_per_second is not None

    def __str__(self) -> str:
        if self.speed is not None:
            limit = "" if self.max_gap_seconds is None else f", gaps of at most {self.max_gap_seconds:g} s"
            return f"{'as captured' if self.speed == 1 else f'as captured × {self.speed:g}'}{limit}"
        if self.packets_per_second is not None:
            return f"{self.packets_per_second:.10g} packets/s"
        if self.bits_per_second is not None:
            overhead = f" with {self.overhead_bytes} bytes of overhead a packet" if self.overhead_bytes else ""
            return f"{self.bits_per_second:.10g} bits/s{overhead}"
        return "as fast as possible"


class Pacer:
    """One run of a pace, used like this::

    while pacer.next_loop():
        for chunk in chunks:
            pacer.load(chunk)
            pacer.start()
            while position < len(chunk):
                now = pacer.wait(position)
                count = pacer.due(position, limit, now)
                ...  # hand over packets position to position + count
                pacer.sent(position, count, now)
                position += count
            pacer.stop()

    `clock` is in nanoseconds; `sleep` takes seconds. Who has something else to do meanwhile asks `wait_ns`, not `wait`.
    """

    def __init__(
        self,
        pace: Pace,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        spin_ns: int = SPIN_NS,
    ) -> None:
        self.pace = pace
        self.elapsed_ns = 0
        """How long the schedule's clock has run."""
        self.lateness = Histogram()
        """In nanoseconds, a number a packet; complete after `stop`."""
        self._clock = clock
        self._sleep = sleep
        self._spin_ns = spin_ns
        self._ns_per_unit = _ns_per_unit(pace)
        self._longest = None if pace.max_gap_seconds is None else round(pace.max_gap_seconds * _NS)
        self._loop = 0
        self._loop_units = 0
        self._loop_gaps = 0
        self._bridge = 0
        self._latest: int | None = None
        """The time of the latest packet of this loop, as captured."""
        self._spent = 0
        """What the packet before the next one takes."""
        self._units = 0
        """How much of the unit passes from the beginning to the packet loaded last."""
        self._origin = 0
        self._count = 0
        self._due = array("q")
        self._sent_position = array("q")
        self._sent_count = array("q")
        self._sent_ns = array("q")

    def next_loop(self) -> bool:
        """Begin the next time through the capture; False if that were one too many.

        A loop of a capture's own pace begins as long after the end of the one before as its packets are apart on average.
        """
        if self._loop >= self.pace.loops:
            return False
        self._loop += 1
        self._bridge = self._loop_units // max(self._loop_gaps, 1)
        self._latest = None
        self._loop_units = 0
        self._loop_gaps = 0
        return True

    def load(self, chunk: Chunk) -> None:
        """Take the packets of `chunk`, which follow those of the one before. Not for measured time: about 0.4 µs each."""
        self._count = len(chunk)
        if not self.pace.has_schedule:
            return
        self._due = array("q")
        for gap in self._gaps(chunk):
            self._units += gap
            self._due.append(int(min(self._units * self._ns_per_unit, _FOREVER_NS)))

    def _gaps(self, chunk: Chunk) -> Iterator[int]:
        """What passes between each packet and the one before it, in units of the pace."""
        if self.pace.speed is not None:
            return self._captured_gaps(chunk)
        if self.pace.packets_per_second is not None:
            spent: Iterable[int] = repeat(1, len(chunk))
        else:
            spent = (8 * (length + self.pace.overhead_bytes) for length in chunk.length)
        return self._after_those_before(spent)

    def _captured_gaps(self, chunk: Chunk) -> Iterator[int]:
        for captured in chunk.time_ns:
            if self._latest is None:  # the first of a loop
                gap = self._bridge
                self._latest = captured
            else:
                gap = max(captured - self._latest, 0)
                if gap or self._latest - captured > _CLOCK_STEP_NS:
                    self._latest = captured
                if self._longest is not None:
                    gap = min(gap, self._longest)
                self._loop_gaps += 1
                self._loop_units += gap
            yield gap

    def _after_those_before(self, spent: Iterable[int]) -> Iterator[int]:
        """Each waits for what the one before it takes, the first for nothing."""
        for units in spent:
            yield self._spent
            self._spent = units

    def start(self) -> None:
        """The schedule's clock runs."""
        self._origin = self._clock() - self.elapsed_ns

    def stop(self) -> None:
        """The schedule's clock stands still; the lateness of what was sent is counted."""
        self.elapsed_ns = self._clock() - self._origin
        for position, count, now in zip(self._sent_position, self._sent_count, self._sent_ns, strict=True):
            passed = now - self._origin
            self.lateness.record_all(max(passed - due, 0) for due in self._due[position : position + count])
        for column in (self._sent_position, self._sent_count, self._sent_ns):
            del column[:]

    def due(self, position: int, limit: int, now_ns: int) -> int:
        """How many packets of the chunk from `position` on, but at most `limit`, are due at `now_ns`."""
        end = min(position + limit, self._count)
        if not self.pace.has_schedule:
            return max(end - position, 0)
        return bisect_right(self._due, now_ns - self._origin, position, end) - position

    def wait_ns(self, position: int, now_ns: int) -> int:
        """How long after `now_ns` the packet at `position` is due; 0 if it is, or there is none."""
        if not self.pace.has_schedule or position >= self._count:
            return 0
        return max(self._due[position] + self._origin - now_ns, 0)

    def wait(self, position: int) -> int:
        """Sleep, and at the end spin, until the packet at `position` is due; returns what the clock shows then."""
        now = self._clock()
        while left := self.wait_ns(position, now):
            if left > self._spin_ns:
                self._sleep((left - self._spin_ns) / _NS)
            now = self._clock()
        return now

    def sent(self, position: int, count: int, now_ns: int) -> None:
        """`count` packets from `position` on were handed over at `now_ns`."""
        if self.pace.has_schedule:
            self._sent_position.append(position)
            self._sent_count.append(count)
            self._sent_ns.append(now_ns)

    def result(self) -> Pacing:
        """The pace and how it was kept."""
        return Pacing(str(self.pace), Lateness.of(self.lateness) if self.pace.has_schedule else None)


def _ns_per_unit(pace: Pace) -> float:
    if pace.speed is not None:
        per_unit = 1 / pace.speed
    elif pace.packets_per_second is not None:
        per_unit = _NS / pace.packets_per_second
    elif pace.bits_per_second is not None:
        per_unit = _NS / pace.bits_per_second
    else:
        per_unit = 0.0
    return min(per_unit, float(_FOREVER_NS))  # finite, whatever was asked for
