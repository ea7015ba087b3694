"""encap/vnet.py: ten bytes in the machine's byte order, all of them written each time."""

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import POISON, poisoned

from encap import vnet
from encap.vnet import VnetHeader

u8, u16 = st.integers(0, 0xFF), st.integers(0, 0xFFFF)
headers = st.builds(VnetHeader, u8, u8, u16, u16, u16, u16)

HEADERS = [
    ("zeros", VnetHeader(0, 0, 0, 0, 0, 0), "00000000000000000000", "00000000000000000000"),
    ("udp over v4", VnetHeader(1, 0, 28, 0, 20, 6), "01001c00000014000600", "0100001c000000140006"),
    ("tso over v6", VnetHeader(1, 4, 60, 1390, 40, 16), "01043c006e0528001000", "0104003c056e00280010"),
    ("ones", VnetHeader(255, 255, 65535, 65535, 65535, 65535), "ff" * 10, "ff" * 10),
    (
        "each byte another",
        VnetHeader(1, 2, 0x0403, 0x0605, 0x0807, 0x0A09),
        "0102030405060708090a",
        "0102040306050807" + "0a09",
    ),
]


@pytest.mark.parametrize(("name", "header", "little", "big"), HEADERS)
def test_bytes_are_in_native_order(name, header, little, big):
    expected = bytes.fromhex(little if sys.byteorder == "little" else big)
    buf = poisoned(bytes([POISON] * 10))
    vnet.store(buf, 9, *header)
    assert buf == poisoned(expected)
    assert vnet.parse(buf, 9) == header


@given(headers, st.integers(0, 20))
def test_round_trip_and_nothing_else_written(header, at):
    buf = bytearray([POISON] * 30)
    vnet.store(buf, at, *header)
    assert bytes(buf[at : at + 10]) == struct.pack("@BBHHHH", *header)
    assert buf[:at] + buf[at + 10 :] == bytes([POISON] * 20)
    assert vnet.parse(buf, at) == header


@given(st.binary(min_size=10, max_size=10))
def test_any_ten_bytes_parse_and_store_back(octets):
    buf = bytearray(10)
    vnet.store(buf, 0, *vnet.parse(octets, 0))
    assert buf == octets


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_parse_reads_any_buffer(wrap):
    octets = struct.pack("=BBHHHH", 1, 4, 60, 1390, 40, 16)
    assert vnet.parse(wrap(octets), 0) == VnetHeader(1, 4, 60, 1390, 40, 16)


def test_store_writes_into_a_memoryview():
    buf = bytearray(30)
    vnet.store(memoryview(buf)[5:25], 5, 1, 0, 0, 0, 20, 6)
    assert buf == bytes(10) + struct.pack("=BBHHHH", 1, 0, 0, 0, 20, 6) + bytes(10)


def test_too_short_for_a_header():
    for length in range(10):
        with pytest.raises(struct.error):
            vnet.parse(bytes(length), 0)
        with pytest.raises(struct.error):
            vnet.parse(bytes(10), 10 - length)
        with pytest.raises(IndexError):
            vnet.store(bytearray(length), 0, 0, 0, 0, 0, 0, 0)


def test_numbers_of_virtio_net_h():
    assert vnet.VNET_LENGTH == 10
    assert vnet.FLAG_NEEDS_CSUM == 1
    assert (vnet.GSO_NONE, vnet.GSO_TCPV4, vnet.GSO_TCPV6, vnet.GSO_UDP_L4) == (0, 1, 4, 5)
