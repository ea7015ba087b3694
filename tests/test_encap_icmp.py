"""encap/icmp.py: what may be answered, and answers byte for byte as scapy would write them."""

from ipaddress import ip_address

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import POISON, extension, fragment_header, ipv4, ipv6, poisoned, shortened, tcp, udp
from scapy.layers.inet import ICMP, IP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6PacketTooBig,
    ICMPv6TimeExceeded,
    IPv6,
)
from scapy.packet import Raw

from encap import icmp, ip
from encap.icmp import NO_ROUTE, TIME_EXCEEDED, TOO_BIG


def message(kind: int, code: int = 0) -> bytes:
    """An ICMP message of either family, its checksum of no interest here."""
    return bytes([kind, code, 0, 0, 0, 1, 0, 1]) + b"data"


ERRORS4 = {3, 4, 5, 11, 12}  # RFC 1122 3.2.2: destination unreachable, source quench, redirect, time exceeded, parameter

ANSWER4 = [
    ("udp", ipv4(udp()), True),
    ("tcp", ipv4(tcp(), 6), True),
    ("any protocol", ipv4(b"", 253), True),
    ("options", ipv4(udp(), options=b"\x01" * 40), True),
    ("echo request", ipv4(message(8), 1), True),
    ("echo request behind options", ipv4(message(8), 1, options=b"\x03\x03\x04\x00"), True),
    ("error behind options", ipv4(message(3), 1, options=b"\x08\x08\x08\x08"), False),
    ("icmp of one byte", ipv4(b"\x08", 1), True),
    ("error of one byte", ipv4(b"\x0b", 1), False),
    ("icmp of no byte", ipv4(b"", 1), False),
    ("icmp of no byte behind options", ipv4(b"", 1, options=b"\x08" * 40), False),
    ("type of an error in another protocol", ipv4(message(3), 17), True),
    ("icmpv6 number over IPv4", ipv4(message(1), 58), True),
    ("don't fragment", ipv4(udp(), fragment=0x4000), True),
    ("first fragment", ipv4(udp(), fragment=0x2000), True),
    ("first fragment of an echo", ipv4(message(8), 1, fragment=0x2000), True),
    ("first fragment of an error", ipv4(message(3), 1, fragment=0x2000), False),
    ("second fragment", ipv4(udp(), fragment=0x2001), False),
    ("last fragment", ipv4(udp(), fragment=0x0001), False),
    ("last fragment of the greatest offset", ipv4(udp(), fragment=0x1FFF), False),
    ("last fragment of an echo", ipv4(message(8), 1, fragment=0x0010), False),
    ("to multicast", ipv4(udp(), destination="224.0.0.1"), False),
    ("to the last multicast", ipv4(udp(), destination="239.255.255.255"), False),
    ("to broadcast", ipv4(udp(), destination="255.255.255.255"), False),
    ("echo to multicast", ipv4(message(8), 1, destination="224.0.0.5"), False),
    ("to just below multicast", ipv4(udp(), destination="223.255.255.255"), True),
    ("from nobody", ipv4(udp(), source="0.0.0.0"), False),
    ("from loopback", ipv4(udp(), source="127.0.0.1"), False),
    ("from the last loopback", ipv4(udp(), source="127.255.255.255"), False),
    ("from just above loopback", ipv4(udp(), source="128.0.0.0"), True),
    ("from just below loopback", ipv4(udp(), source="126.255.255.255"), True),
    ("from multicast", ipv4(udp(), source="224.0.0.1"), False),
    ("from the last multicast", ipv4(udp(), source="239.255.255.255"), False),
    ("from broadcast", ipv4(udp(), source="255.255.255.255"), False),
]

FOUR_HEADERS = extension(60) + extension(43, 1) + extension(60, 3) + extension(58)

ANSWER6 = [
    ("udp", ipv6(udp()), True),
    ("tcp", ipv6(tcp(), 6), True),
    ("any protocol", ipv6(b"", 253), True),
    ("no next header", ipv6(b"", 59), True),
    ("echo request", ipv6(message(128), 58), True),
    ("echo reply", ipv6(message(129), 58), True),
    ("icmpv6 of one byte", ipv6(b"\x80", 58), True),
    ("error of one byte", ipv6(b"\x01", 58), False),
    ("icmpv6 of no byte", ipv6(b"", 58), False),
    ("icmpv4 number over IPv6", ipv6(message(3), 1), True),
    ("redirect", ipv6(message(137), 58), False),  # RFC 4443 2.4 (e.2)
    ("redirect behind destination options", ipv6(extension(58) + message(137), 60), False),
    ("hop-by-hop, udp", ipv6(extension(17) + udp(), 0), True),
    ("hop-by-hop, echo", ipv6(extension(58) + message(128), 0), True),
    ("hop-by-hop, error", ipv6(extension(58) + message(1), 0), False),
    ("destination options, error", ipv6(extension(58, 2) + message(2), 60), False),
    ("routing, error", ipv6(extension(58, 1) + message(3), 43), False),
    (
        "four headers, error",
        ipv6(FOUR_HEADERS + message(4), 0),
        False,
    ),
    (
        "four headers, echo",
        ipv6(FOUR_HEADERS + message(128), 0),
        True,
    ),
    ("longest header, error", ipv6(extension(58, 255) + message(1), 0), False),
    ("atomic fragment", ipv6(fragment_header(17, 0, False) + udp(), 44), True),
    ("first fragment", ipv6(fragment_header(17, 0, True) + udp(), 44), True),
    ("first fragment of an echo", ipv6(fragment_header(58, 0, True) + message(128), 44), True),
    ("first fragment of an error", ipv6(fragment_header(58, 0, True) + message(1), 44), False),
    (
        "first fragment, options, error",
        ipv6(fragment_header(60, 0, True) + extension(58) + message(1), 44),
        False,
    ),
    ("second fragment", ipv6(fragment_header(17, 1, True) + udp(), 44), False),
    ("last fragment", ipv6(fragment_header(17, 1, False) + udp(), 44), False),
    ("last fragment of the greatest offset", ipv6(fragment_header(17, 0x1FFF, False) + udp(), 44), False),
    ("last fragment, header alone", ipv6(fragment_header(17, 1, False), 44), False),
    ("second fragment behind hop-by-hop", ipv6(extension(44) + fragment_header(17, 9, True) + udp(), 0), False),
    ("reserved bits of a first fragment", ipv6(b"\x11\xff\x00\x07" + bytes(4) + udp(), 44), True),
    ("to multicast", ipv6(udp(), destination="ff02::1"), False),
    ("to the last multicast", ipv6(udp(), destination="ffff::1"), False),
    ("to just below multicast", ipv6(udp(), destination="feff::1"), True),
    ("from nobody", ipv6(udp(), source="::"), False),
    ("from loopback", ipv6(udp(), source="::1"), False),
    ("from multicast", ipv6(udp(), source="ff0e::5"), False),
    ("from a link-local address", ipv6(udp(), source="fe80::5"), True),
]


@pytest.mark.parametrize(("name", "packet", "expected"), ANSWER4, ids=[row[0] for row in ANSWER4])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_may_answer_ipv4(name, packet, expected, wrap):
    assert ip.check(packet, 0, len(packet)) == 0
    assert icmp.may_answer(wrap(packet)) is expected


@pytest.mark.parametrize(("name", "packet", "expected"), ANSWER6, ids=[row[0] for row in ANSWER6])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_may_answer_ipv6(name, packet, expected, wrap):
    assert ip.check(packet, 0, len(packet)) == 0
    assert icmp.may_answer(wrap(packet)) is expected


def test_may_answer_every_icmp_type_that_is_no_error():
    for kind in range(256):
        assert icmp.may_answer(ipv4(message(kind), 1)) is (kind not in ERRORS4), kind


def test_may_answer_every_icmpv6_type_that_is_no_error():
    for kind in range(256):
        if kind != 137:  # the redirect has a row of its own
            assert icmp.may_answer(ipv6(message(kind), 58)) is (kind >= 128), kind


@pytest.mark.parametrize(
    "packet",
    [
        ipv4(message(3), 1, options=b"\x01" * 40),
        ipv6(extension(43, 1) + extension(60, 2) + fragment_header(58, 0, True) + message(1), 0),
    ],
    ids=["v4", "v6"],
)
def test_an_error_cut_short_is_never_taken_for_an_echo(packet):
    assert icmp.may_answer(packet) is False
    for short in shortened(packet):
        assert type(icmp.may_answer(short)) is bool
    for short in list(shortened(packet))[-len(message(3)) :]:  # the whole chain is there, the message is not
        assert icmp.may_answer(short) is False


@given(
    st.lists(st.tuples(st.sampled_from([0, 43, 44, 58, 60, 17]), st.integers(0, 255)), max_size=5),
    st.sampled_from([0, 43, 44, 58, 60]),
    st.binary(max_size=30),
)
def test_any_chain_is_judged_without_an_exception(chain, first, rest):
    headers = b"".join(bytes([protocol, units]) + bytes(6) for protocol, units in chain)
    assert type(icmp.may_answer(ipv6(headers + rest, first))) is bool


# Answers

ROUTER4, ROUTER6 = "10.1.1.1", "fd00::1:1"
KINDS = [
    # name, kind, mtu, scapy's ICMP and ICMPv6
    ("no route", NO_ROUTE, 0, ICMP(type=3, code=0), ICMPv6DestUnreach(type=1, code=0)),
    ("time exceeded", TIME_EXCEEDED, 0, ICMP(type=11, code=0), ICMPv6TimeExceeded(type=3, code=0)),
    ("too big", TOO_BIG, 1380, ICMP(type=3, code=4, nexthopmtu=1380), ICMPv6PacketTooBig(type=2, code=0, mtu=1380)),
    ("too big, floor", TOO_BIG, 552, ICMP(type=3, code=4, nexthopmtu=552), ICMPv6PacketTooBig(type=2, code=0, mtu=552)),
    (
        "too big, most",
        TOO_BIG,
        65535,
        ICMP(type=3, code=4, nexthopmtu=65535),
        ICMPv6PacketTooBig(type=2, code=0, mtu=65535),
    ),
]
IDS = [row[0] for row in KINDS]


def answer4(kind: icmp.ErrorKind, packet: bytes, mtu: int = 0) -> bytes:
    made = icmp.error(kind, packet, ip_address(ROUTER4), mtu)
    assert type(made) is bytes
    assert ip.check(made, 0, len(made)) == 0
    return made


def answer6(kind: icmp.ErrorKind, packet: bytes, mtu: int = 0) -> bytes:
    made = icmp.error(kind, packet, ip_address(ROUTER6), mtu)
    assert type(made) is bytes
    assert ip.check(made, 0, len(made)) == 0
    return made


@pytest.mark.parametrize(("name", "kind", "mtu", "layer", "layer6"), KINDS, ids=IDS)
@pytest.mark.parametrize("payload", [0, 1, 2, 7, 519, 520, 521, 522, 1472, 65507])
def test_error_ipv4_is_scapys(name, kind, mtu, layer, layer6, payload):
    packet = ipv4(udp(bytes([POISON] * payload)))
    made = answer4(kind, packet, mtu)
    quote = packet[: 576 - 28]
    expected = IP(src=ROUTER4, dst="10.1.1.5", tos=0xC0, id=0, flags="DF", ttl=64) / layer / Raw(quote)
    assert made == bytes(expected)
    assert len(made) == min(28 + len(packet), 576)


@pytest.mark.parametrize(("name", "kind", "mtu", "layer", "layer6"), KINDS, ids=IDS)
@pytest.mark.parametrize("payload", [0, 1, 2, 7, 1183, 1184, 1185, 1186, 1472, 65487])
def test_error_ipv6_is_scapys(name, kind, mtu, layer, layer6, payload):
    packet = ipv6(udp(bytes([POISON] * payload)))
    made = answer6(kind, packet, mtu)
    quote = packet[: 1280 - 48]
    expected = IPv6(src=ROUTER6, dst="fd00::1:5", hlim=64) / layer6 / Raw(quote)
    assert made == bytes(expected)
    assert len(made) == min(48 + len(packet), 1280)


@pytest.mark.parametrize(("name", "kind", "mtu", "layer", "layer6"), KINDS, ids=IDS)
def test_fixed_bytes_of_an_error_ipv4(name, kind, mtu, layer, layer6):
    made = answer4(kind, ipv4(udp()), mtu)
    assert made[:10].hex() == "45c0" + f"{len(made):04x}" + "00004000" + "4001"
    assert made[12:20] == ip_address(ROUTER4).packed + ip_address("10.1.1.5").packed
    assert (made[20], made[21]) == {"no": (3, 0), "time": (11, 0), "too": (3, 4)}[name.split()[0]]
    assert made[24:28] == b"\0\0" + mtu.to_bytes(2, "big")
    assert made[28:] == ipv4(udp())


@pytest.mark.parametrize(("name", "kind", "mtu", "layer", "layer6"), KINDS, ids=IDS)
def test_fixed_bytes_of_an_error_ipv6(name, kind, mtu, layer, layer6):
    made = answer6(kind, ipv6(udp()), mtu)
    assert made[:8].hex() == "60000000" + f"{len(made) - 40:04x}" + "3a40"
    assert made[8:40] == ip_address(ROUTER6).packed + ip_address("fd00::1:5").packed
    assert (made[40], made[41]) == {"no": (1, 0), "time": (3, 0), "too": (2, 0)}[name.split()[0]]
    assert made[44:48] == mtu.to_bytes(4, "big")
    assert made[48:] == ipv6(udp())


def test_checksums_of_answers_of_every_length_verify():
    for length in range(600):
        made = answer4(TOO_BIG, ipv4(bytes([POISON] * length), 253), 1400)
        assert reference.internet_checksum(made[:20]) == 0
        assert reference.internet_checksum(made[20:]) == 0
    for length in [*range(50), *range(1180, 1300)]:
        made = answer6(TOO_BIG, ipv6(bytes([POISON] * length), 253), 1400)
        pseudo = reference.pseudo_header(ROUTER6, "fd00::1:5", 58, len(made) - 40)
        assert reference.internet_checksum(pseudo + made[40:]) == 0


def test_scapy_reads_answers_and_finds_the_offender_in_them():
    offender = IP(ipv4(udp(), options=b"\x01" * 4))
    layer = IP(answer4(TOO_BIG, bytes(offender), 1400))
    assert (layer.src, layer.dst, layer.proto, str(layer.flags), layer.frag) == (ROUTER4, "10.1.1.5", 1, "DF", 0)
    assert (layer[ICMP].type, layer[ICMP].code, layer[ICMP].nexthopmtu) == (3, 4, 1400)
    assert bytes(layer[ICMP].payload) == bytes(offender)
    offender = IPv6(ipv6(udp()))
    layer = IPv6(answer6(TOO_BIG, bytes(offender), 1400))
    assert (layer.src, layer.dst, layer.nh, layer.plen) == (ROUTER6, "fd00::1:5", 58, 8 + len(bytes(offender)))
    assert (layer[ICMPv6PacketTooBig].code, layer[ICMPv6PacketTooBig].mtu) == (0, 1400)
    assert bytes(layer[ICMPv6PacketTooBig].payload) == bytes(offender)


@pytest.mark.parametrize("kind", [NO_ROUTE, TIME_EXCEEDED, TOO_BIG])
@pytest.mark.parametrize("packet", [ipv4(udp(b"x" * 700)), ipv6(udp(b"x" * 1400))], ids=["v4", "v6"])
def test_an_error_is_never_answered_and_its_offender_not_changed(kind, packet):
    answer = answer4 if packet[0] >> 4 == 4 else answer6
    offender = bytearray(packet)
    made = answer(kind, offender, 1400)
    assert offender == packet
    assert made == answer(kind, packet, 1400) == answer(kind, memoryview(poisoned(packet))[9:-7], 1400)
    assert icmp.may_answer(made) is False


def test_answers_to_every_length_of_packet():
    for short in shortened(ipv4(message(8), 1, options=b"\x01" * 8)):
        assert answer4(NO_ROUTE, short)[28:] == short
    for short in shortened(ipv6(extension(58, 2) + message(128), 0)):
        assert answer6(NO_ROUTE, short)[48:] == short
