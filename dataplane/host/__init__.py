"""The machine around the engine: interfaces, addresses, routes.

Contract (`Host`; every implementation passes ``tests/test_host_conformance.py``): methods block for milliseconds and may be
called from any thread, so an event loop calls them through one. Everything that a node makes carries a mark, the alias
`ALIAS` on a link and the protocol number `ROUTE_PROTOCOL` on a route; only what carries it is ever removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface
from typing import Protocol

from routing.config import Address, Network

__all__ = ["ALIAS", "QUEUE_LENGTH", "ROUTE_PROTOCOL", "Host", "HostError", "Interface"]

ALIAS = "pyflannel-dp"
ROUTE_PROTOCOL = 241
"""Ours among the numbers that the kernel leaves to routing daemons (include/uapi/linux/rtnetlink.h, RTPROT_*)."""

QUEUE_LENGTH = 1000
"""Packets in the device's transmit queue; flannel leaves the TUN driver's 500, which overflows under load."""


class HostError(Exception):
    """The machine refuses; the text says what was tried, why it failed, and what to do."""


@dataclass(frozen=True)
class Interface:
    """A network interface. `mtu` in bytes; `kind` as in ``ip -d link`` (empty for hardware); `udp_port` of a VXLAN one."""

    name: str
    index: int
    mtu: int
    addresses: tuple[IPv4Interface | IPv6Interface, ...] = ()
    is_up: bool = True
    kind: str = ""
    alias: str = ""
    udp_port: int | None = None


class Host(Protocol):
    """What a node needs of its machine."""

    def interfaces(self) -> list[Interface]:
        """All interfaces with their addresses, by index."""

    def default_interface(self, family: int) -> str | None:
        """The name of the interface that the default route of `family` (4 or 6) leaves by."""

    def interface_towards(self, address: Address) -> str | None:
        """The name of the interface that packets to `address` leave by; None if there is no route."""

    def configure_device(self, name: str, addresses: Sequence[Address], mtu: int, superpacket_limit: int) -> None:
        """Give the TUN `name` its addresses (as /32 and /128), MTU, queue length and mark, and bring it up.

        `superpacket_limit` is how long a packet the kernel may hand over for us to cut up, in bytes (gso_max_size). What is
        set already stays. Raises HostError.
        """

    def add_route(self, network: Network, device: str) -> None:
        """A route to `network` through `device`. Raises HostError if somebody else has one to it."""

    def routes(self) -> list[tuple[Network, str]]:
        """Our routes: network and device."""

    def remove_ours(self) -> list[str]:
        """Remove the links and routes that carry our mark; says what was removed. Raises HostError."""
