"""From capture files to chunks of inner packets that fit the overlay.

Theory of operation: records are read one by one; of each the inner IP packet is found, or a reason why there is none is
counted; it is copied into the chunk and there given addresses of the overlay. A chunk that is full is handed out, and
filled anew when the next one is asked for, so memory does not grow with the capture. A capture that fits into one chunk is
read once and handed out again in every loop.

With a `Decapsulation` the capture holds an overlay's datagrams. Then what is packed is their UDP payload, with the header
as it was captured but for what says whom it is for, the VNI and the inner destination MAC: those become the receiver's.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from bench.replay import capture
from bench.replay.chunk import CHUNK_BYTES, Chunk
from bench.replay.linklayer import Unusable, encapsulated, inner_packet
from bench.replay.results import Trace, TraceCounter
from encap import checksum, ip, vxlan
from encap.fields import WritableOctets

_VNI_AT, _MAC_AT = 4, 8  # in a VXLAN header (RFC 7348 section 5), and in the Ethernet header behind it
NOT_ENCAPSULATED = "no datagram of an overlay"
OTHER_FRAMING = "a datagram of the other framing"


class Fitter(Protocol):
    """What gives packets their place in the overlay."""

    def rewrite(self, packet: WritableOctets, at: int, length: int) -> None:
        """Change addresses and checksums in place."""


class Decapsulation:
    """How captured datagrams are made ours: the receiving node's framing, VNI and MAC."""

    def __init__(self, framing: str, vni: int, mac: bytes) -> None:
        self.framing = framing
        self.header_length = vxlan.HEADER_LENGTH if framing == "vxlan" else 0
        self._vni = vni.to_bytes(3, "big")
        self._mac = mac

    def adopt(self, data: bytearray, at: int, length: int) -> None:
        """Address the datagram data[at:at + length] to us, if it has a header to say so in."""
        if self.header_length and length >= self.header_length:
            data[at + _VNI_AT : at + _VNI_AT + 3] = self._vni
            data[at + _MAC_AT : at + _MAC_AT + 6] = self._mac


class Loader:
    """The inner packets of `paths`, in chunks. `trouble` hears of files that end in the middle. Raises CaptureError."""

    def __init__(
        self,
        paths: Sequence[Path],
        fitter: Fitter,
        *,
        trouble: Callable[[str], None],
        decapsulation: Decapsulation | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        """Records that were left out, by reason, of one time through."""
        self.records = 0
        """Records that were read, of one time through."""
        self.read_ns = 0
        """How long reading, fitting and packing took the first time, in nanoseconds."""
        self._paths = paths
        self._fitter = fitter
        self._trouble = trouble
        self._decapsulation = decapsulation
        self._counter = TraceCounter()
        self._chunk = Chunk(chunk_bytes)
        self._is_whole = False
        self._is_counted = False

    def chunks(self) -> Iterator[Chunk]:
        """Once through the capture. A chunk is valid until the next one is asked for."""
        if self._is_whole:
            yield self._chunk
            return
        handed_out = 0
        self.skipped.clear()
        self.records = 0
        started = time.perf_counter_ns()
        for _ in self._fill():
            self._took(started)
            handed_out += 1
            self._count()
            yield self._chunk
            self._chunk.clear()
            started = time.perf_counter_ns()
        self._took(started)
        if len(self._chunk) or not handed_out:
            self._count()
            self._is_whole = handed_out == 0
            yield self._chunk
        self._is_counted = True

    def trace(self, name: str) -> Trace:
        """What one time through was made of; see `results.Trace`."""
        return self._counter.trace(name, dict(self.skipped))

    def _took(self, started: int) -> None:
        if not self._is_counted:
            self.read_ns += time.perf_counter_ns() - started

    def _count(self) -> None:
        if not self._is_counted:
            self._counter.add(self._chunk)

    def _fill(self) -> Iterator[None]:
        """Pack every packet; yields whenever the chunk is full and must be used first."""
        self._chunk.clear()
        for record in capture.read_all(self._paths, self._trouble):
            self.records += 1
            found = self._find(record)
            if isinstance(found, str):
                self.skipped[found] += 1
                continue
            at, length = found
            if not self._chunk.has_room(length):
                yield
            start = self._chunk.end
            self._chunk.append(record.data[at : at + length], record.time_ns)
            self._fit(start, length)

    def _find(self, record: capture.Record) -> tuple[int, int] | str:
        """Where in the record's data lies what is to be packed, or why there is nothing."""
        found = inner_packet(record)
        if isinstance(found, Unusable):
            return found.name.lower()
        if self._decapsulation is None:
            return found
        datagram = encapsulated(record.data, *found)
        if datagram is None:
            return NOT_ENCAPSULATED
        if datagram.framing != self._decapsulation.framing:
            return OTHER_FRAMING
        return datagram.offset, datagram.length

    def _fit(self, at: int, length: int) -> None:
        data = self._chunk.data
        header_length = 0
        if self._decapsulation is not None:
            self._decapsulation.adopt(data, at, length)
            header_length = min(self._decapsulation.header_length, length)
        inner_at, room = at + header_length, length - header_length
        inner_length = min(ip.stated_length(data, inner_at, room), room) if header_length else room
        _finish_checksum(data, inner_at, inner_length)
        self._fitter.rewrite(data, inner_at, inner_length)


def _finish_checksum(data: bytearray, at: int, length: int) -> None:
    """Complete a TCP or UDP checksum that the sender had left to its network card when it was captured there."""
    if ip.check(data, at, length):
        return
    where = ip.partial_checksum(data, at, length)
    if where:
        start, offset = where >> 8, where & 0xFF
        checksum.finish(data, at + start, at + length, at + start + offset)
