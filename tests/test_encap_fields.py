"""encap/fields.py: loads and stores at every offset, and IndexError beyond the buffer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import POISON
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from encap import fields
from encap.pure import is_compiled

LOADS = [(fields.load16, 2), (fields.load32, 4), (fields.load64, 8)]
KINDS = [bytes, bytearray, memoryview, lambda octets: memoryview(bytearray(octets))]


@pytest.mark.parametrize(
    ("load", "octets", "expected"),
    [
        (fields.load16, "0000", 0),
        (fields.load16, "0102", 0x0102),
        (fields.load16, "8000", 0x8000),
        (fields.load16, "ffff", 0xFFFF),
        (fields.load32, "00000000", 0),
        (fields.load32, "01020304", 0x01020304),
        (fields.load32, "80000000", 0x80000000),
        (fields.load32, "ffffffff", 0xFFFFFFFF),
        (fields.load64, "0000000000000000", 0),
        (fields.load64, "0102030405060708", 0x0102030405060708),
        (fields.load64, "8000000000000000", 0x8000000000000000),
        (fields.load64, "ffffffffffffffff", 0xFFFFFFFFFFFFFFFF),  # the number that tells of an exception when compiled
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_load(load, octets, expected, kind):
    assert load(kind(bytes.fromhex(octets)), 0) == expected


@pytest.mark.parametrize(("load", "width"), LOADS)
@given(octets=st.binary(min_size=8, max_size=40))
def test_load_at_every_offset(load, width, octets):
    for at in range(len(octets) - width + 1):
        assert load(octets, at) == int.from_bytes(octets[at : at + width], "big")


@pytest.mark.parametrize(("load", "width"), LOADS)
@pytest.mark.parametrize("kind", KINDS)
def test_load_beyond_the_buffer_raises(load, width, kind):
    for length in range(12):
        buf = kind(b"\xff" * length)
        for at in range(max(0, length - width + 1), length + 3):
            with pytest.raises(IndexError):
                load(buf, at)


@pytest.mark.skipif(not is_compiled(fields), reason="Python's own indexing counts negative offsets from the end")
@pytest.mark.parametrize(("load", "width"), LOADS)
def test_compiled_load_before_the_buffer_raises(load, width):
    for at in (-1, -width, -100):
        with pytest.raises(IndexError):
            load(b"\xff" * 16, at)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0000"), (1, "0001"), (0x0100, "0100"), (0x8001, "8001"), (0xFFFF, "ffff"), (0x1_2345, "2345"), (-1, "ffff")],
)
@pytest.mark.parametrize("wrap", [bytearray, lambda octets: memoryview(bytearray(octets))])
def test_store16_writes_the_low_16_bits_and_nothing_else(value, expected, wrap):
    for at in range(9):
        buf = wrap([POISON] * 10)
        fields.store16(buf, at, value)
        assert bytes(buf) == bytes([POISON] * at) + bytes.fromhex(expected) + bytes([POISON] * (8 - at))


@given(st.integers(0, 0xFFFF), st.integers(0, 6))
def test_what_store16_wrote_load16_reads(value, at):
    buf = bytearray(8)
    fields.store16(buf, at, value)
    assert fields.load16(buf, at) == value


def test_store16_beyond_the_buffer_raises():
    for length in range(6):
        for at in range(max(0, length - 1), length + 3):
            with pytest.raises(IndexError):
                fields.store16(bytearray(length), at, 0x0102)


@pytest.mark.parametrize(
    ("name", "header", "at", "expected"),
    [
        ("ethertype", Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02", type=0xABCD), fields.ETHERNET_TYPE, "abcd"),
        ("mac to", Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02"), fields.ETHERNET_DESTINATION, "020000000001"),
        ("mac from", Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02"), fields.ETHERNET_SOURCE, "020000000002"),
        ("total length", IP(src="1.2.3.4", dst="5.6.7.8", len=0xABCD), fields.IPV4_TOTAL_LENGTH, "abcd"),
        ("fragment", IP(src="1.2.3.4", dst="5.6.7.8", flags="MF", frag=0x123), fields.IPV4_FRAGMENT, "2123"),
        ("ttl", IP(src="1.2.3.4", dst="5.6.7.8", ttl=0xAB), fields.IPV4_TTL, "ab"),
        ("protocol", IP(src="1.2.3.4", dst="5.6.7.8", proto=0xAB), fields.IPV4_PROTOCOL, "ab"),
        ("checksum", IP(src="1.2.3.4", dst="5.6.7.8", chksum=0xABCD), fields.IPV4_CHECKSUM, "abcd"),
        ("source", IP(src="1.2.3.4", dst="5.6.7.8"), fields.IPV4_SOURCE, "01020304"),
        ("destination", IP(src="1.2.3.4", dst="5.6.7.8"), fields.IPV4_DESTINATION, "05060708"),
        ("payload length", IPv6(src="::1", dst="::2", plen=0xABCD), fields.IPV6_PAYLOAD_LENGTH, "abcd"),
        ("next header", IPv6(src="::1", dst="::2", nh=0xAB), fields.IPV6_NEXT_HEADER, "ab"),
        ("hop limit", IPv6(src="::1", dst="::2", hlim=0xAB), fields.IPV6_HOP_LIMIT, "ab"),
        ("v6 source", IPv6(src="::1", dst="::2"), fields.IPV6_SOURCE, "00" * 15 + "01"),
        ("v6 destination", IPv6(src="::1", dst="::2"), fields.IPV6_DESTINATION, "00" * 15 + "02"),
        ("udp checksum", UDP(chksum=0xABCD), fields.UDP_CHECKSUM, "abcd"),
        ("tcp checksum", TCP(chksum=0xABCD), fields.TCP_CHECKSUM, "abcd"),
        ("tcp offset", TCP(dataofs=0xA, reserved=0), fields.TCP_DATA_OFFSET, "a0"),
    ],
)
def test_offsets_are_scapys(name, header, at, expected):
    octets = bytes.fromhex(expected)
    assert bytes(header)[at : at + len(octets)] == octets


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:02", type=0), fields.ETHERNET_HEADER_LENGTH),
        (IP(src="1.2.3.4", dst="5.6.7.8"), fields.IPV4_HEADER_LENGTH),
        (IPv6(src="::1", dst="::2"), fields.IPV6_HEADER_LENGTH),
        (UDP(), fields.UDP_HEADER_LENGTH),
        (TCP(), fields.TCP_HEADER_LENGTH),
    ],
)
def test_header_lengths_are_scapys(header, length):
    assert len(bytes(header)) == length


def test_numbers_of_the_registries():
    assert (fields.ETHERTYPE_IPV4, fields.ETHERTYPE_IPV6) == (0x0800, 0x86DD)
    assert (fields.PROTOCOL_ICMP, fields.PROTOCOL_TCP, fields.PROTOCOL_UDP, fields.PROTOCOL_ICMPV6) == (1, 6, 17, 58)
    assert (fields.IPV4_DONT_FRAGMENT, fields.IPV4_MORE_FRAGMENTS, fields.IPV4_FRAGMENT_OFFSET) == (0x4000, 0x2000, 0x1FFF)
