"""A device in memory: what a test injects is received, what is transmitted can be looked at.

The twin of a TUN. It finishes a partial checksum as the kernel behind a TUN would, so that what arrives is a packet as
a host would see it. The queue towards the engine is finite, as a TUN's is.
"""

from collections.abc import Callable

from dataplane.batch import Batch
from dataplane.mailbox import Mailbox
from dataplane.verdict import Verdict
from encap import vnet
from encap.checksum import finish

QUEUE_LENGTH = 1000


class MemoryDevice:
    """A `Device` without a kernel.

    `inject` plays the host's part of sending; `delivered` holds what the host received. With `room` set, only so many
    packets fit into `delivered`, and more are refused as QUEUE_FULL.
    """

    def __init__(
        self, name: str = "memory0", mtu: int = 1450, *, queue_length: int = QUEUE_LENGTH, room: int | None = None
    ) -> None:
        self._name = name
        self._mtu = mtu
        self._queue: Mailbox[bytes] = Mailbox(queue_length)
        self.room = room
        self.delivered: list[bytes] = []

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    @property
    def mtu(self) -> int:
        """As given, in bytes."""
        return self._mtu

    def inject(self, packet: bytes) -> bool:
        """Let the host send `packet`; False if the queue is full."""
        return self._queue.put(packet)

    def receive(self, batch: Batch) -> None:
        """Take from the queue."""
        while self._queue and not batch.is_full:
            batch.put(self._queue.take())

    def transmit(self, batch: Batch) -> None:
        """Append to `delivered`."""
        for i in batch.indices(Verdict.FORWARDED):
            if self.room is not None and len(self.delivered) >= self.room:
                batch.verdict[i] = Verdict.QUEUE_FULL
                continue
            header = vnet.parse(batch.packet(i, lead=vnet.VNET_LENGTH), 0)
            packet = bytearray(batch.packet(i))
            if header.flags & vnet.FLAG_NEEDS_CSUM:
                finish(packet, header.csum_start, len(packet), header.csum_start + header.csum_offset)
            self.delivered.append(bytes(packet))

    def watch(self, ready: Callable[[], None]) -> None:
        """From now on; packets already injected count."""
        self._queue.watch(ready)

    def unwatch(self) -> None:
        """Injected packets stay in the queue."""
        self._queue.unwatch()

    def close(self) -> None:
        """Stop watching."""
        self.unwatch()
