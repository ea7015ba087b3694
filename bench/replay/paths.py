"""The paths that a capture takes without root: in memory, and over two UDP sockets on loopback.

Theory of operation: a batch describes packets of the chunk where they lie. The sender's half of the engine judges them and
lays datagrams out. In memory what it laid out is at once what the receiver's half finds; on loopback the real underlay
sends it and another one receives it. The receiver's half unpacks, judges and strips, and what comes out is compared with
what went in, byte by byte. The clock is read between the stages, once a batch.

`ReversePath` is the second half alone, for captures of datagrams: unpack, judge, strip.
"""

import time
from collections.abc import Callable

from bench.replay.chunk import Chunk
from bench.replay.pacing import Pacer
from bench.replay.results import Histogram
from bench.replay.sides import Sides
from bench.replay.verify import count_differences, is_same
from dataplane.batch import Batch
from dataplane.engine import Direction
from dataplane.inbound import decapsulate, unpack
from dataplane.outbound import Outbound, judge_batch
from dataplane.underlay import Underlay
from dataplane.verdict import Verdict, by_name

BATCH = 256
_LARGEST_DATAGRAM = 66_000
_LANES = 8
_RECEIVE_ATTEMPTS = 200
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
        offsets, lengths = memoryview(chunk.offset), memoryview(chunk.length)
        pacer.load(chunk)
        pacer.start()
        started = self._now()
        position = 0
        while position < len(chunk):
            moment = pacer.wait(position)
            count = pacer.due(position, BATCH, moment)
            batch.offset[:count] = offsets[position : position + count]
            batch.length[:count] = lengths[position : position + count]
            batch.count = count
            self._carry_batch(batch)
            pacer.sent(position, count, moment)
            position += count
        taken = self._now() - started
        pacer.stop()
        for column in (offsets, lengths):
            column.release()
        return taken

    def _carry_batch(self, batch: Batch) -> None:
        raise NotImplementedError


class MemoryPath(ReplayPath):
    """Lookup, encapsulation, decapsulation and comparison, without a system call."""

    def __init__(self, sides: Sides, now: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__(sides, ("lookup", "encapsulate", "receive", "decapsulate", "compare"), now)
        self._layout = Outbound(BATCH * _LARGEST_DATAGRAM, BATCH)
        self._arrived = Batch(BATCH, self._layout.trains.data)
        self._pieces = Batch(BATCH, self._layout.trains.data)

    def _carry_batch(self, batch: Batch) -> None:
        now, stages, sides, pieces = self._now, self.stages_ns, self.sides, self._pieces
        begun = now()
        going = judge_batch(batch, sides.sending)
        looked_up = now()
        self._layout.start(_LANES, 64)
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
        self._sender = sender
        self._receiver = receiver
        self._layout = Outbound(BATCH * _LARGEST_DATAGRAM, BATCH)
        self._arrived = Batch(BATCH)
        self._pieces = Batch(BATCH, self._arrived.data)

    def _carry_batch(self, batch: Batch) -> None:
        now, stages, sides, pieces = self._now, self.stages_ns, self.sides, self._pieces
        layout, trains = self._layout, self._layout.trains
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
        self._compare(batch, expected)
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
        """Until all that was sent is there; what has not come after so many looks at an empty socket is lost."""
        arrived, pieces, table = self._arrived, self._pieces, self.sides.receiving
        arrived.clear()
        pieces.count = 0
        looks = 0
        while pieces.count < expected and looks < _RECEIVE_ATTEMPTS and not arrived.is_full:
            before = arrived.count
            self._receiver.receive(arrived, table.origins)
            if arrived.count > before:
                unpack(arrived, pieces, table, 0)
            else:
                looks += 1

    def _compare(self, batch: Batch, expected: int) -> None:
        """In step where everything came; else by content, which is slow, and tells what is lost from what was changed."""
        pieces, is_vxlan = self._pieces, self.sides.sending.is_vxlan
        if pieces.count == expected:
            self.corrupted += count_differences(batch, pieces, is_vxlan)
            return
        self.lost += max(expected - pieces.count, 0)
        waiting = [i for i in range(batch.count) if batch.verdict[i] == _FORWARDED]
        for j in range(pieces.count):
            found = next((i for i in waiting if _is_same(batch, i, pieces, j, is_vxlan)), None)
            if found is None:
                self.corrupted += 1
            else:
                waiting.remove(found)


class ReversePath(ReplayPath):
    """Datagrams that were captured: find, judge and strip. What comes out has no original to be compared with."""

    def __init__(self, sides: Sides, now: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__(sides, ("receive", "decapsulate"), now)
        self._pieces: Batch | None = None

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


def _settle(batch: Batch, trains: Batch) -> None:
    """Give the packets of refused trains their verdicts."""
    for train in range(trains.count):
        if trains.verdict[train] != _FORWARDED:
            for index in range(trains.head[train], trains.last[train] + 1):
                if batch.verdict[index] == _FORWARDED:
                    batch.verdict[index] = trains.verdict[train]


def _is_same(a: Batch, i: int, b: Batch, j: int, is_vxlan: bool) -> bool:
    return b.verdict[j] == _FORWARDED and bool(
        is_same(a.data, a.offset[i], a.length[i], b.data, b.offset[j], b.length[j], is_vxlan)
    )


def verdicts(path: ReplayPath) -> dict[str, dict[str, int]]:
    """By direction and name, those that occurred."""
    return {
        way: {name: count for name, count in by_name(direction.verdicts).items() if count}
        for way, direction in (("outbound", path.outbound), ("inbound", path.inbound))
    }
