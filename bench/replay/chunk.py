"""A chunk of a capture: inner IP packets one behind the other in one block, with their columns.

Layout: packet i is ``data[offset[i] : offset[i] + length[i]]``, each beginning on a multiple of 16 bytes, so that a chunk
can be described by a `Batch` without copying. `time_ns` is when it was captured, in nanoseconds since 1970.
"""

from array import array

from dataplane.batch import Batch

ALIGNMENT = 16
CHUNK_BYTES = 64 << 20
"""About how much is loaded at a time."""


class Chunk:
    """Grows by `append` until `is_full`; `clear` makes it empty and keeps its memory."""

    def __init__(self, size: int = CHUNK_BYTES) -> None:
        self._size = size
        self.data = bytearray(size)
        self.end = 0
        """How many bytes of `data` are used."""
        self.offset = array("i")
        self.length = array("i")
        self.time_ns = array("q")

    def __len__(self) -> int:
        return len(self.offset)

    def has_room(self, length: int) -> bool:
        """Whether a packet of `length` bytes still fits."""
        return self.end + length <= self._size

    def append(self, packet: bytes | bytearray | memoryview, time_ns: int) -> None:
        """Add an inner packet. Raises ValueError if it does not fit; ask `has_room` before."""
        length = len(packet)
        if not self.has_room(length):
            raise ValueError("the chunk is full")
        self.data[self.end : self.end + length] = packet
        self.offset.append(self.end)
        self.length.append(length)
        self.time_ns.append(time_ns)
        self.end += -(-length // ALIGNMENT) * ALIGNMENT

    def packet(self, index: int) -> bytes:
        """A copy of packet `index`, for people and tests."""
        start = self.offset[index]
        return bytes(self.data[start : start + self.length[index]])

    def describe(self, batch: Batch, first: int, count: int) -> None:
        """Make the entries of `batch`, whose block is `data`, `count` packets of this chunk from `first` on."""
        batch.offset[:count] = memoryview(self.offset)[first : first + count]
        batch.length[:count] = memoryview(self.length)[first : first + count]
        batch.count = count

    def clear(self) -> None:
        """Forget all packets."""
        self.end = 0
        for column in (self.offset, self.length, self.time_ns):
            del column[:]
