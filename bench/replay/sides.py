"""The two ends of the tunnel that a capture is replayed through, and their tables.

The sending node owns one subnet of each family. Behind the tunnel are `peers` VTEPs, each with subnets of its own; one
receiving node stands for all of them: its subnets hold all of theirs, and its MAC is the one that all of them published.
Further `leases` only make the sender's table larger.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

from routing.config import Address, Network
from routing.lease import derive_vtep_mac
from routing.route import FRAMING_VXLAN, Route
from routing.table import Identity, Table, build

SENDER = IPv4Network("10.1.0.0/16"), IPv6Network("fd00:0:1::/48")
RECEIVERS = IPv4Network("10.128.0.0/9"), IPv6Network("fd00:8000::/17")
_OVERLAY = IPv4Network("10.0.0.0/8")
_FURTHER = int(IPv4Address("11.0.0.0"))
_FURTHER_LENGTH = 27
MAX_PEERS = 1 << 12
MAX_LEASES = 1 << 17


@dataclass(frozen=True)
class Sides:
    """The tables of both ends, and the subnets that the sender's packets may go to."""

    sending: Table
    receiving: Table
    peer_subnets: tuple[Network, ...]


def make_sides(
    *, framing: str, peers: int, leases: int, sender_host: Address, peer_hosts: tuple[Address, ...], port: int, vni: int = 1
) -> Sides:
    """Tables for `peers` VTEPs at `peer_hosts`, taken in turn, and `leases` leases in all. Raises ValueError."""
    if not 1 <= peers <= MAX_PEERS:
        raise ValueError(f"there may be 1 to {MAX_PEERS} peers, not {peers}")
    if not 0 <= leases <= MAX_LEASES:
        raise ValueError(f"there may be at most {MAX_LEASES} leases, not {leases}")
    sender_mac, receiver_mac = (derive_vtep_mac(ip_address(f"192.0.2.{n}")) for n in (1, 2))
    deeper = (peers - 1).bit_length()
    subnets: list[Network] = []
    routes: list[Route] = []
    for number in range(peers):
        host = peer_hosts[number % len(peer_hosts)]
        for network in RECEIVERS:
            subnet = _nth_subnet(network, deeper, number)
            subnets.append(subnet)
            routes.append(Route(subnet, host, receiver_mac, (host,)))
    for number in range(max(leases - peers, 0)):
        subnet4 = IPv4Network((_FURTHER + (number << (32 - _FURTHER_LENGTH)), _FURTHER_LENGTH))
        routes.append(Route(subnet4, peer_hosts[0], receiver_mac, (peer_hosts[0],)))
    is_vxlan = framing == FRAMING_VXLAN
    sending = Identity(framing, SENDER[0], SENDER[1], port, vni, sender_mac if is_vxlan else None, network=_OVERLAY)
    receiving = Identity(
        framing, RECEIVERS[0], RECEIVERS[1], port, vni, receiver_mac if is_vxlan else None, network=_OVERLAY
    )
    back = [Route(subnet, sender_host, sender_mac, (sender_host,)) for subnet in SENDER]
    return Sides(build(sending, routes), build(receiving, back), tuple(subnets))


def _nth_subnet(network: Network, deeper: int, number: int) -> Network:
    length = network.prefixlen + deeper
    start = int(network.network_address) + (number << (network.max_prefixlen - length))
    return IPv4Network((start, length)) if network.version == 4 else IPv6Network((start, length))
