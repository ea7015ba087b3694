"""A device in memory: what a test injects is received, what is transmitted can be looked at.

The twin of a TUN. It finishes a partial checksum as the kernel behind a TUN would, so that what arrives is a packet as
a host would see it. The queue towards the engine is finite, as a TUN's is.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from dataplane.batch import Batch
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
        self._queue: deque[bytes] = deque()
        self._queue_length = queue_length
        self.room = room
        self.delivered: list[bytes] = []
        self.refused_injections = 0
        self._ready: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    @property
    def mtu(self) -> int:
        """As given, in bytes."""
        return self._mtu

    def inject(self, packet: bytes) -> bool:
        """Let the host send `packet`; False, and counted, if the queue is full."""
        if len(self._queue) >= self._queue_length:
            self.refused_injections += 1
            return False
        self._queue.append(packet)
        if self._ready is not None and len(self._queue) == 1:
            asyncio.get_running_loop().call_soon(self._notify)
        return True

    def _notify(self) -> None:
        if self._ready is None or not self._queue:
            return
        self._ready()
        asyncio.get_running_loop().call_soon(self._notify)

    def receive(self, batch: Batch) -> None:
        """Take from the queue."""
        while self._queue and not batch.is_full:
            batch.put(self._queue.popleft())

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
        self._ready = ready
        asyncio.get_running_loop().call_soon(self._notify)

    def unwatch(self) -> None:
        """Injected packets stay in the queue."""
        self._ready = None

    def close(self) -> None:
        """Stop watching."""
        self.unwatch()
