"""The host behind a device in memory: answers pings, has UDP sockets, and keeps what it received.

Theory of operation: the device hands over every packet that the engine delivers. An echo request for any address of the
node's subnets is answered as a pod there would; an echo reply ends the wait of whoever sent the request; a UDP datagram
goes to the socket that is open on its port. A packet whose checksum is wrong is counted, and nobody gets it, as behind a
kernel. Everything is kept in `received`, damaged or not, understood or not: that is what the device delivered, as tcpdump
would show it there. ICMP errors that come back are kept in `errors`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from dataplane.overlay import inner
from routing.config import Address

KEPT = 10_000
_ICMP_ERRORS = {4: frozenset({3, 11, 12}), 6: frozenset({1, 2, 3, 4})}
"""Types: unreachable, time exceeded, parameter problem (RFC 792); for IPv6 with packet too big (RFC 4443)."""


@dataclass(frozen=True)
class IcmpError:
    """An ICMP error that came back. `mtu` is the next hop's where it tells one (too big), else 0; `about` is its quote."""

    source: Address
    type: int
    code: int
    mtu: int
    about: bytes


class OverlaySocket:
    """A UDP socket on the overlay, bound to `address` and `port`. Made by `OverlayNode.open_udp`.

    A context manager, which closes it.
    """

    def __init__(self, host: "OverlayHost", address: Address, port: int) -> None:
        self.address = address
        self.port = port
        self._host = host
        self._waiting: asyncio.Queue[tuple[bytes, tuple[Address, int]]] = asyncio.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def send_to(self, data: bytes, to: "tuple[Address, int] | OverlaySocket") -> None:
        """Send a datagram to an address and port, or to another socket.

        Raises ValueError if it is longer than the device's MTU: nothing here fragments.
        """
        address, port = (to.address, to.port) if isinstance(to, OverlaySocket) else to
        self._host.send(inner.udp(self.address, self.port, address, port, data))

    async def receive(self, timeout: float | None = None) -> tuple[bytes, tuple[Address, int]]:  # noqa: ASYNC109 - as of sockets
        """The next datagram, and whom it is from. Raises TimeoutError if none has come after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            return await self._waiting.get()

    def take(self) -> list[tuple[bytes, tuple[Address, int]]]:
        """All datagrams that have arrived and were not taken yet."""
        return [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]

    def put(self, data: bytes, source: tuple[Address, int]) -> None:
        """What the host hands over."""
        self._waiting.put_nowait((data, source))

    def close(self) -> None:
        """Free the port."""
        self._host.close_udp(self)


class OverlayHost:
    """See the module. `inject` sends a packet into the device (False: its queue is full), which carries `mtu` bytes; it is
    replaced when there is another device."""

    def __init__(self, mtu: int, inject: Callable[[bytes], bool]) -> None:
        self.received: deque[bytes] = deque(maxlen=KEPT)
        self.errors: deque[IcmpError] = deque(maxlen=KEPT)
        self.answers_pings = True
        self.refused = 0
        """Packets that found the device's queue full."""
        self.replies = 0
        """Echo replies that arrived, awaited or not."""
        self.bad_checksums = 0
        """Packets that were dropped for one: of the IPv4 header, ICMP, ICMPv6 or UDP."""
        self.inject = inject
        self._mtu = mtu
        self._sockets: dict[tuple[Address, int], OverlaySocket] = {}
        self._pings: dict[tuple[Address, int], asyncio.Future[None]] = {}

    def send(self, packet: bytes) -> None:
        """Send a whole IP packet. Raises ValueError if it is longer than the device's MTU."""
        if len(packet) > self._mtu:
            raise ValueError(f"the packet has {len(packet)} bytes, but the device's MTU is {self._mtu}")
        if not self.inject(packet):
            self.refused += 1

    def open_udp(self, address: Address, port: int) -> OverlaySocket:
        """Raises ValueError if the port is taken."""
        if (address, port) in self._sockets:
            raise ValueError(f"UDP port {port} of {address} is open already")
        made = self._sockets[address, port] = OverlaySocket(self, address, port)
        return made

    def close_udp(self, socket: OverlaySocket) -> None:
        """Forget `socket`; what arrives for it from now on is only kept."""
        self._sockets.pop((socket.address, socket.port), None)

    def expect_reply(self, address: Address, sequence: int, waiting: "asyncio.Future[None]") -> None:
        """End `waiting` when `address` replies to the echo request of this number."""
        self._pings[address, sequence] = waiting

    def forget_reply(self, address: Address, sequence: int) -> None:
        """Do not wait any more."""
        self._pings.pop((address, sequence), None)

    def deliver(self, packet: bytes) -> None:
        """What the device does with each packet for this host."""
        self.received.append(packet)
        try:
            parsed = inner.parse(packet)
        except inner.BadChecksumError:
            self.bad_checksums += 1
            return
        if parsed is None:
            return
        if parsed.is_icmp:
            self._icmp(parsed)
        elif parsed.is_udp:
            ports = int.from_bytes(parsed.body[:2], "big"), int.from_bytes(parsed.body[2:4], "big")
            found = self._sockets.get((parsed.destination, ports[1]))
            if found is not None:
                found.put(parsed.body[8:], (parsed.source, ports[0]))

    def _icmp(self, packet: inner.Parsed) -> None:
        version, body = packet.source.version, packet.body
        identifier, sequence = int.from_bytes(body[4:6], "big"), int.from_bytes(body[6:8], "big")
        if body[0] == inner.ECHO_REQUEST[version]:
            if self.answers_pings:
                reply = inner.echo(packet.destination, packet.source, identifier, sequence, body[8:], reply=True)
                if not self.inject(reply):
                    self.refused += 1
        elif body[0] == inner.ECHO_REPLY[version]:
            self.replies += 1
            waiting = self._pings.pop((packet.source, sequence), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        elif body[0] in _ICMP_ERRORS[version]:
            is_too_big = (version, body[0], body[1]) == (4, 3, 4) or (version, body[0]) == (6, 2)
            mtu = int.from_bytes(body[6:8] if version == 4 else body[4:8], "big") if is_too_big else 0
            self.errors.append(IcmpError(packet.source, body[0], body[1], mtu, body[8:]))
