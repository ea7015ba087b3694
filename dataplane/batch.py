"""A batch: one block of bytes with fixed slots and headroom, and parallel columns that describe what is in them.

Layout of a slot: `HEADROOM` bytes, then up to 65 535 bytes as they were received. A tunnel header is written into the
headroom in front of a packet; a stripped one leaves its room there; the ten bytes before an inner packet are its
virtio-net header (``encap.vnet``), on its way from a device as on its way to one. So a packet is never moved.

Slots are 65 792 bytes apart, a multiple of 64 but not of 4096: with a power of two, the headers of all slots would share
one set of the first-level cache. Untouched pages of the block cost no memory.

Columns, one entry a slot: `offset` and `length` of the packet in `data`; `peer`, the row of its route on the way out, the
number of the VTEP it came from on the way in; `stride`, the size of each piece inside one coalesced buffer (0: a single
packet); `flow`, a hash for the outer source port; `verdict`. `count` slots are in use.

Ownership: the batch belongs to whoever made it. Devices and underlays fill it (`slots`, then `add` for each packet) or read
it, during the call only.
"""

from array import array

from dataplane.verdict import Verdict
from encap.vnet import VNET_LENGTH

HEADROOM = 64
MAX_PACKET_LENGTH = 65535
_SLOT_SIZE = 65792
_FORWARDED = int(Verdict.FORWARDED)


class Batch:
    """`capacity` slots and their columns. See the module."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.data = memoryview(bytearray(capacity * _SLOT_SIZE))
        self.slots = [self._slot(i) for i in range(capacity)]
        """Where packet i is to be received: MAX_PACKET_LENGTH writable bytes."""
        self.vnet_slots = [self._slot(i, lead=VNET_LENGTH) for i in range(capacity)]
        """The same with the ten bytes of a virtio-net header in front."""
        self.offset = self._column()
        self.length = self._column()
        self.peer = self._column()
        self.stride = self._column()
        self.flow = self._column()
        self.verdict = self._column()

    def _slot(self, index: int, lead: int = 0) -> memoryview:
        start = index * _SLOT_SIZE + HEADROOM
        return self.data[start - lead : start + MAX_PACKET_LENGTH]

    def _column(self) -> memoryview:
        return memoryview(array("i", bytes(4 * self.capacity)))

    def clear(self) -> None:
        """Forget all packets."""
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return self.count == self.capacity

    def add(self, length: int, peer: int = 0, stride: int = 0) -> None:
        """Take the `length` bytes now in the next free slot as a received packet."""
        index = self.count
        self.offset[index] = index * _SLOT_SIZE + HEADROOM
        self.length[index] = length
        self.peer[index] = peer
        self.stride[index] = stride
        self.verdict[index] = 0
        self.count = index + 1

    def put(self, packet: bytes | bytearray | memoryview, peer: int = 0) -> None:
        """Copy `packet` into the next free slot, for packets that we make ourselves and for tests."""
        self.slots[self.count][: len(packet)] = packet
        self.add(len(packet), peer)

    def packet(self, index: int, lead: int = 0) -> memoryview:
        """The bytes of packet `index`, with `lead` bytes of what stands before it."""
        start = self.offset[index]
        return self.data[start - lead : start + self.length[index]]

    def indices(self, verdict: int) -> list[int]:
        """Which packets have `verdict`."""
        return indices_of(self.verdict, self.count, verdict)


def indices_of(verdicts: memoryview, count: int, verdict: int) -> list[int]:
    """The places below `count` at which `verdicts` holds `verdict`."""
    return [i for i in range(count) if verdicts[i] == verdict]


def tally(verdicts: memoryview, lengths: memoryview, count: int, counts: "array[int]") -> int:
    """Count each of the first `count` verdicts in `counts`; returns the bytes of the packets forwarded."""
    forwarded = 0
    for i in range(count):
        counts[verdicts[i]] += 1
        if verdicts[i] == _FORWARDED:
            forwarded += lengths[i]
    return forwarded
