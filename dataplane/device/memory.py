"""A device in memory: what a test injects is received, what is transmitted can be looked at.

The twin of a TUN. It does what the kernel behind a TUN would: it finishes a partial checksum, and takes a superpacket
apart, so that what arrives are packets as a host without offloads would see them. Packets may be injected with a
virtio-net header, as a TUN with offloads would deliver them. The queue towards the engine is finite, as a TUN's is.
"""

import asyncio
from collections.abc import Callable

from dataplane.batch import MAX_PACKET_LENGTH, Batch
from dataplane.mailbox import Mailbox
from dataplane.verdict import Verdict
from encap import segment, vnet
from encap.checksum import finish

QUEUE_LENGTH = 1000


class MemoryDevice:
    """A `Device` without a kernel.

    `inject` plays the host's part of sending; `delivered` holds what the host received, in `writes` writes. With
    `room` set, only so many packets fit into `delivered`, and more are refused as QUEUE_FULL. With `deliver`, a host that
    does something with its packets, each is handed to that instead. `loop` is whose watcher is
    called, by default that of the loop that runs when watching begins.
    """

    def __init__(
        self,
        name: str = "memory0",
        mtu: int = 1450,
        *,
        queue_length: int = QUEUE_LENGTH,
        room: int | None = None,
        deliver: Callable[[bytes], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._name = name
        self._deliver = deliver
        self.mtu = mtu
        self._queue: Mailbox[tuple[bytes, bytes]] = Mailbox(queue_length, loop)
        self.room = room
        self.delivered: list[bytes] = []
        self.kept = False
        self.writes = 0

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def inject(self, packet: bytes, vnet_header: bytes = bytes(vnet.VNET_LENGTH)) -> bool:
        """Let the host send `packet`; False if the queue is full."""
        return self._queue.put((packet, vnet_header))

    def receive(self, batch: Batch) -> None:
        """Take from the queue."""
        while self._queue and not batch.is_full:
            packet, vnet_header = self._queue.take()
            batch.put(packet, vnet=vnet_header)

    def transmit(self, batch: Batch) -> None:
        """Append to `delivered`."""
        for i in batch.indices(Verdict.FORWARDED):
            if batch.head[i] != i:
                continue
            packets = self._as_on_a_wire(batch.packet(i), vnet.parse(batch.vnet_header(i), 0))
            if self.room is not None and len(self.delivered) + len(packets) > self.room:
                batch.verdict[i] = Verdict.QUEUE_FULL
                continue
            if self._deliver is None:
                self.delivered += packets
            else:
                for one in packets:
                    self._deliver(one)
            self.writes += 1

    def _as_on_a_wire(self, packet: memoryview, header: vnet.VnetHeader) -> list[bytes]:
        """The packet or the packets of the superpacket, their checksums complete."""
        if header.gso_type:
            scratch = memoryview(bytearray(MAX_PACKET_LENGTH))
            return [bytes(piece) for piece in segment.segments(packet, header, scratch)]
        whole = bytearray(packet)
        if header.flags & vnet.FLAG_NEEDS_CSUM:
            finish(whole, header.csum_start, len(whole), header.csum_start + header.csum_offset)
        return [bytes(whole)]

    def watch(self, ready: Callable[[], None]) -> None:
        """From now on; packets already injected count."""
        self._queue.watch(ready)

    def unwatch(self) -> None:
        """Injected packets stay in the queue."""
        self._queue.unwatch()

    def keep(self) -> None:
        """Notes it in `kept`, for the test that plays the host."""
        self.kept = True

    def close(self) -> None:
        """Stop watching."""
        self.unwatch()
