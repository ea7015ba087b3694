"""encap/overhead.py and encap/ipudp.py: what a tunnel costs, and which path MTU is reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN

from encap import ipudp, overhead, vxlan


@pytest.mark.parametrize(
    ("framing", "family", "expected"),
    [
        (vxlan.HEADER_LENGTH, 4, 50),
        (vxlan.HEADER_LENGTH, 6, 70),
        (ipudp.HEADER_LENGTH, 4, 28),
        (ipudp.HEADER_LENGTH, 6, 48),
    ],
)
def test_overhead(framing, family, expected):
    assert overhead.overhead(framing, family) == expected
    outer = IP(src="192.0.2.1", dst="192.0.2.2") if family == 4 else IPv6(src="2001:db8::1", dst="2001:db8::2")
    inside = VXLAN() / Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02", type=0x0800) if framing else b""
    assert len(bytes(outer / UDP() / inside)) == expected


@pytest.mark.parametrize("family", [0, 5, -4])
def test_there_is_no_other_family(family):
    with pytest.raises(KeyError):
        overhead.overhead(0, family)


@pytest.mark.parametrize(
    ("path_mtu", "cost", "family", "expected"),
    [
        (1500, 50, 4, 1450),
        (1500, 70, 6, 1430),
        (1400, 50, 4, 1350),
        (603, 50, 4, 553),
        (602, 50, 4, 552),
        (601, 50, 4, 552),
        (576, 50, 4, 552),
        (50, 50, 4, 552),
        (0, 50, 4, 552),
        (1331, 50, 6, 1281),
        (1330, 50, 6, 1280),
        (1329, 50, 6, 1280),
        (1280, 70, 6, 1280),
        (0, 70, 6, 1280),
        (65535, 28, 4, 65507),
        (65535, 48, 6, 65487),
    ],
)
def test_path_mtu_to_report(path_mtu, cost, family, expected):
    assert overhead.path_mtu_to_report(path_mtu, cost, family) == expected


@given(st.integers(0, 65535), st.sampled_from([28, 48, 50, 70]), st.sampled_from([4, 6]))
def test_a_reported_mtu_fits_the_path_or_is_the_floor(path_mtu, cost, family):
    reported = overhead.path_mtu_to_report(path_mtu, cost, family)
    floor = {4: 552, 6: 1280}[family]
    assert reported == path_mtu - cost or (reported == floor and path_mtu - cost < floor)


def test_floors_and_minimums():
    assert overhead.path_mtu_floor(4) == overhead.PATH_MTU_FLOOR_IPV4 == 552
    assert overhead.path_mtu_floor(6) == overhead.MINIMUM_IPV6_MTU == 1280
    assert overhead.MINIMUM_IPV4_MTU == 576


def test_flannels_ports():
    assert (vxlan.DEFAULT_PORT, ipudp.DEFAULT_PORT) == (8472, 8285)
    assert ipudp.HEADER_LENGTH == 0
