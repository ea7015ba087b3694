"""encap/ip.py: judging lengths, TTL against a full recomputation, flows, and partial transport checksums."""

import itertools
import random

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import (
    POISON,
    check_ip,
    extension,
    flows,
    fragment_header,
    ipv4,
    ipv6,
    not_complemented,
    poisoned,
    shortened,
    tcp,
    udp,
    with_length,
)
from reference_encap import ip as packet_of
from scapy.layers.inet import IP, TCP, UDP, fragment
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    fragment6,
)
from scapy.packet import Raw

from encap import ip
from encap.faults import OK, Fault


def judge(packet: bytes) -> int:
    """The verdict on `packet` alone in its buffer, after comparing the one amid poison."""
    alone = ip.check(packet, 0, len(packet))
    buf = poisoned(packet)
    assert ip.check(buf, 9, len(packet)) == alone
    assert buf == poisoned(packet)
    return alone


def v4(first: int = 0x45, total: int = 28, there: int = 28) -> bytes:
    return (bytes([first, 0]) + total.to_bytes(2, "big") + bytes([POISON] * 65600))[:there]


def v6(payload: int = 8, there: int = 48) -> bytes:
    return (b"\x60\0\0\0" + payload.to_bytes(2, "big") + bytes([POISON] * 65600))[:there]


@pytest.mark.parametrize(
    ("name", "packet", "expected"),
    [
        ("empty", b"", Fault.TRUNCATED),
        ("IPv4", v4(), OK),
        ("IPv4 header alone", v4(total=20, there=20), OK),
        ("IPv4 with options", v4(0x46, 28, 28), OK),
        ("IPv4 with all options", v4(0x4F, 60, 60), OK),
        ("IPv4 of the greatest length", v4(total=65535, there=65535), OK),
        ("IPv4, first byte alone", v4(there=1), Fault.TRUNCATED),
        ("IPv4, a byte short of a header", v4(total=19, there=19), Fault.TRUNCATED),
        ("IHL 0", v4(0x40), Fault.BAD_LENGTH),
        ("IHL 4", v4(0x44), Fault.BAD_LENGTH),
        ("IHL 4, total 16, of 20", v4(0x44, 16, 20), Fault.BAD_LENGTH),
        ("IHL 8, total 28", v4(0x48, 28, 28), Fault.BAD_LENGTH),
        ("IHL beyond what is there", v4(0x4F, 60, 28), Fault.TRUNCATED),
        ("IHL beyond total and what is there", v4(0x4F, 28, 28), Fault.BAD_LENGTH),
        ("total 0, as after TSO", v4(total=0), Fault.BAD_LENGTH),
        ("total a byte below the header", v4(total=19), Fault.BAD_LENGTH),
        ("total a byte below the options", v4(0x46, 23, 28), Fault.BAD_LENGTH),
        ("total a byte more than is there", v4(total=29), Fault.TRUNCATED),
        ("total of 65535", v4(total=65535), Fault.TRUNCATED),
        ("a byte behind the packet", v4(there=29), Fault.BAD_LENGTH),
        ("Ethernet padding behind the packet", v4(there=46), Fault.BAD_LENGTH),
        ("65536 bytes", v4(total=65535, there=65536), Fault.BAD_LENGTH),
        ("IPv6", v6(), OK),
        ("IPv6 header alone", v6(0, 40), OK),
        ("IPv6 of the greatest length", v6(65535, 65575), OK),
        ("IPv6, first byte alone", v6(there=1), Fault.TRUNCATED),
        ("IPv6, a byte short of a header", v6(0, 39), Fault.TRUNCATED),
        ("IPv6 payload a byte more than is there", v6(9), Fault.TRUNCATED),
        ("IPv6 payload of 65535", v6(65535), Fault.TRUNCATED),
        ("IPv6 payload a byte less than is there", v6(7), Fault.BAD_LENGTH),
        ("IPv6 jumbogram", v6(0), Fault.BAD_LENGTH),
        ("version 0", v4(0x05), Fault.NOT_IP),
        ("version 5", v4(0x55), Fault.NOT_IP),
        ("version 7", v4(0x75), Fault.NOT_IP),
        ("version 15", v4(0xF5), Fault.NOT_IP),
        ("version 0, one byte", b"\0", Fault.NOT_IP),
        ("version 15, one byte", b"\xff", Fault.NOT_IP),
    ],
)
def test_check(name, packet, expected):
    assert judge(packet) == expected
    assert check_ip(packet) == expected


WHOLE = {
    "v4 udp": ipv4(udp()),
    "v4 tcp": ipv4(tcp(), 6),
    "v4 options": ipv4(udp(), options=b"\x01" * 40),
    "v4 icmp": ipv4(b"\x08\0\0\0\0\1\0\1data", 1),
    "v4 fragment": ipv4(udp(), fragment=0x2000),
    "v6 udp": ipv6(udp()),
    "v6 tcp": ipv6(tcp(), 6),
    "v6 hop-by-hop": ipv6(extension(60, 2) + extension(6) + tcp(), 0),
    "v6 fragment": ipv6(fragment_header(17, 0, True) + udp(), 44),
}


@pytest.mark.parametrize("name", WHOLE)
def test_check_of_a_packet_cut_anywhere_or_followed_by_anything(name):
    packet = WHOLE[name]
    assert judge(packet) == 0
    for length in range(len(packet)):
        assert judge(packet[:length]) == Fault.TRUNCATED, length
        assert ip.check(packet, 0, length) == Fault.TRUNCATED, length
    for more in (1, 2, 17, 1500):
        assert judge(packet + bytes([POISON] * more)) == Fault.BAD_LENGTH


@pytest.mark.parametrize("length", range(70))
def test_check_of_every_first_byte_and_stated_length(length):
    for first, stated in itertools.product(
        range(256), (0, length - 41, length - 40, length - 39, length - 1, length, 65535)
    ):
        packet = (bytes([first, 0]) + (stated & 0xFFFF).to_bytes(2, "big") * 2 + bytes(64))[:length]
        assert ip.check(packet, 0, length) == check_ip(packet), (first, stated)


plausible = st.builds(
    lambda first, stated, rest: bytes([first, 0]) + stated.to_bytes(2, "big") * 2 + rest,
    st.sampled_from([0x45, 0x46, 0x4F, 0x44, 0x60, 0x6F, 0x50]),
    st.integers(0, 80),
    st.binary(max_size=74),
)


@given(st.one_of(plausible, st.binary(max_size=100)))
def test_check_agrees_with_its_twin_on_anything(packet):
    assert judge(packet) == check_ip(packet)


@given(st.one_of(plausible, st.binary(max_size=100)))
def test_what_check_accepts_nothing_else_stumbles_over(packet):
    if ip.check(packet, 0, len(packet)) == 0:
        assert ip.stated_length(packet, 0, len(packet)) == len(packet)
        assert 0 <= ip.flow_hash(packet, 0, len(packet)) < 2**32
        assert ip.partial_checksum(packet, 0, len(packet)) in range(0x10000 << 8)
        assert ip.ttl(packet, 0) == packet[8 if packet[0] >> 4 == 4 else 7]


@pytest.mark.parametrize(
    ("name", "buf", "expected"),
    [
        ("IPv4 padded to an Ethernet frame", v4(there=46), 28),
        ("IPv4 longer than what is there", v4(total=1000), 1000),
        ("IPv4 exactly", v4(), 28),
        ("IPv4, too little to say", v4(total=1000, there=19), 19),
        ("IPv4, header alone", v4(total=1000, there=20), 1000),
        ("IPv6 padded", v6(2, 46), 42),
        ("IPv6 longer than what is there", v6(1000), 1040),
        ("IPv6, too little to say", v6(1000, 39), 39),
        ("IPv6, header alone", v6(1000, 40), 1040),
        ("neither", b"\x50" * 46, 46),
        ("nothing", b"", 0),
    ],
)
def test_stated_length(name, buf, expected):
    assert ip.stated_length(buf, 0, len(buf)) == expected
    assert ip.stated_length(poisoned(buf), 9, len(buf)) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x0000, False),
        (0x4000, False),  # don't fragment
        (0x8000, False),  # the reserved bit
        (0xC000, False),
        (0x2000, True),
        (0x0001, True),
        (0x1FFF, True),
        (0x1000, True),
        (0x2001, True),
        (0x6000, True),
        (0xFFFF, True),
    ],
)
def test_is_fragment(word, expected):
    assert bool(ip.is_fragment(poisoned(ipv4(fragment=word)), 9)) is expected


# TTL

EDGES = [0x0000, 0x0001, 0x00FF, 0x0100, 0x0101, 0x7FFF, 0x8000, 0xFEFE, 0xFEFF, 0xFF00, 0xFFFE]


def with_checksum(wanted: int, ttl: int, options: bytes) -> bytes:
    """A header whose correct checksum is `wanted`, by choice of its identification."""
    without = ipv4(b"payload", ttl=ttl, options=options, identification=0)
    have = 0xFFFF - int.from_bytes(without[10:12], "big")
    return ipv4(b"payload", ttl=ttl, options=options, identification=(0xFFFF - wanted - have) % 0xFFFF)


@pytest.mark.parametrize("options", [b"", b"\x01" * 4, random.Random(791).randbytes(40)])
@pytest.mark.parametrize("edge", EDGES)
def test_decrement_ttl_equals_recomputation(edge, options):
    for ttl in range(1, 256):
        before = with_checksum(edge, ttl, options)
        assert int.from_bytes(before[10:12], "big") == edge
        identification = int.from_bytes(before[4:6], "big")
        buf = poisoned(before)
        ip.decrement_ttl(buf, 9)
        expected = ipv4(b"payload", ttl=ttl - 1, options=options, identification=identification)
        assert buf == poisoned(expected), ttl


@pytest.mark.parametrize("edge", EDGES)
def test_decrement_ttl_arrives_at_edge_values(edge):
    for ttl in range(1, 256):
        expected = with_checksum(edge, ttl - 1, b"")
        identification = int.from_bytes(expected[4:6], "big")
        buf = bytearray(ipv4(b"payload", ttl=ttl, identification=identification))
        ip.decrement_ttl(buf, 0)
        assert buf == expected, ttl


def test_decrement_ttl_of_a_header_with_the_other_zero():
    for ttl in range(1, 256):
        buf = bytearray(with_checksum(0x0000, ttl, b""))
        expected = ipv4(b"payload", ttl=ttl - 1, identification=int.from_bytes(buf[4:6], "big"))
        buf[10:12] = b"\xff\xff"
        assert reference.internet_checksum(bytes(buf[:20])) == 0
        ip.decrement_ttl(buf, 0)
        assert buf == expected


@given(st.integers(0, 0xFFFF), st.integers(1, 255), st.integers(0, 0xFFFF), st.integers(0, 255))
def test_decrement_ttl_neither_breaks_nor_repairs_a_checksum(stored, ttl, identification, protocol):
    buf = bytearray(ipv4(b"", protocol, ttl=ttl, identification=identification))
    buf[10:12] = stored.to_bytes(2, "big")
    before = reference.internet_checksum(bytes(buf))
    ip.decrement_ttl(buf, 0)
    assert buf[8] == ttl - 1
    assert reference.internet_checksum(bytes(buf)) % 0xFFFF == before % 0xFFFF


def test_decrement_ttl_agrees_with_scapy():
    layer = IP(src="10.1.1.5", dst="10.1.2.5", ttl=2, id=7) / UDP(sport=1, dport=2) / Raw(b"x")
    buf = bytearray(bytes(layer))
    ip.decrement_ttl(buf, 0)
    layer.ttl = 1
    assert buf == bytes(layer)
    assert ip.ttl(buf, 0) == 1


def test_decrement_hop_limit():
    for hops in range(1, 256):
        buf = poisoned(ipv6(udp(), hops=hops))
        assert ip.ttl(buf, 9) == hops
        ip.decrement_ttl(buf, 9)
        assert buf == poisoned(ipv6(udp(), hops=hops - 1))


# flow_hash


def flow(packet: bytes) -> int:
    """The hash of `packet` alone in its buffer, after comparing the one amid poison."""
    alone = ip.flow_hash(packet, 0, len(packet))
    buf = poisoned(packet)
    assert ip.flow_hash(buf, 9, len(packet)) == alone
    assert buf == poisoned(packet)
    assert 0 <= alone < 2**32
    return alone


@pytest.mark.parametrize(("transport", "protocol"), [(udp, 17), (tcp, 6)])
def test_packets_of_a_flow_hash_alike(transport, protocol):
    hashes = {
        flow(ipv4(transport(payload, checksum), protocol, ttl=ttl, identification=number, fragment=word, options=options))
        for payload, checksum, ttl, number, word, options in (
            (b"", 0, 64, 1, 0, b""),
            (b"other", 0x1234, 64, 1, 0, b""),
            (b"", 0, 3, 2, 0x4000, b""),
            (b"", 0, 64, 65535, 0, b"\x01" * 4),
            (bytes(1400), 0xFFFF, 64, 1, 0, b"\x01" * 40),
        )
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(("transport", "protocol"), [(udp, 17), (tcp, 6)])
def test_packets_of_an_ipv6_flow_hash_alike(transport, protocol):
    first = ipv6(transport(), protocol)
    labelled = bytes([0x6A, 0xBC, 0xDE, 0xF0]) + first[4:]
    assert flow(first) == flow(labelled) == flow(ipv6(transport(b"other", 7), protocol, hops=3))


@pytest.mark.parametrize("version", [4, 6])
def test_whatever_names_a_flow_matters(version):
    near, far, other = ("10.1.1.5", "10.1.2.5", "10.1.2.6") if version == 4 else ("fd00::1:5", "fd00::2:5", "fd00::2:6")
    packets = {
        "first": packet_of(version, udp(), 17, source=near, destination=far),
        "reverse addresses": packet_of(version, udp(), 17, source=far, destination=near),
        "reverse": packet_of(version, udp(sport=2000, dport=1000), 17, source=far, destination=near),
        "reverse ports": packet_of(version, udp(sport=2000, dport=1000), 17, source=near, destination=far),
        "source port": packet_of(version, udp(sport=1001), 17, source=near, destination=far),
        "destination port": packet_of(version, udp(dport=2001), 17, source=near, destination=far),
        "protocol": packet_of(version, tcp(), 6, source=near, destination=far),
        "no ports": packet_of(version, udp(), 253, source=near, destination=far),
        "destination": packet_of(version, udp(), 17, source=near, destination=other),
        "source": packet_of(version, udp(), 17, source=other, destination=far),
    }
    assert len({flow(packet) for packet in packets.values()}) == len(packets)


@pytest.mark.parametrize(
    ("packet", "bits"), [(ipv4(udp()), range(96, 192)), (ipv6(udp()), range(64, 352))], ids=["v4", "v6"]
)
def test_every_bit_of_an_address_or_port_matters(packet, bits):
    for bit in bits:
        other = bytearray(packet)
        other[bit // 8] ^= 0x80 >> bit % 8
        assert flow(bytes(other)) != flow(packet), bit


@pytest.mark.parametrize("version", [4, 6])
def test_protocols_without_ports_hash_by_addresses(version):
    for protocol in (1, 50, 58, 132):
        hashes = {flow(packet_of(version, bytes([fill] * 20), protocol)) for fill in (0, 1, 255)}
        assert len(hashes) == 1


@pytest.mark.parametrize("transport", [UDP(sport=1000, dport=2000), TCP(sport=1000, dport=2000, flags="A")])
def test_all_fragments_of_a_datagram_hash_alike(transport):
    datagram = IP(src="10.1.1.5", dst="10.1.2.5", id=77) / transport / Raw(bytes(range(256)) * 16)
    parts = [bytes(part) for part in fragment(datagram, 1000)]
    assert len(parts) > 4
    assert parts[0][20:24] == bytes.fromhex("03e807d0")
    assert len({flow(part) for part in parts}) == 1


def test_all_fragments_of_an_ipv6_datagram_hash_alike():
    datagram = (
        IPv6(src="fd00::1:5", dst="fd00::2:5") / IPv6ExtHdrFragment(id=77) / UDP(sport=1000, dport=2000) / Raw(bytes(4096))
    )
    parts = [bytes(part) for part in fragment6(datagram, 1280)]
    assert len(parts) > 3
    assert len({flow(part) for part in parts}) == 1


def test_fragments_of_other_ports_hash_alike_and_of_other_addresses_do_not():
    for word in (0x2000, 0x2001, 0x0001, 0x1FFF):
        assert flow(ipv4(udp(), fragment=word)) == flow(ipv4(udp(sport=9), fragment=0x2000))
        assert flow(ipv4(udp(), fragment=word)) != flow(ipv4(udp(), fragment=word, source="10.1.1.6"))


@pytest.mark.parametrize("name", WHOLE)
def test_flow_hash_at_every_length_reads_only_the_packet(name):
    packet = WHOLE[name]
    for short in shortened(packet):
        assert ip.flow_hash(short, 0, len(short)) == ip.flow_hash(short + b"\xff" * 40, 0, len(short))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("shift", [0, 4, 8, 15, 27, 28])
def test_flow_hash_spreads_evenly(version, shift):
    buckets = [0] * 16
    for packet in flows(version, 10_000):
        buckets[ip.flow_hash(packet, 0, len(packet)) >> shift & 15] += 1
    chi_square = sum((count - 625) ** 2 / 625 for count in buckets)
    assert chi_square < 37.7, buckets  # 15 degrees of freedom: a random spread is worse once in a thousand times


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("protocol", [1, 17])
def test_flow_hash_spreads_pairs_of_hosts_too(version, protocol):
    # pairs of hosts fall together more often than chance has it, which must not empty or overfill a bucket
    buckets = [0] * 16
    for near, far in itertools.product(range(1, 101), repeat=2):
        source, destination = (
            (f"10.1.1.{near}", f"10.1.2.{far}") if version == 4 else (f"fd00::1:{near:x}", f"fd00::2:{far:x}")
        )
        packet = packet_of(version, udp(b""), protocol, source=source, destination=destination)
        buckets[ip.flow_hash(packet, 0, len(packet)) & 15] += 1
    assert all(625 * 0.5 < count < 625 * 1.5 for count in buckets), buckets


@pytest.mark.parametrize("version", [4, 6])
def test_flow_hash_rarely_collides(version):
    # 10 000 values of 32 bits collide 0.01 times by chance
    assert len({ip.flow_hash(packet, 0, len(packet)) for packet in flows(version, 10_000)}) >= 9_999


# partial_checksum

SOURCES = {4: ("10.1.1.5", "10.1.2.5"), 6: ("fd00::1:5", "fd00::2:5")}
TRANSPORTS = {"tcp": (tcp, 6, 16, 20), "udp": (udp, 17, 6, 8)}
FRAMES = [
    # name, family, transport header's distance, how to wrap
    ("v4", 4, 20, ipv4),
    ("v4 with don't fragment", 4, 20, lambda payload, protocol: ipv4(payload, protocol, fragment=0x4000)),
    ("v4 with the reserved bit", 4, 20, lambda payload, protocol: ipv4(payload, protocol, fragment=0x8000)),
    ("v4 with an option", 4, 24, lambda payload, protocol: ipv4(payload, protocol, options=b"\x01" * 4)),
    ("v4 with all options", 4, 60, lambda payload, protocol: ipv4(payload, protocol, options=b"\xa5" * 40)),
    ("v6", 6, 40, ipv6),
    ("v6 hop-by-hop", 6, 48, lambda payload, protocol: ipv6(extension(protocol) + payload, 0)),
    ("v6 destination options", 6, 48, lambda payload, protocol: ipv6(extension(protocol) + payload, 60)),
    ("v6 long hop-by-hop", 6, 40 + 2048, lambda payload, protocol: ipv6(extension(protocol, 255) + payload, 0)),
    ("v6 both", 6, 40 + 24 + 16, lambda payload, protocol: ipv6(extension(60, 2) + extension(protocol, 1) + payload, 0)),
]


def partial(packet: bytes) -> int:
    """The result on `packet` alone in its buffer, after comparing the one amid poison."""
    alone = ip.partial_checksum(packet, 0, len(packet))
    buf = poisoned(packet)
    assert ip.partial_checksum(buf, 9, len(packet)) == alone
    assert buf == poisoned(packet)
    return alone


@pytest.mark.parametrize(("name", "version", "start", "wrap"), FRAMES, ids=[frame[0] for frame in FRAMES])
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_partial_checksum_is_found(name, version, start, wrap, kind):
    build, protocol, field, header = TRANSPORTS[kind]
    for length in (0, 1, 2, 7, 100, 1400):
        pseudo = not_complemented(*SOURCES[version], protocol, header + length)
        payload = bytes([POISON] * length)
        assert partial(wrap(build(payload, pseudo), protocol)) == start << 8 | field
        assert partial(wrap(build(payload, pseudo ^ 0x0001), protocol)) == 0
        assert partial(wrap(build(payload, pseudo ^ 0x8000), protocol)) == 0
        assert partial(wrap(build(payload, 0xFFFF - pseudo), protocol)) == 0


SCAPY_FRAMES = {
    "v4": IP(src="10.1.1.5", dst="10.1.2.5"),
    "v4 options": IP(src="10.1.1.5", dst="10.1.2.5", options=b"\x01" * 8),
    "v6": IPv6(src="fd00::1:5", dst="fd00::2:5"),
    "v6 hop-by-hop": IPv6(src="fd00::1:5", dst="fd00::2:5") / IPv6ExtHdrHopByHop(),
    "v6 both": IPv6(src="fd00::1:5", dst="fd00::2:5") / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt(),
}


@pytest.mark.parametrize("frame", SCAPY_FRAMES)
@pytest.mark.parametrize("transport", [UDP(sport=1, dport=2), TCP(sport=1, dport=2)])
def test_complete_checksum_is_left_alone_and_partial_is_found_as_scapy_lays_them_out(frame, transport):
    layer = SCAPY_FRAMES[frame]
    start = len(bytes(layer))
    field, protocol = (6, 17) if isinstance(transport, UDP) else (16, 6)
    for length in range(64):
        whole = bytes(layer / transport / Raw(bytes(range(length))))
        assert judge(whole) == 0
        assert partial(whole) == 0, length
        pseudo = not_complemented(layer.src, layer.dst, protocol, len(whole) - start)
        unfinished = bytearray(whole)
        unfinished[start + field : start + field + 2] = pseudo.to_bytes(2, "big")
        assert partial(bytes(unfinished)) == start << 8 | field, length


def test_udp_without_a_checksum_is_complete():
    assert partial(ipv4(udp(checksum=0))) == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("word", [0x2000, 0x2001, 0x0001, 0x1FFF])
def test_fragments_have_no_partial_checksum(kind, word):
    build, protocol, _, header = TRANSPORTS[kind]
    segment = build(b"payload", not_complemented(*SOURCES[4], protocol, header + 7))
    assert partial(ipv4(segment, protocol)) != 0
    assert partial(ipv4(segment, protocol, fragment=word)) == 0


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize(
    "chain",
    [
        lambda protocol: (44, fragment_header(protocol, 0, True)),
        lambda protocol: (44, fragment_header(protocol, 1, False)),
        lambda protocol: (44, fragment_header(protocol, 0, False)),
        lambda protocol: (0, extension(44) + fragment_header(protocol, 0, True)),
        lambda protocol: (43, extension(protocol)),  # behind a routing header the destination is not the last one
        lambda protocol: (51, extension(protocol)),
    ],
)
def test_ipv6_headers_that_end_the_search(kind, chain):
    build, protocol, _, header = TRANSPORTS[kind]
    segment = build(b"payload", not_complemented(*SOURCES[6], protocol, header + 7))
    first, headers = chain(protocol)
    assert partial(ipv6(headers + segment, first)) == 0


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 41, 47, 58, 59, 132, 136, 255])
@pytest.mark.parametrize("version", [4, 6])
def test_other_protocols_have_no_partial_checksum(protocol, version):
    for build, header in ((tcp, 20), (udp, 8)):
        segment = build(b"payload" * 9, not_complemented(*SOURCES[version], protocol, header + 63))
        assert partial(packet_of(version, segment, protocol)) == 0


@pytest.mark.parametrize("version", [4, 6])
def test_truncated_transport_header_has_no_partial_checksum(version):
    # at 18 and 19 bytes the TCP checksum field is there, and right, but the header is not whole
    for kind, (build, protocol, _, header) in TRANSPORTS.items():
        for length in range(header + 1):
            segment = build(b"", not_complemented(*SOURCES[version], protocol, length))[:length]
            assert (partial(packet_of(version, segment, protocol)) != 0) is (length == header), (kind, length)


@pytest.mark.parametrize(
    ("name", "payload", "first"),
    [
        ("nothing behind hop-by-hop", b"", 0),
        ("half a hop-by-hop header", extension(17)[:4], 0),
        ("7 of 8 bytes", extension(17)[:7], 0),
        ("hop-by-hop and no more", extension(17), 0),
        ("hop-by-hop that says 2048 bytes", b"\x11\xff" + bytes(14), 0),
        ("hop-by-hop a unit too long", b"\x11\x01" + bytes(6), 0),
        ("destination options a unit too long", extension(60) + b"\x06\x01" + bytes(6), 0),
        ("hop-by-hop behind hop-by-hop to the end", extension(0) * 10, 0),
        ("TCP a byte behind the end", b"\x06\x00" + bytes(6) + bytes(19), 0),
        ("UDP a byte behind the end", b"\x11\x00" + bytes(6) + bytes(7), 0),
    ],
)
def test_chains_that_run_off_the_end(name, payload, first):
    packet = ipv6(payload, first)
    assert judge(packet) == 0
    assert partial(packet) == 0


@pytest.mark.parametrize("name", WHOLE)
def test_partial_checksum_at_every_length_reads_only_the_packet(name):
    for short in shortened(WHOLE[name]):
        assert judge(short) == 0
        assert partial(short) == 0, len(short)


@given(st.lists(st.tuples(st.sampled_from([0, 60, 6, 17, 44]), st.integers(0, 3)), max_size=6), st.integers(0, 80))
def test_any_chain_cut_anywhere(chain, length):
    headers = b"".join(extension(protocol, units) for protocol, units in chain) + tcp()
    packet = with_length(ipv6(headers, 0)[: 40 + length])
    result = partial(packet)
    if result:  # by chance
        assert result & 0xFF in {6, 16}
        assert 40 <= (result >> 8) + (result & 0xFF) <= len(packet) - 2
