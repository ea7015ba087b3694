"""`OverlayNode`: a node in memory, what its host sends and receives, and how it comes and goes.

Theory of operation: between a `MemoryDevice` and a `FakeUnderlay` runs the real engine; behind the device sits an
`OverlayHost`. The overlay gives the node its table after each change in the book of leases. Its lease is renewed by a timer
in the background of the overlay's loop, as long as it runs and sees the store.
"""

import asyncio
import itertools
from typing import TYPE_CHECKING, Protocol, SupportsBytes

from dataplane.device.memory import MemoryDevice
from dataplane.engine import Engine
from dataplane.overlay import inner
from dataplane.overlay.host import OverlayHost, OverlaySocket
from dataplane.verdict import by_name
from routing.allocator import Subnets
from routing.config import Address, Network
from routing.lease import Lease, LeaseAttributes
from routing.stores import LeaseLostError
from routing.table import Identity, build

if TYPE_CHECKING:
    from dataplane.overlay.overlay import Overlay

_POD = 10
_ECHO_PAYLOAD = b"pyflannel-dp echo"
_RETRY_SECONDS = 5.0


class Cancellable(Protocol):
    """A timer, whichever kind of loop it is set in."""

    def cancel(self) -> None:
        """Do not call."""


class OverlayNode:
    """A node of an `Overlay`. Made by `Overlay.add_node`.

    `addresses` are its interface's on the underlay; `attributes` may have others, by which a NAT lets others reach it.
    """

    def __init__(
        self, overlay: "Overlay", number: int, name: str, addresses: list[str], attributes: LeaseAttributes, lease: Lease
    ) -> None:
        self.overlay = overlay
        self.number = number
        self.name = name
        self.addresses = addresses
        self.lease = lease
        self.attributes = attributes
        self.device = MemoryDevice(name, overlay.device_mtu, deliver=self._deliver, loop=overlay.loop)
        self.host = OverlayHost(overlay.device_mtu, self.device.inject)
        self.is_running = False
        self.sees_store = True
        self.failure: str | None = None
        """Why the node stopped by itself, as a real one would end."""
        self._renewal: Cancellable | None = None
        self._sequence = itertools.count(1)
        self._run()

    def _run(self) -> None:
        """Begin as a new process does, with counters at 0; the lease is there already."""
        self.underlay = self.overlay.underlay.attach(self.overlay.port, *self.addresses)
        nobody_yet = build(self.overlay.identity_of(self), [])  # the overlay gives it the table that holds, with all others
        self.engine = Engine(
            self.device,
            self.underlay,
            nobody_yet,
            buffers=self.overlay.buffers,
            now=self.overlay.loop.time,
            failed=self._engine_failed,
        )
        self.is_running = True
        self.engine.start()
        self.plan_renewal()

    def __repr__(self) -> str:
        return f"<{self.name} {self.lease.key} at {self.where}>"

    @property
    def where(self) -> str:
        """Its addresses on the underlay, and those by which others know it if they differ."""
        public = [str(one) for one in (self.attributes.public_ip, self.attributes.public_ipv6) if one is not None]
        behind_nat = "" if public == self.addresses else f" (outside {', '.join(public)})"
        return ", ".join(self.addresses) + behind_nat

    @property
    def identity(self) -> Identity:
        """What its table says of itself."""
        return self.overlay.identity_of(self)

    def pod(self, number: int = 0, version: int | None = None) -> Address:
        """The address of a pod in this node's subnet: the tenth address for pod 0, the eleventh for pod 1 …

        Raises ValueError if the node has no subnet of that IP version, or no such pod has an address in it.
        """
        version = version or (4 if self.lease.subnet is not None else 6)
        subnet: Network | None = self.lease.subnet if version == 4 else self.lease.ipv6_subnet
        if subnet is None:
            raise ValueError(f"{self.name} has no IPv{version} subnet")
        last = subnet.num_addresses - (2 if version == 4 else 1)  # IPv4's very last one is for broadcasts
        if not 0 <= number <= last - _POD:
            there = f"its pods are 0 to {last - _POD}" if last >= _POD else "it is too small for any"
            raise ValueError(f"{self.name} has no pod {number} in {subnet}: {there}")
        return subnet[_POD + number]

    # The host's part

    def send(self, packet: SupportsBytes | bytes) -> None:
        """Let the host send an inner packet: bytes, or what `bytes` makes one of, such as a scapy packet.

        Raises ValueError if it is longer than the device's MTU.
        """
        self.host.send(bytes(packet))

    @property
    def received(self) -> list[bytes]:
        """The inner packets that reached this host, the last ten thousand."""
        return list(self.host.received)

    def take(self) -> list[bytes]:
        """What `received` holds, which is then forgotten."""
        taken = list(self.host.received)
        self.host.received.clear()
        return taken

    def open_udp(self, port: int, address: Address | None = None) -> OverlaySocket:
        """A UDP socket on `port` of `address`, by default of pod 0. Raises ValueError if the port is taken."""
        return self.host.open_udp(address or self.pod(), port)

    async def ping(self, target: "OverlayNode | Address", timeout: float = 1.0) -> float | None:  # noqa: ASYNC109 - it is ping's own
        """Send one echo request from pod 0, and wait for the reply: the round trip in seconds, or None if there is none."""
        self.overlay.require_this_loop()
        started = self.overlay.now
        destination, sequence = self.send_echo(target)
        waiting: asyncio.Future[None] = self.overlay.loop.create_future()
        self.host.expect_reply(destination, sequence, waiting)
        try:
            await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            return None
        finally:
            self.host.forget_reply(destination, sequence)
        return self.overlay.now - started

    def send_echo(self, target: "OverlayNode | Address") -> tuple[Address, int]:
        """Send an echo request from pod 0 without waiting; returns whom it went to, and its sequence number."""
        destination = target.pod(version=self._version_towards(target)) if isinstance(target, OverlayNode) else target
        source = self.pod(version=destination.version)
        sequence = next(self._sequence) & 0xFFFF
        self.send(inner.echo(source, destination, self.number & 0xFFFF, sequence, _ECHO_PAYLOAD))
        return destination, sequence

    def pings(self, target: "OverlayNode | Address") -> bool:
        """Whether one echo request is answered within a second; for tests without an event loop."""
        self.overlay.refuse_inside("await ping()")  # before there is a coroutine that nobody would await
        return self.overlay.run(self.ping(target)) is not None

    def _version_towards(self, target: "OverlayNode") -> int:
        return 4 if self.lease.subnet is not None and target.lease.subnet is not None else 6

    def _deliver(self, packet: bytes) -> None:
        self.host.deliver(packet)

    # The node's part

    @property
    def verdicts(self) -> dict[str, dict[str, int]]:
        """What became of the packets, by direction; verdicts that did not occur are left out."""
        return {
            way: {name: count for name, count in by_name(direction.verdicts).items() if count}
            for way, direction in (("outbound", self.engine.outbound), ("inbound", self.engine.inbound))
        }

    def stop(self) -> None:
        """Crash: from now on nothing is carried and the lease is not renewed, but it stays until its time is over."""
        if self.is_running:
            self.is_running = False
            self.engine.stop()
            self.underlay.close()
            self._cancel_renewal()

    def start(self) -> None:
        """Run again after a stop, as a new process on the same host: a lease with the same subnets if they are to be had.

        What was sent meanwhile is gone. Raises ValueError if another node has the name by now, NoFreeSubnetError, and
        RuntimeError without the store.
        """
        if self.is_running:
            return
        if not self.sees_store:
            raise RuntimeError(f"{self.name} cannot start without its store: call find_store() first")
        self.overlay.take_name(self)
        self.lease = self.overlay.book.acquire(self.attributes, Subnets(self.lease.subnet, self.lease.ipv6_subnet))
        self.failure = None
        self.device = MemoryDevice(self.name, self.overlay.device_mtu, deliver=self._deliver, loop=self.overlay.loop)
        self.host.inject = self.device.inject
        self._run()

    def leave(self) -> None:
        """Stop, and give the lease back, so that the others forget this node at once."""
        self.stop()
        self.overlay.book.release(self.lease)

    def lose_store(self) -> None:
        """From now on this node hears of no change and cannot renew its lease; traffic goes on by what it knows."""
        self.sees_store = False

    def find_store(self) -> None:
        """The store is back: hear of what changed meanwhile."""
        self.sees_store = True
        self.overlay.refresh()

    def plan_renewal(self) -> None:
        """See to it that the lease is renewed before its end, as early as flannel does."""
        if self.lease.expiration is not None:
            margin = min(3600.0, self.overlay.book.lease_seconds / 2)
            self._renewal = self.overlay.call_at_in_background(self.lease.expiration - margin, self._renew)

    def _engine_failed(self, error: Exception) -> None:
        self.fail(str(error) or repr(error))

    def fail(self, reason: str) -> None:
        """End by itself, as a real node does that cannot go on."""
        if self.is_running:
            self.failure = reason
            self.stop()

    def _renew(self) -> None:
        if not self.sees_store:
            self._renewal = self.overlay.call_at_in_background(self.overlay.now + _RETRY_SECONDS, self._renew)
            return
        try:
            self.lease = self.overlay.book.renew(self.lease)
        except LeaseLostError as error:
            self.fail(str(error))
            return
        self.plan_renewal()

    def _cancel_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
