"""From leases to routes: over which underlay, to which address and MAC the packets for a subnet go.

Theory of operation: a pure decision per lease and family. IPv6 packets go over the IPv6 underlay where both ends have an
IPv6 address, as flannel's second device does, else over IPv4; IPv4 packets prefer the IPv4 underlay in the same way. The
VTEP MAC goes with the underlay: BackendData's over IPv4, BackendV6Data's over IPv6; where a node published only one, that
one. A lease that cannot be reached gives no route but a reason.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from routing.config import BACKEND_UDP, BACKEND_VXLAN, Address, Network
from routing.lease import Lease, LeaseAttributes

FRAMING_VXLAN = "vxlan"
FRAMING_IP = "ip"

BACKEND_OF_FRAMING = {FRAMING_VXLAN: BACKEND_VXLAN, FRAMING_IP: BACKEND_UDP}
"""What flannel calls a node that speaks a framing, in its leases and its configuration."""


@dataclass(frozen=True)
class Route:
    """Packets for `subnet` go to the VTEP at `address`. `mac` is that VTEP's (unused in the ip framing).

    `public` holds all underlay addresses of the lease: any of them may be the outer source of its packets. So may, for a
    while, one that the lease had before (``routing.grace``).
    """

    subnet: Network
    address: Address
    mac: bytes
    public: tuple[Address, ...]


@dataclass(frozen=True)
class Unreachable:
    """A lease without a route for one of its subnets, and why."""

    lease: Lease
    reason: str


_NOBODY: Mapping[str, tuple[Address, ...]] = {}


def plan(
    peers: Iterable[Lease],
    framing: str,
    underlay_families: Collection[int],
    former: Mapping[str, tuple[Address, ...]] = _NOBODY,
) -> tuple[list[Route], list[Unreachable]]:
    """The routes to `peers` for a node that speaks `framing` over sockets of `underlay_families` (4, 6).

    `former` has for the keys of some leases the addresses that they had before and that still count.
    """
    routes: list[Route] = []
    unreachable: list[Unreachable] = []
    for lease in peers:
        if lease.attributes.backend_type != BACKEND_OF_FRAMING[framing]:
            reason = f"its BackendType is {lease.attributes.backend_type!r}, ours is {BACKEND_OF_FRAMING[framing]!r}"
            unreachable.append(Unreachable(lease, reason))
            continue
        before = former.get(lease.key, ()) if former else ()
        for subnet in (lease.subnet, lease.ipv6_subnet):
            if subnet is None:
                continue
            route = _route(subnet, lease.attributes, framing, underlay_families, before)
            if isinstance(route, str):
                unreachable.append(Unreachable(lease, route))
            else:
                routes.append(route)
    return routes, unreachable


def _route(
    subnet: Network, attributes: LeaseAttributes, framing: str, families: Collection[int], former: tuple[Address, ...]
) -> Route | str:
    ipv4 = attributes.public_ip if 4 in families else None
    ipv6 = attributes.public_ipv6 if 6 in families else None
    address = (ipv4 or ipv6) if subnet.version == 4 else (ipv6 or ipv4)
    if address is None:
        return "it has no address of a family that this node's underlay has"
    mac = b""
    if framing == FRAMING_VXLAN:
        data = (attributes.backend_data, attributes.backend_v6_data)
        found = (data[0] or data[1]) if address.version == 4 else (data[1] or data[0])
        if found is None:
            return "it has no VtepMAC"
        mac = found.vtep_mac
    public = tuple(one for one in (attributes.public_ip, attributes.public_ipv6) if one is not None)
    return Route(subnet, address, mac, (*public, *former) if former else public)
