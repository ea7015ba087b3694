"""Masqueraded traffic through real nodes: it passes their source checks, arrives whole, and the answers come back."""

import shutil
from ipaddress import IPv4Address, IPv6Address

import pytest
from cluster import IPV6_NETWORK, NETWORK, add_up, cluster, transfer

from dataplane.host.firewall import NftFirewall, Rules
from dataplane.lab import Pod, inside
from routing.config import Network

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is missing (Debian package nftables)"),
]


def test_masqueraded_connections_cross_the_overlay_whole(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--ipv6-network", IPV6_NETWORK) as made:
        near, far = made.lab.hosts
        outside = made.lab.add_host()
        outside.ip(f"route add {NETWORK} via {near.ipv4}", f"route add {IPV6_NETWORK} via {near.ipv6}")
        for host in (near, far):
            subnets: list[Network] = [subnet for subnet in made.subnets(host) if subnet is not None]
            networks = tuple(type(subnet)(text) for subnet, text in zip(subnets, (NETWORK, IPV6_NETWORK), strict=True))
            rules = Rules(networks, tuple(subnets), masquerade=True, forward=True)
            with inside(host.name):
                NftFirewall("pyflannel-dp-test").apply(rules)  # not the node's own table
        stranger = Pod(made.lab, outside.name, IPv4Address(outside.ipv4), IPv6Address(outside.ipv6))
        for version in (4, 6):
            assert transfer(stranger, far.pods[0], version, 5)  # through both nodes
            assert transfer(far.pods[0], stranger, version, 5)  # past the overlay
            assert transfer(stranger, near.pods[0], version, 5)
        status = made.status(far)
        assert status["inbound"]["verdicts"].get("spoofed_source", 0) == 0
        assert add_up(status)
        assert add_up(made.status(near))
