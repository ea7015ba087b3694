"""A batch: one block of bytes with fixed slots and headroom, and parallel columns that describe what is in them.

Layout of a slot: `HEADROOM` bytes, then up to 65 535 bytes as they were received. Slots are 65 792 bytes apart, a multiple
of 64 but not of 4096: with a power of two, the headers of all slots would share one set of the first-level cache. Untouched
pages of the block cost no memory.

Columns, one number an entry. In every batch: `offset` and `length` in `data`; `verdict`. And, by what the batch holds:

* as received: `peer`, the number of the VTEP it came from (inbound); `stride`, the size of each datagram in one coalesced
  buffer (0: a single one). After a judgement outbound: `peer`, the row of the packet's route, and `flow`, its hash.
* *pieces*, the packets found in received buffers: `peer` as above, and after the judgement, of those that come in, the row
  of the inner source; `stride`, the segment size of a packet that is to be
  segmented (0: none); `head`, the entry that this packet was merged into, itself if it was not; `last`, where the buffer
  that it lies in ends.
* *trains*, datagrams for one endpoint in one run: `peer`, the row; `stride`, the size of each (the last may be shorter);
  `flow`, the lane; `head` and `last`, the first and last packet in it.

`vnet` holds ten bytes an entry: its packet's virtio-net header (``encap.vnet``), on its way from a device as on its
way to one.

Ownership: the batch belongs to whoever made it. Devices and underlays fill it (`slots`, then `add` for each packet) or read
it, during the call only.
"""

import mmap
from array import array

from dataplane.verdict import Verdict
from encap.vnet import VNET_LENGTH

HEADROOM = 64
MAX_PACKET_LENGTH = 65535
SLOT_SIZE = 65792
_SLOT_SIZE = SLOT_SIZE
_HEADROOM = HEADROOM
_FORWARDED = int(Verdict.FORWARDED)

PEER_NUMBERS = 3
"""What `Batch.tally` counts for a row: packets, bytes, and the time of the last one."""
_PEER_NUMBERS = PEER_NUMBERS


def block(size: int) -> memoryview:
    """`size` zero bytes, of which only the pages that are used cost memory; a bytearray would touch them all."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Batch:
    """`capacity` entries; as many slots, or none if the bytes of another block are described (`data`).

    The compiled loops read the same columns through the attributes that end in ``_c``, which are typed in ``batch.pxd``.
    """

    def __init__(self, capacity: int, data: memoryview | None = None) -> None:
        self.capacity = capacity
        self.limit = capacity
        """How many entries may be received now."""
        self.count = 0
        self.data = block(capacity * _SLOT_SIZE) if data is None else data
        self.vnet = memoryview(bytearray(capacity * VNET_LENGTH))
        self.slots = [self._slot(i) for i in range(capacity)] if data is None else []
        """Where packet i is to be received: MAX_PACKET_LENGTH writable bytes."""
        self.vnet_slots = [(self.vnet_header(i), slot) for i, slot in enumerate(self.slots)]
        """The same behind its virtio-net header, for a scattered read."""
        self.offset, self.length, self.verdict = self._column(), self._column(), self._column()
        self.peer, self.stride, self.flow = self._column(), self._column(), self._column()
        self.head, self.last = self._column(), self._column()
        self.data_c, self.vnet_c = self.data, self.vnet
        self.offset_c, self.length_c, self.verdict_c = self.offset, self.length, self.verdict
        self.peer_c, self.stride_c, self.flow_c = self.peer, self.stride, self.flow
        self.head_c, self.last_c = self.head, self.last

    def _slot(self, index: int) -> memoryview:
        start = index * _SLOT_SIZE + HEADROOM
        return self.data[start : start + MAX_PACKET_LENGTH]

    def _column(self) -> memoryview:
        return memoryview(array("i", bytes(4 * self.capacity)))

    def clear(self, limit: int = 0) -> None:
        """Forget all entries; receive at most `limit` new ones (0: as many as fit)."""
        self.count = 0
        self.limit = limit or self.capacity

    @property
    def is_full(self) -> bool:
        """Whether no more may be received."""
        return self.count >= self.limit

    def free_slot(self) -> int:
        """The offset in `data` of the next free slot."""
        return self.count * _SLOT_SIZE + _HEADROOM

    def add(self, length: int, peer: int = 0, stride: int = 0) -> None:
        """Take the `length` bytes now in the next free slot as received."""
        index = self.count
        self.offset_c[index] = index * _SLOT_SIZE + _HEADROOM
        self.length_c[index] = length
        self.peer_c[index] = peer
        self.stride_c[index] = stride
        self.verdict_c[index] = 0
        self.head_c[index] = index
        self.count = index + 1

    def put(self, packet: bytes | bytearray | memoryview, peer: int = 0, stride: int = 0, vnet: bytes = bytes(10)) -> None:
        """Copy `packet` into the next free slot, for packets that we make ourselves and for devices in memory."""
        self.slots[self.count][: len(packet)] = packet
        self.vnet_header(self.count)[:] = vnet
        self.add(len(packet), peer, stride)

    def packet(self, index: int) -> memoryview:
        """The bytes of entry `index`."""
        start = self.offset[index]
        return self.data[start : start + self.length[index]]

    def vnet_header(self, index: int) -> memoryview:
        """The ten bytes of entry `index`."""
        return self.vnet[index * VNET_LENGTH : (index + 1) * VNET_LENGTH]

    def indices(self, verdict: int) -> list[int]:
        """Which entries have `verdict`."""
        return [i for i in range(self.count) if self.verdict_c[i] == verdict]

    def count_of(self, verdict: int) -> int:
        """How many entries have `verdict`."""
        found = 0
        for i in range(self.count):
            found += self.verdict_c[i] == verdict
        return found

    def tally(self, counts: "array[int]", peers: "array[int] | None" = None, now: int = 0) -> int:
        """Count each entry's verdict in `counts`; returns the bytes of the packets forwarded.

        Those are counted in `peers`, too, if it is there: PEER_NUMBERS for each row, of which the last becomes `now`.
        """
        forwarded = 0
        for i in range(self.count):
            verdict = self.verdict_c[i]
            counts[verdict] += 1
            if verdict == _FORWARDED:
                length = self.length_c[i]
                forwarded += length
                if peers is not None:
                    at = self.peer_c[i] * _PEER_NUMBERS
                    peers[at] += 1
                    peers[at + 1] += length
                    peers[at + 2] = now
        return forwarded

    def share_verdicts(self) -> None:
        """Give each entry the verdict of the one that it was merged into."""
        for i in range(self.count):
            self.verdict_c[i] = self.verdict_c[self.head_c[i]]
