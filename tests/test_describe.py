"""Headers in words."""

import pytest
from packets import echo, mac, tcp, udp
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from dataplane.describe import MAX_TUNNELS, describe_frame, describe_packet, describe_payload, one_line
from encap import vxlan


def test_a_vxlan_frame_is_read_to_the_bottom():
    payload = vxlan.header(1, mac(2), mac(1), 0x0800) + echo()
    datagram = IP(src="192.0.2.1", dst="192.0.2.2") / UDP(sport=50000, dport=8472) / Raw(payload)
    lines = describe_frame(bytes(Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02") / datagram))
    assert lines[0] == "Ethernet  02:00:00:00:00:01 → 02:00:00:00:00:02, type 0x0800"
    assert lines[1] == "IPv4      192.0.2.1 → 192.0.2.2, TTL 64, 98 bytes"
    assert lines[2].startswith("UDP       50000 → 8472, checksum 0x")
    assert lines[3:] == [
        "VXLAN     flags 0x08, VNI 1",
        "Ethernet  02:fd:c0:00:02:01 → 02:fd:c0:00:02:02, type 0x0800",
        "IPv4      10.1.1.5 → 10.1.2.5, TTL 64, 48 bytes",
        "ICMP      echo request, id 1, sequence 1",
    ]


def test_ipv6_and_tcp():
    assert describe_packet(udp(version=6))[0] == "IPv6      fd00:0:0:1::5 → fd00:0:0:2::5, hop limit 64, 55 bytes"
    assert describe_packet(tcp())[1] == "TCP       1000 → 2000, flags ACK, sequence 7, 7 bytes of payload"
    assert describe_packet(tcp()[:39])[1] == "TCP       19 bytes"


def test_the_payload_of_a_datagram_in_each_framing_in_one_line():
    inner = "IPv4 10.1.1.5 → 10.1.2.5, TTL 64, 48 bytes; ICMP echo request, id 1, sequence 1"
    assert one_line(describe_payload(echo(), is_vxlan=False)) == inner
    payload = vxlan.header(1, mac(2), mac(1), 0x0800) + echo()
    frame = "VXLAN flags 0x08, VNI 1; Ethernet 02:fd:c0:00:02:01 → 02:fd:c0:00:02:02, type 0x0800; "
    assert one_line(describe_payload(payload, is_vxlan=True)) == frame + inner


def nested(levels: int, inner: bytes) -> bytes:
    """`inner` in so many VXLAN tunnels, the outermost without its IP and UDP headers."""
    payload = vxlan.header(1, mac(2), mac(1), 0x0800) + inner
    for _ in range(levels - 1):
        datagram = IP(src="10.1.1.5", dst="10.1.2.5") / UDP(sport=50000, dport=8472, chksum=0) / Raw(payload)
        payload = vxlan.header(1, mac(2), mac(1), 0x0800) + bytes(datagram)
    return payload


def test_a_tunnel_inside_the_overlay_is_looked_into():
    assert describe_payload(nested(MAX_TUNNELS, echo()), is_vxlan=True)[-1].startswith("ICMP      echo request")


@pytest.mark.parametrize("levels", [MAX_TUNNELS + 1, MAX_TUNNELS + 2, 260])
def test_tunnels_in_tunnels_are_payload_however_many_they_are(levels):
    payload = nested(levels, echo())
    lines = describe_payload(payload, is_vxlan=True)
    assert [line.split()[0] for line in lines] == ["VXLAN", "Ethernet", "IPv4", "UDP"] * MAX_TUNNELS + ["payload"]
    assert lines[-1] == f"payload   {len(payload) - MAX_TUNNELS * (vxlan.HEADER_LENGTH + 28)} bytes"
    datagram = bytes(IP(src="192.0.2.1", dst="192.0.2.2") / UDP(dport=8472) / Raw(payload))
    assert describe_packet(datagram)[2:] == lines
    assert describe_frame(bytes(14) + datagram)[3:] == lines


@pytest.mark.parametrize("length", range(120))
def test_cut_short_anywhere_it_says_what_is_there(length):
    payload = vxlan.header(1, mac(2), mac(1), 0x0800) + echo()
    frame = bytes(
        Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
        / IP(src="192.0.2.1", dst="192.0.2.2")
        / UDP(dport=8472)
        / Raw(payload)
    )
    assert describe_frame(frame[:length])
    assert describe_packet(frame[14 : 14 + length])
