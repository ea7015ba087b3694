"""No store at all: the node's subnet and its peers are given by the operator and never change.

Made from the options ``--network``, ``--subnet`` and ``--peer SUBNET=ADDRESS[,MAC]``. Each peer becomes a lease without
expiration; a peer's MAC that is not given is derived from its address, as the peer itself does.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address, ip_network
from typing import Any

from routing.allocator import Subnets
from routing.config import BACKEND_VXLAN, Address, Network, NetworkConfig, require_host_address, strict_text
from routing.lease import Lease, LeaseAttributes, LeaseError, VtepData, derive_vtep_mac, parse_mac, require_unicast_mac
from routing.stores import StoreError
from routing.stores.checks import require_address_of_one


@dataclass(frozen=True)
class Peer:
    """One ``--peer``: who lives at `address` owns `subnet`. `mac` is its VTEP MAC, derived where it is not given."""

    subnet: Network
    address: Address
    mac: bytes

    def lease(self, backend_type: str) -> Lease:
        """The peer as a lease of a node of `backend_type`."""
        data = VtepData(self.mac) if backend_type == BACKEND_VXLAN else None
        ipv6_underlay = isinstance(self.address, IPv6Address)
        attributes = LeaseAttributes(
            public_ip=self.address if isinstance(self.address, IPv4Address) else None,
            public_ipv6=self.address if isinstance(self.address, IPv6Address) else None,
            backend_type=backend_type,
            backend_data=None if ipv6_underlay else data,
            backend_v6_data=data if ipv6_underlay else None,
        )
        if isinstance(self.subnet, IPv4Network):
            return Lease(self.subnet, None, attributes)
        return Lease(None, self.subnet, attributes)


def parse_peer(text: str) -> Peer:
    """A peer from ``SUBNET=ADDRESS[,MAC]``, like ``10.244.2.0/24=192.0.2.2``. Raises ValueError saying what is off."""
    subnet_text, equals, rest = text.partition("=")
    address_text, comma, mac_text = rest.partition(",")
    if not equals or (comma and not mac_text):
        raise ValueError(f"{text!r} is not SUBNET=ADDRESS[,MAC], like 10.244.2.0/24=192.0.2.2")
    try:
        subnet = ip_network(strict_text(subnet_text.strip()))
        address = require_host_address(ip_address(strict_text(address_text.strip())))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    try:
        mac = require_unicast_mac(parse_mac(mac_text.strip())) if comma else derive_vtep_mac(address)
    except LeaseError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Peer(subnet, address, mac)


class StaticStore:
    """The `SubnetStore` of one node whose peers are fixed."""

    def __init__(self, config: NetworkConfig, subnets: Subnets, peers: Sequence[Peer]) -> None:
        self._config = config
        self._subnets = subnets
        self._peers = tuple(peers)
        self._own: tuple[Lease, ...] = ()
        self._check()

    def _check(self) -> None:
        """Every subnet given must lie in its network and be nobody else's. Raises StoreError."""
        pools = {pool.network.version: pool.network for pool in self._config.pools}
        own: list[Network] = [net for net in (self._subnets.ipv4, self._subnets.ipv6) if net is not None]
        for name, subnet in [("--subnet", net) for net in own] + [("--peer", peer.subnet) for peer in self._peers]:
            network = pools.get(subnet.version)
            if network is None:
                raise StoreError(f"{name} {subnet} is IPv{subnet.version}, but no IPv{subnet.version} network is given")
            if not (subnet.prefixlen >= network.prefixlen and subnet.network_address in network):
                raise StoreError(f"{name} {subnet} does not lie inside the network {network}")
        subnets = [peer.subnet for peer in self._peers]
        twice = next((subnet for subnet in subnets if subnets.count(subnet) > 1), None)
        if twice is not None:
            raise StoreError(f"--peer {twice} is given twice")
        for peer in self._peers:
            for net in own:
                if net.version == peer.subnet.version and net.overlaps(peer.subnet):
                    raise StoreError(f"--peer {peer.subnet} overlaps this node's own subnet {net}")

    async def config(self) -> NetworkConfig:
        """The configuration made from the options."""
        return self._config

    async def acquire(self, config: NetworkConfig, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """The subnets from the options, whatever `previous` says."""
        lease = Lease(self._subnets.ipv4, self._subnets.ipv6, attributes)
        self._own = (lease,)
        return lease

    async def renew(self, lease: Lease) -> Lease:
        """`lease`: it never expires."""
        return lease

    async def update(self, lease: Lease, attributes: LeaseAttributes) -> Lease:
        """`lease` with `attributes`, of which the peers must be told by hand."""
        require_address_of_one(self._peer_leases(), lease.key, attributes)
        updated = replace(lease, attributes=attributes)
        self._own = (updated,)
        return updated

    async def release(self, lease: Lease) -> None:
        """From now on `watch` shows the peers alone."""
        self._own = ()

    async def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """The own lease once it is acquired, and the peers; once, since nothing changes."""
        yield [*self._own, *self._peer_leases()]
        await asyncio.Event().wait()

    def _peer_leases(self) -> list[Lease]:
        return [peer.lease(self._config.backend.type) for peer in self._peers]

    def report(self) -> dict[str, Any]:
        """There is nothing to say."""
        return {"kind": "static", "away_since": None, "skipped": 0}

    async def close(self) -> None:
        """Nothing is kept open."""
