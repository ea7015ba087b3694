"""A PMTU black hole: pings work, large transfers hang. Somewhere a router drops what is too big, and its ICMP gets lost.

Run it with ``pytest examples/test_pmtu_black_hole.py``. The underlay between two nodes carries 1400 bytes while both have
an interface of 1500, and does one of three things with what is longer:

* ``oversize=drop``: it vanishes and nobody is told, the black hole;
* ``oversize=refuse``, which is the default: the sending node gets to know, as by the ICMP of a router on the underlay, and
  passes it on to the pod with the MTU that is left for it;
* ``oversize=fragment``: the path cuts it up, and it arrives.
"""

import pytest

from dataplane.overlay import Overlay, OverlaySocket

pytestmark = [
    pytest.mark.overlay(nodes=2, ipv6_network="fd00::/48", seed=1),
    pytest.mark.parametrize("version", [4, 6]),
]

PATH_MTU = 1400
OVERHEAD = 50
"""VXLAN over IPv4."""
HEADERS = {4: 20 + 8, 6: 40 + 8}
"""IP and UDP."""


@pytest.fixture
def sockets(overlay: Overlay, version: int) -> tuple[OverlaySocket, OverlaySocket]:
    """One on each node, in that IP version."""
    a, b = overlay.nodes
    return a.open_udp(1, a.pod(version=version)), b.open_udp(2, b.pod(version=version))


def test_a_black_hole_lets_small_packets_pass_and_swallows_big_ones(
    overlay: Overlay, sockets: tuple[OverlaySocket, OverlaySocket], version: int
) -> None:
    """Nothing that the sender can see tells the two apart: both were forwarded, and no ICMP came back."""
    a, b = overlay.nodes
    sender, receiver = sockets
    overlay.impair(a, b, mtu=PATH_MTU, oversize="drop")
    longest = PATH_MTU - OVERHEAD - HEADERS[version]
    for size in (100, longest, longest + 1, overlay.device_mtu - HEADERS[version]):
        sender.send_to(bytes(size), receiver)
    overlay.settle()

    assert [len(data) for data, _ in receiver.take()] == [100, longest]
    assert a.verdicts["outbound"] == {"forwarded": 4}
    assert not a.host.errors
    assert overlay.counts(a, b).oversize == 2
    assert [one.fate for one in overlay.underlay.crossed] == ["arrived", "arrived", "oversize", "oversize"]


def test_where_the_path_tells_the_pod_gets_icmp_with_the_mtu_that_is_left(
    overlay: Overlay, sockets: tuple[OverlaySocket, OverlaySocket], version: int
) -> None:
    """Destination unreachable, fragmentation needed (RFC 792, RFC 1191); packet too big (RFC 4443)."""
    a, b = overlay.nodes
    sender, receiver = sockets
    overlay.impair(a, b, mtu=PATH_MTU, oversize="refuse")
    sender.send_to(bytes(overlay.device_mtu - HEADERS[version]), receiver)
    overlay.settle()

    assert receiver.take() == []
    assert a.verdicts["outbound"] == {"too_big": 1}
    (error,) = a.host.errors
    assert (error.type, error.code) == {4: (3, 4), 6: (2, 0)}[version]
    assert error.mtu == PATH_MTU - OVERHEAD
    assert error.about[0] >> 4 == version  # it quotes the packet

    sender.send_to(bytes(error.mtu - HEADERS[version]), receiver)
    overlay.settle()
    assert [len(data) for data, _ in receiver.take()] == [error.mtu - HEADERS[version]]


def test_a_path_that_fragments_carries_everything(
    overlay: Overlay, sockets: tuple[OverlaySocket, OverlaySocket], version: int
) -> None:
    """At the price that a datagram is lost with any of its fragments."""
    a, b = overlay.nodes
    sender, receiver = sockets
    longest = overlay.device_mtu - HEADERS[version]
    overlay.impair(a, b, mtu=PATH_MTU, oversize="fragment")
    sender.send_to(bytes(longest), receiver)
    overlay.settle()
    assert [len(data) for data, _ in receiver.take()] == [longest]
    assert overlay.counts(a, b).fragmented == 1

    overlay.impair(a, b, mtu=PATH_MTU, oversize="fragment", loss=0.3)
    for _ in range(500):
        sender.send_to(bytes(longest), receiver)
        overlay.settle()
    assert 0.4 < len(receiver.take()) / 500 < 0.6  # 0.7 times 0.7


# What a sender can do about it that trusts no ICMP: packetization layer path MTU discovery (RFC 8899)


async def largest_that_arrives(overlay: Overlay, sender: OverlaySocket, receiver: OverlaySocket, most: int) -> int:
    """Search for it with probes; a size is tried three times before it counts as too big."""
    good, bad = 0, most + 1
    while bad - good > 1:
        size = (good + bad) // 2
        for _ in range(3):
            sender.send_to(bytes(size), receiver)
        await overlay.settled()
        good, bad = (size, bad) if receiver.take() else (good, size)
    return good


@pytest.mark.parametrize("path_mtu", [1300, 1400, 1499, 1500])
def test_probing_finds_the_size_that_passes_a_black_hole(
    overlay: Overlay, sockets: tuple[OverlaySocket, OverlaySocket], version: int, path_mtu: int
) -> None:
    """Though one probe in ten is lost for other reasons."""
    a, b = overlay.nodes
    overlay.impair(a, b, mtu=path_mtu, oversize="drop", loss=0.1)
    most = overlay.device_mtu - HEADERS[version]
    found = overlay.run(largest_that_arrives(overlay, *sockets, most))
    assert found == path_mtu - OVERHEAD - HEADERS[version]
