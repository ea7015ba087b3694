"""The paths that a capture takes without root: in memory, and over two UDP sockets on loopback.

Theory of operation: a batch describes packets of the chunk where they lie. The sender's half of the engine judges them and
lays datagrams out. In memory what it laid out is at once what the receiver's half finds; on loopback the real underlay
sends it and another one receives it. The receiver's half unpacks, judges and strips, and what comes out is compared with
what went in, byte by byte. The clock is read between the stages, once a batch.

`ReversePath` is the second half alone, for captures of datagrams: unpack, judge, strip.
"""

import time
from bisect import bisect_right
from collections.abc import Callable

from bench.replay.chunk import Chunk
from bench.replay.pacing import Pacer
from bench.replay.results import Histogram
from bench.replay.sides import Sides
from bench.replay.verify import Recogniser, count_differences
from dataplane.batch import Batch
from dataplane.engine import Direction
from dataplane.inbound import decapsulate, unpack
from dataplane.outbound import Outbound, judge_batch
from dataplane.underlay import Underlay
from dataplane.verdict import Verdict, by_name

BATCH = 256
LANES = 8
_LARGEST_DATAGRAM = 66_000
_IN_FLIGHT_BYTES = 1 << 18
"""About how much waits in a socket's buffer at a time: what it holds where it may not be enlarged."""

_RECEIVE_ATTEMPTS = 200
_QUIET_NS = 50_000_000
_FORWARDED = int(Verdict.FORWARDED)


class ReplayPath:
    """What paths have in common: the counters, which grow, and going through a chunk batch by batch."""

    def __init__(self, sides: Sides, stages: tuple[str, ...], now: Callable[[], int]) -> None:
        self.outbound = Direction()
        self.inbound = Direction()
        self.stages_ns = dict.fromkeys(stages, 0)
        self.latency = Histogram()
        self.corrupted = 0
        self.lost = 0
        self.reordered = 0
        self.sides = sides
        self._now = now
        self._batch_bytes = 0
        """About how much a batch may hold; 0: as much as it has."""

    @property
    def delivered_packets(self) -> int:
        """How many came out so far."""
        return self.inbound.verdicts[_FORWARDED]

    @property
    def delivered_bytes(self) -> int:
        """The bytes of those."""
        return self.inbound.forwarded_bytes

    def carry(self, chunk: Chunk, pacer: Pacer) -> int:
        """Carry the packets of `chunk` at the pacer's pace; returns how long it took, in nanoseconds."""
        batch = Batch(BATCH, memoryview(chunk.data))
        pacer.load(chunk)
        pacer.start()
        started = self._now()
        position = 0
        while position < len(chunk):
            moment = pacer.wait(position)
            count = pacer.due(position, BATCH, moment)
            if self._batch_bytes:
                end = bisect_right(chunk.offset, chunk.offset[position] + self._batch_bytes, position, position + count)
                count = end - position
            chunk.describe(batch, position, count)
            self._carry_batch(batch)
            pacer.sent(position, count, moment)
            position += count
        taken = self._now() - started
        pacer.stop()
        return taken

    def _carry_batch(self, batch: Batch) -> None:
        raise NotImplementedError


class MemoryPath(ReplayPath):
    """Lookup, encapsulation, decapsulation and comparison, without a system call."""

    def __init__(self, sides: Sides, now: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__(sides, ("lookup", "encapsulate", "receive", "decapsulate", "compare"), now)
        self._layout = new_layout()
        self._arrived = Batch(BATCH, self._layout.trains.data)
        self._pieces = Batch(BATCH, self._layout.trains.data)

    def _carry_batch(self, batch: Batch) -> None:
        now, stages, sides, pieces = self._now, self.stages_ns, self.sides, self._pieces
        begun = now()
        going = judge_batch(batch, sides.sending)
        looked_up = now()
        self._layout.start(LANES, 64)
        self._layout.lay_out(batch, sides.sending)
        laid_out = now()
        unpack(self._hand_over(), pieces, sides.receiving, 0)
        found = now()
        decapsulate(pieces, sides.receiving)
        stripped = now()
        self.corrupted += count_differences(batch, pieces, sides.sending.is_vxlan)
        compared = now()
        stages["lookup"] += looked_up - begun
        stages["encapsulate"] += laid_out - looked_up
        stages["receive"] += found - laid_out
        stages["decapsulate"] += stripped - found
        stages["compare"] += compared - stripped
        if going:
            self.latency.record(stripped - begun, going)
        self.outbound.count(batch)
        self.inbound.count(pieces)

    def _hand_over(self) -> Batch:
        """The trains as a receiver finds them, all from the sender's one address, which is VTEP 0."""
        trains, arrived = self._layout.trains, self._arrived
        count = trains.count
        arrived.offset[:count] = trains.offset[:count]
        arrived.length[:count] = trains.length[:count]
        arrived.stride[:count] = trains.stride[:count]
        arrived.count = count
        return arrived


class LoopbackPath(ReplayPath):
    """The same over real sockets: `sender` and `receiver` are two underlays that reach each other."""

    def __init__(
        self, sides: Sides, sender: Underlay, receiver: Underlay, now: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        super().__init__(sides, ("lookup", "encapsulate", "send", "receive", "decapsulate", "compare"), now)
        self._batch_bytes = _IN_FLIGHT_BYTES
        self._sender = sender
        self._receiver = receiver
        self._may_be_late = False
        self._recogniser = Recogniser(sender.lanes)
        self._layout = new_layout()
        self._arrived = Batch(BATCH)
        self._pieces = Batch(BATCH, self._arrived.data)

    def _carry_batch(self, batch: Batch) -> None:
        now, stages, sides, pieces = self._now, self.stages_ns, self.sides, self._pieces
        layout, trains = self._layout, self._layout.trains
        if self._may_be_late:
            self._discard()
        begun = now()
        judge_batch(batch, sides.sending)
        looked_up = now()
        layout.start(self._sender.lanes, self._sender.max_segments)
        layout.lay_out(batch, sides.sending)
        laid_out = now()
        if self._sender.transmit(trains, sides.sending.endpoints) < trains.count:
            _settle(batch, trains)
        sent = now()
        expected = batch.count_of(_FORWARDED)
        self._receive(expected)
        received = now()
        decapsulate(pieces, sides.receiving)
        stripped = now()
        self._compare(batch)
        compared = now()
        stages["lookup"] += looked_up - begun
        stages["encapsulate"] += laid_out - looked_up
        stages["send"] += sent - laid_out
        stages["receive"] += received - sent
        stages["decapsulate"] += stripped - received
        stages["compare"] += compared - stripped
        if pieces.count:
            self.latency.record(stripped - begun, pieces.count)
        self.outbound.count(batch)
        self.inbound.count(pieces)

    def _receive(self, expected: int) -> None:
        """Until all that was sent is there; what has not come after many looks and some time is lost."""
        arrived, pieces, table = self._arrived, self._pieces, self.sides.receiving
        arrived.clear()
        pieces.count = 0
        looks = 0
        latest = self._now()
        while pieces.count < expected and not arrived.is_full:
            before = arrived.count
            self._receiver.receive(arrived, table.origins)
            if arrived.count > before:
                unpack(arrived, pieces, table, 0)
                looks, latest = 0, self._now()
            elif looks >= _RECEIVE_ATTEMPTS and self._now() - latest >= _QUIET_NS:
                self._may_be_late = True
                break
            else:
                looks += 1

    def _discard(self) -> None:
        """What was lost and comes now must not be taken for packets of the next batch."""
        self._may_be_late = False
        self._arrived.clear()
        self._receiver.receive(self._arrived, self.sides.receiving.origins)
        while self._arrived.count:
            self._arrived.clear()
            self._receiver.receive(self._arrived, self.sides.receiving.origins)

    def _compare(self, batch: Batch) -> None:
        """What was changed shows twice, as a packet that is missing and as a piece that nobody knows."""
        one = self._recogniser
        one.recognise(batch, self._pieces, self.sides.sending.is_vxlan)
        self.reordered += one.reordered
        self.corrupted += one.strange
        self.lost += max(one.missing - one.strange, 0)


class ReversePath(ReplayPath):
    """Datagrams that were captured: find, judge and strip. What comes out has no original to be compared with."""

    def __init__(self, sides: Sides, now: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__(sides, ("receive", "decapsulate"), now)
        self._pieces: Batch | None = None

    def carry(self, chunk: Chunk, pacer: Pacer) -> int:
        """See `ReplayPath`. The way in takes from the TTL where a datagram lies, and the next loop wants it as captured."""
        if self.sides.receiving.is_vxlan:
            return super().carry(chunk, pacer)
        kept = chunk.data[: chunk.end]
        taken = super().carry(chunk, pacer)
        chunk.data[: chunk.end] = kept
        return taken

    def _carry_batch(self, batch: Batch) -> None:
        pieces = Batch(BATCH, batch.data) if self._pieces is None or self._pieces.data is not batch.data else self._pieces
        self._pieces = pieces
        begun = self._now()
        unpack(batch, pieces, self.sides.receiving, 0)
        found = self._now()
        forwarded = decapsulate(pieces, self.sides.receiving)
        stripped = self._now()
        self.stages_ns["receive"] += found - begun
        self.stages_ns["decapsulate"] += stripped - found
        if forwarded:
            self.latency.record(stripped - begun, forwarded)
        self.outbound.received += batch.count
        self.outbound.verdicts[_FORWARDED] += batch.count
        self.inbound.count(pieces)


def new_layout() -> Outbound:
    """One that a batch always fits, whatever its packets are, if they are no superpackets."""
    return Outbound(BATCH * _LARGEST_DATAGRAM, BATCH)


def _settle(batch: Batch, trains: Batch) -> None:
    """Give the packets of refused trains their verdicts."""
    for train in range(trains.count):
        if trains.verdict[train] != _FORWARDED:
            for index in range(trains.head[train], trains.last[train] + 1):
                if batch.verdict[index] == _FORWARDED:
                    batch.verdict[index] = trains.verdict[train]


def verdicts(path: ReplayPath) -> dict[str, dict[str, int]]:
    """By direction and name, those that occurred."""
    return {
        way: {name: count for name, count in by_name(direction.verdicts).items() if count}
        for way, direction in (("outbound", path.outbound), ("inbound", path.inbound))
    }
