"""Pods of two nodes reach each other: what the author of a CNI plugin or of an overlay's configuration wants to know first.

Run it with ``pytest examples/test_pods_reach_each_other.py``. No root, no namespaces: the nodes are in memory. What judges,
encapsulates and delivers their packets is the code that runs on hosts.
"""

import asyncio
from ipaddress import ip_address

import pytest

from dataplane.overlay import Overlay

pytestmark = pytest.mark.overlay(nodes=3, network="10.244.0.0/16", ipv6_network="fd00:10:244::/48")

IP_HEADER = {4: 20, 6: 40}
UDP_HEADER = 8
VXLAN_OVERHEAD = 50
"""Outer IPv4 (20), UDP (8), VXLAN (8), inner Ethernet (14)."""


@pytest.mark.parametrize("version", [4, 6])
def test_pods_answer_pings(overlay: Overlay, version: int) -> None:
    """From pod 0 of the first node to three pods of another; pod N has address 10 + N of its node's subnet."""
    a, b, _ = overlay.nodes
    for number in range(3):
        assert a.pings(b.pod(number, version=version))
    assert b.verdicts["inbound"] == {"forwarded": 3}


@pytest.mark.parametrize("version", [4, 6])
def test_a_client_asks_and_a_server_answers(overlay: Overlay, version: int) -> None:
    """UDP between pods, over an underlay that takes 10 ms each way. The addresses are the pods' own: nothing translates."""
    a, b, _ = overlay.nodes
    overlay.impair(a, b, delay="10ms")
    client, server = a.open_udp(40000, a.pod(version=version)), b.open_udp(53, b.pod(version=version))

    async def serve() -> None:
        question, whom = await server.receive()
        server.send_to(question.upper(), whom)

    async def ask() -> tuple[bytes, str]:
        client.send_to(b"where is it?", server)
        serving = asyncio.create_task(serve())
        answer, whom = await client.receive(timeout=1)  # should it be lost, this fails after a virtual second
        await serving
        return answer, str(whom[0])

    started = overlay.now
    answer, whom = overlay.run(ask())
    assert (answer, whom) == (b"WHERE IS IT?", str(b.pod(version=version)))
    assert overlay.now - started == pytest.approx(0.020)


@pytest.mark.parametrize("version", [4, 6])
def test_the_mtu_of_a_pod_is_the_underlays_less_the_overhead(overlay: Overlay, version: int) -> None:
    """The longest packet crosses whole, and one byte more does not leave the pod (on a real host: EMSGSIZE)."""
    a, b, _ = overlay.nodes
    assert overlay.device_mtu == 1500 - VXLAN_OVERHEAD
    sender, receiver = a.open_udp(1, a.pod(version=version)), b.open_udp(2, b.pod(version=version))
    longest = overlay.device_mtu - IP_HEADER[version] - UDP_HEADER
    sender.send_to(bytes(longest), receiver)
    overlay.settle()
    assert [len(data) for data, _ in receiver.take()] == [longest]
    with pytest.raises(ValueError, match="MTU is 1450"):
        sender.send_to(bytes(longest + 1), receiver)


def test_what_the_underlay_carries_is_vxlan(overlay: Overlay) -> None:
    """Every datagram that crosses can be looked at: outer addresses, port, and the UDP payload byte for byte."""
    a, b, _ = overlay.nodes
    a.open_udp(1).send_to(b"hello", b.open_udp(2))
    overlay.settle()
    (datagram,) = overlay.underlay.crossed
    assert (datagram.source, datagram.destination, datagram.port) == (*a.addresses, *b.addresses, 8472)
    vxlan, ethernet, packet = datagram.payload[:8], datagram.payload[8:22], datagram.payload[22:]
    assert vxlan == bytes([0x08, 0, 0, 0, 0, 0, 1, 0])  # the VNI is valid, and is 1
    assert ethernet[12:] == b"\x08\x00"  # IPv4
    assert b.received == [packet]
    assert (ip_address(packet[12:16]), ip_address(packet[16:20])) == (a.pod(), b.pod())


@pytest.mark.overlay(framing="ip")
def test_flannels_udp_backend_costs_less(overlay: Overlay) -> None:
    """In the other framing the payload is the packet. A marker on a test adds to the module's."""
    a, b, _ = overlay.nodes
    assert overlay.device_mtu == 1500 - 28
    assert a.pings(b)
    assert [(one.port, one.payload[0] >> 4) for one in overlay.underlay.crossed] == [(8285, 4), (8285, 4)]


def test_what_does_not_arrive_has_a_verdict(overlay: Overlay) -> None:
    """A destination without a lease is told to the sender; a source that is not the sender's is dropped on arrival."""
    a, b, c = overlay.nodes
    assert not a.pings(ip_address("10.244.77.10"))
    assert a.verdicts["outbound"] == {"no_route": 1}
    assert [(error.type, error.code) for error in a.host.errors] == [(3, 0)]  # ICMP: network unreachable

    spoofing, victim = a.open_udp(1, c.pod()), b.open_udp(2)  # on a, with an address of c
    spoofing.send_to(b"it is c who says this", victim)
    overlay.settle()
    assert victim.take() == []
    assert b.verdicts["inbound"] == {"spoofed_source": 1}


def test_every_node_reaches_every_other_over_any_underlay() -> None:
    """Without the fixture: one test, several overlays."""
    for underlay in ("ipv4", "ipv6", "both"):
        with Overlay(underlay=underlay) as overlay:
            nodes = overlay.add_nodes(5)
            assert overlay.pings_all() == len(nodes) * (len(nodes) - 1)
