"""The virtio-net header of an incoming packet: what a kernel VXLAN peer over veth leaves undone is told to the kernel."""

import pytest
import reference
from packets import mac, octets, pod, table_of, tcp, udp
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrHopByHop
from scapy.packet import Raw

from dataplane.batch import Batch
from dataplane.inbound import decapsulate, unpack, write_vnet_headers
from dataplane.verdict import Verdict
from encap import vnet, vxlan
from encap.vnet import VnetHeader

MTU = 1450
NOTHING = VnetHeader(0, 0, 0, 0, 0, 0)


def partial(packet: bytes, start: int, field: int) -> bytes:
    """`packet` with its transport checksum reduced to the pseudo-header sum."""
    version = packet[0] >> 4
    protocol = 6 if field == 16 else 17
    length = len(packet) - start
    head = reference.pseudo_header(pod(1, version), pod(2, version), protocol, length)
    out = bytearray(packet)
    out[start + field : start + field + 2] = (0xFFFF - reference.internet_checksum(head)).to_bytes(2, "big")
    return bytes(out)


def header_of(packet: bytes, stride: int = 0) -> VnetHeader:
    batch = Batch(1)
    batch.data[:] = b"\xa5" * len(batch.data)
    pieces = Batch(4, batch.data)
    pieces.vnet[:] = b"\xa5" * len(pieces.vnet)
    ethertype = 0x0800 if packet[0] >> 4 == 4 else 0x86DD
    batch.put(vxlan.header(1, mac(2), mac(1), ethertype) + packet, stride=stride)
    table = table_of(2, [1])
    assert unpack(batch, pieces, table, 0) == 1
    assert decapsulate(pieces, table) == pieces.count == 1
    write_vnet_headers(pieces, MTU)
    assert pieces.verdict[0] == Verdict.FORWARDED
    assert bytes(pieces.packet(0)) == packet
    return vnet.parse(pieces.vnet, 0)


@pytest.mark.parametrize("packet", [tcp(), udp(), tcp(version=6), udp(version=6)])
def test_a_complete_checksum_needs_nothing(packet):
    assert header_of(packet) == NOTHING


@pytest.mark.parametrize(
    ("packet", "start", "field"),
    [
        (tcp(), 20, 16),
        (udp(), 20, 6),
        (tcp(version=6), 40, 16),
        (udp(version=6), 40, 6),
        (tcp(options=b"\x01" * 8), 28, 16),
        (octets(IPv6(src=pod(1, 6), dst=pod(2, 6)) / IPv6ExtHdrHopByHop() / TCP() / Raw(b"abc")), 48, 16),
    ],
    ids=["tcp4", "udp4", "tcp6", "udp6", "IPv4 options", "hop-by-hop"],
)
def test_a_partial_checksum_is_to_be_finished(packet, start, field):
    assert header_of(partial(packet, start, field)) == VnetHeader(vnet.FLAG_NEEDS_CSUM, 0, 0, 0, start, field)


@pytest.mark.parametrize("version", [4, 6])
def test_a_tcp_packet_above_the_mtu_is_to_be_segmented(version):
    start = 20 if version == 4 else 40
    packet = partial(tcp(version=version, payload=b"x" * 20000), start, 16)
    gso_type = vnet.GSO_TCPV4 if version == 4 else vnet.GSO_TCPV6
    expected = VnetHeader(vnet.FLAG_NEEDS_CSUM, gso_type, start + 20, MTU - start - 20, start, 16)
    assert header_of(packet) == expected


def test_tcp_options_count_for_the_segment_size():
    segment = TCP(flags="A", options=[("Timestamp", (1, 2)), ("NOP", None), ("NOP", None)])
    packet = octets(IP(src=pod(1), dst=pod(2)) / segment / Raw(b"x" * 5000))
    assert header_of(partial(packet, 20, 16)) == VnetHeader(1, vnet.GSO_TCPV4, 52, MTU - 52, 20, 16)


def test_at_the_mtu_nothing_is_segmented():
    packet = partial(tcp(payload=b"x" * (MTU - 40)), 20, 16)
    assert len(packet) == MTU
    assert header_of(packet) == VnetHeader(1, 0, 0, 0, 20, 16)


def test_an_oversized_packet_with_a_complete_checksum_is_left_to_the_kernel():
    assert header_of(tcp(payload=b"x" * 20000)) == NOTHING


def test_a_fragment_has_no_checksum_to_finish():
    first = partial(udp(flags="MF", payload=b"x" * 32), 20, 6)
    assert header_of(first) == NOTHING


@pytest.mark.parametrize("version", [4, 6])
def test_an_inner_udp_superpacket_keeps_the_size_that_udp_gro_told(version):
    start = 20 if version == 4 else 40
    packet = partial(udp(version=version, payload=b"x" * 12000), start, 6)
    expected = VnetHeader(vnet.FLAG_NEEDS_CSUM, vnet.GSO_UDP_L4, start + 8, 1200, start, 6)
    assert header_of(packet, stride=1200) == expected
