"""encap/segment.py: against a slow twin, for every kind of packet; what does not fit is refused."""

import pytest
import reference
import reference_offload as twin
from hypothesis import example, given
from hypothesis import strategies as st
from reference_encap import POISON, poisoned
from reference_offload import ACK, CWR, FIN, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, PSH, SHAPES, TCP, UDP, body

from encap import segment
from encap.faults import Fault
from encap.vnet import VnetHeader

REFUSED = -Fault.BAD_OFFLOAD
BEFORE, AFTER = 13, 7


def cut(superpacket: bytes, gso_type: int, size: int, start: int, indices=None) -> list[bytes]:
    """Its packets, each written amid poison into a buffer that has room for nothing else."""
    source = bytes(poisoned(superpacket))
    length = len(superpacket)
    header_length = segment.check(source, 9, length, gso_type, size, start)
    assert header_length > 0
    count = segment.count(length, header_length, size)
    out = []
    for index in range(count) if indices is None else sorted({i % count for i in indices}):
        expected_length = header_length + min(size, length - header_length - index * size)
        target = bytearray([POISON] * (BEFORE + expected_length + AFTER))
        assert segment.segment(source, 9, length, header_length, start, size, index, target, BEFORE) == expected_length
        assert target[:BEFORE] == bytes([POISON] * BEFORE)
        assert target[BEFORE + expected_length :] == bytes([POISON] * AFTER)
        out.append(bytes(target[BEFORE : BEFORE + expected_length]))
        tight = bytearray(expected_length)
        segment.segment(source, 9, length, header_length, start, size, index, tight, 0)
        assert tight == out[-1]
    return out


def compare(shape: twin.Shape, payload: bytes, size: int, **fields) -> list[bytes]:
    superpacket = shape.make(payload, **fields)
    expected = twin.segments(superpacket, shape.gso_type, size, shape.start)
    assert cut(superpacket, shape.gso_type, size, shape.start) == expected
    return expected


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 7, 536, 1448])
def test_payloads_around_multiples_of_the_size(name, size):
    lengths = {max(0, multiple * size + more) for multiple in range(4) for more in (-1, 0, 1)}
    for length in sorted(lengths):
        assert len(compare(SHAPES[name], body(length), size)) == max(1, -(-length // size))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tail", [1, 50, 99, 100])
def test_one_to_46_segments(name, tail):
    for count in (*range(1, 12), 31, 32, 33, 45, 46):
        assert len(compare(SHAPES[name], body(100 * (count - 1) + tail), 100)) == count


@pytest.mark.parametrize("name", ["tcp4", "tcp6 timestamps"])
def test_all_tcp_flags(name):
    start = SHAPES[name].start
    for flags in range(256):
        first, middle, last = (packet[start + 13] for packet in compare(SHAPES[name], body(25), 10, flags=flags))
        assert first == flags & ~(FIN | PSH)
        assert middle == flags & ~(FIN | PSH | CWR)
        assert last == flags & ~CWR
        (only,) = compare(SHAPES[name], body(10), 10, flags=flags)
        assert only[start + 13] == flags


@pytest.mark.parametrize("reserved", [1, 8, 15])
def test_reserved_bits_and_urgent_pointer_are_copied(reserved):
    for packet in compare(SHAPES["tcp4"], body(25), 10, flags=ACK, reserved=reserved, urgent=0xABCD):
        assert (packet[32], packet[38:40]) == (0x50 | reserved, b"\xab\xcd")


@pytest.mark.parametrize("name", ["tcp4", "tcp6"])
@pytest.mark.parametrize("seq", [0, 2**32 - 1, 2**32 - 100, 2**32 - 101, 2**31 - 50, 0x7FFFFFFF, 0xFFFF])
def test_the_sequence_number_wraps_around(name, seq):
    start = SHAPES[name].start
    found = [twin.number(packet[start + 4 : start + 8]) for packet in compare(SHAPES[name], body(450), 100, seq=seq)]
    assert found == [(seq + 100 * index) % 2**32 for index in range(5)]


@pytest.mark.parametrize("name", ["tcp4", "udp4", "udp4 IP options"])
@pytest.mark.parametrize("fragment", [0, 0x4000, 0x8000])
@pytest.mark.parametrize("identification", [0, 65535, 65515, 32760])
def test_the_identification_counts_and_wraps_around(name, fragment, identification):
    packets = compare(SHAPES[name], body(460), 10, fragment=fragment, identification=identification)
    assert [twin.number(packet[4:6]) for packet in packets] == [(identification + i) % 65536 for i in range(46)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_checksum_that_computes_to_zero(name):
    shape = SHAPES[name]
    payload = bytearray(body(300))
    field = shape.start + (16 if shape.protocol == TCP else 6)
    for index in range(3):  # the last word of each segment makes up what is missing to 0xFFFF
        where = 100 * index + 98
        payload[where : where + 2] = b"\0\0"
        whole = twin.segments(shape.make(bytes(payload), flags=ACK), shape.gso_type, 100, shape.start)[index]
        payload[where : where + 2] = whole[field : field + 2]
    expected = b"\xff\xff" if shape.protocol == UDP else b"\0\0"
    for packet in compare(shape, bytes(payload), 100, flags=ACK):
        assert packet[field : field + 2] == expected


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1448, 1400, 9000, 40000])
def test_a_total_length_of_65535(name, size):
    shape = SHAPES[name]
    packets = compare(shape, body(65535 - shape.header_length), size)
    assert sum(len(packet) - shape.header_length for packet in packets) == 65535 - shape.header_length


@pytest.mark.parametrize("name", SHAPES)
def test_a_size_larger_than_the_payload_gives_the_packet_itself(name):
    shape = SHAPES[name]
    whole = shape.make(body(100), checksum="complete", flags=ACK | FIN | PSH | CWR)
    for size in (100, 101, 65535):
        assert cut(whole, shape.gso_type, size, shape.start) == [whole]


@pytest.mark.parametrize("name", ["tcp4", "udp4", "tcp6", "udp6"])
def test_the_length_fields_of_the_superpacket_are_not_believed(name):
    shape = SHAPES[name]
    superpacket = bytearray(shape.make(body(250)))
    expected = twin.segments(bytes(superpacket), shape.gso_type, 100, shape.start)
    at = 2 if shape.version == 4 else 4
    superpacket[at : at + 2] = b"\0\0"
    if shape.protocol == UDP:
        superpacket[shape.start + 4 : shape.start + 6] = b"\xff\xff"
    assert cut(bytes(superpacket), shape.gso_type, 100, shape.start) == expected


@pytest.mark.parametrize("name", ["tcp4", "udp4", "tcp6", "udp6"])
def test_every_packet_verifies(name):
    shape = SHAPES[name]
    for packet in cut(shape.make(body(1001)), shape.gso_type, 100, shape.start):
        head = twin.pseudo_header(packet, shape.protocol, len(packet) - shape.start)
        assert reference.internet_checksum(head + packet[shape.start :]) == 0
        assert shape.version == 6 or reference.internet_checksum(packet[: shape.start]) == 0


@given(
    name=st.sampled_from(sorted(SHAPES)),
    payload=st.binary(max_size=400),
    size=st.integers(1, 450),
    seq=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 255),
    identification=st.integers(0, 65535),
    tos=st.integers(0, 255),
)
def test_any_packet(name, payload, size, **fields):
    compare(SHAPES[name], payload, size, **fields)


def test_segments_are_independent_of_one_another():
    shape = SHAPES["tcp4"]
    superpacket = shape.make(body(450))
    backwards = []
    target = bytearray(200)
    for index in reversed(range(5)):
        length = segment.segment(superpacket, 0, len(superpacket), 40, 20, 100, index, target, 0)
        backwards.append(bytes(target[:length]))
    assert backwards[::-1] == twin.segments(superpacket, GSO_TCPV4, 100, 20)


@pytest.mark.parametrize("name", SHAPES)
def test_a_target_that_is_too_short(name):
    shape = SHAPES[name]
    superpacket = shape.make(body(100))
    whole = shape.header_length + 60
    for room in (0, 1, shape.header_length - 1, shape.header_length, whole - 1):
        with pytest.raises(IndexError):
            segment.segment(superpacket, 0, len(superpacket), shape.header_length, shape.start, 60, 0, bytearray(room), 0)


def test_an_index_beyond_the_last():
    superpacket = SHAPES["udp4"].make(body(100))
    with pytest.raises(IndexError):
        segment.segment(superpacket, 0, len(superpacket), 28, 20, 60, 2, bytearray(200), 0)


@given(length=st.integers(0, 65535), header_length=st.integers(28, 120), size=st.integers(1, 65535))
def test_count(length, header_length, size):
    payload = max(0, length - header_length)
    assert segment.count(header_length + payload, header_length, size) == max(1, len(range(0, payload, size)))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("hdr_len", [0, 1, 40, 65535])
def test_segments_yields_them_in_the_scratch_buffer(name, hdr_len):
    shape = SHAPES[name]
    superpacket = shape.make(body(450))
    field = 16 if shape.protocol == TCP else 6
    scratch = memoryview(bytearray([POISON] * 400))
    header = VnetHeader(1, shape.gso_type, hdr_len, 100, shape.start, field)
    found = []
    for packet in segment.segments(memoryview(superpacket), header, scratch):
        assert packet.obj is scratch.obj
        assert bytes(scratch[: len(packet)]) == bytes(packet)
        found.append(bytes(packet))
    assert found == twin.segments(superpacket, shape.gso_type, 100, shape.start)
    assert bytes(scratch[shape.header_length + 100 :]) == bytes([POISON] * (300 - shape.header_length))


@pytest.mark.parametrize(
    "header",
    [VnetHeader(1, 2, 40, 100, 20, 16), VnetHeader(1, GSO_TCPV6, 40, 100, 20, 16), VnetHeader(1, 1, 40, 0, 20, 16)],
)
def test_segments_of_what_does_not_fit(header):
    superpacket = memoryview(SHAPES["tcp4"].make(body(450)))
    with pytest.raises(ValueError, match=r"gso_type=\d.* does not fit a packet of 490 bytes"):
        next(segment.segments(superpacket, header, memoryview(bytearray(200))))


TCP4, UDP4 = SHAPES["tcp4"].make(body(100)), SHAPES["udp4"].make(body(100))
TCP6, UDP6 = SHAPES["tcp6"].make(body(100)), SHAPES["udp6"].make(body(100))
WITH_OPTIONS_TCP, WITH_OPTIONS_UDP = SHAPES["tcp4 IP options"].make(body(100)), SHAPES["udp4 IP options"].make(body(100))


def offset(superpacket: bytes, start: int, words: int) -> bytes:
    """`superpacket` with another TCP data offset."""
    return superpacket[: start + 12] + bytes([words << 4]) + superpacket[start + 13 :]


@pytest.mark.parametrize(
    ("name", "superpacket", "gso_type", "size", "start", "expected"),
    [
        ("tcp4", TCP4, GSO_TCPV4, 10, 20, 40),
        ("tcp6", TCP6, GSO_TCPV6, 10, 40, 60),
        ("udp4", UDP4, GSO_UDP_L4, 10, 20, 28),
        ("udp6", UDP6, GSO_UDP_L4, 10, 40, 48),
        ("the largest size", UDP4, GSO_UDP_L4, 65535, 20, 28),
        ("the largest data offset", offset(TCP4, 20, 15), GSO_TCPV4, 10, 20, 80),
        ("headers alone, TCP", TCP4[:40], GSO_TCPV4, 10, 20, 40),
        ("headers alone, UDP", UDP6[:48], GSO_UDP_L4, 10, 40, 48),
        ("type none", TCP4, 0, 10, 20, REFUSED),
        ("type UFO", UDP4, 3, 10, 20, REFUSED),
        ("type 2", TCP4, 2, 10, 20, REFUSED),
        ("type 6", TCP4, 6, 10, 20, REFUSED),
        ("type with ECN", TCP4, 0x81, 10, 20, REFUSED),
        ("type 255", TCP4, 255, 10, 20, REFUSED),
        ("TCPV6 with IPv4", TCP4, GSO_TCPV6, 10, 20, REFUSED),
        ("TCPV6 with IPv4, start as for IPv6", TCP4, GSO_TCPV6, 10, 40, REFUSED),
        ("TCPV4 with IPv6", TCP6, GSO_TCPV4, 10, 40, REFUSED),
        ("TCPV4 with version 5", b"\x55" + TCP4[1:], GSO_TCPV4, 10, 20, REFUSED),
        ("size 0, TCP", TCP4, GSO_TCPV4, 0, 20, REFUSED),
        ("size 0, UDP", UDP4, GSO_UDP_L4, 0, 20, REFUSED),
        ("negative size", UDP4, GSO_UDP_L4, -1, 20, REFUSED),
        ("start 0", TCP4, GSO_TCPV4, 10, 0, REFUSED),
        ("start in the IPv4 header", TCP4, GSO_TCPV4, 10, 19, REFUSED),
        ("start in the IPv4 header, UDP", UDP4, GSO_UDP_L4, 10, 12, REFUSED),
        ("start in the IPv4 options, TCP", WITH_OPTIONS_TCP, GSO_TCPV4, 10, 20, REFUSED),
        ("start in the IPv4 options, UDP", WITH_OPTIONS_UDP, GSO_UDP_L4, 10, 20, REFUSED),
        ("start in the last IPv4 option", WITH_OPTIONS_UDP, GSO_UDP_L4, 10, 23, REFUSED),
        ("start in the IPv6 header", TCP6, GSO_TCPV6, 10, 39, REFUSED),
        ("start in the IPv6 header, UDP", UDP6, GSO_UDP_L4, 10, 20, REFUSED),
        ("start at the end", TCP4, GSO_TCPV4, 10, 140, REFUSED),
        ("start at the end, UDP", UDP4, GSO_UDP_L4, 10, 128, REFUSED),
        ("start a byte too late for UDP", UDP4, GSO_UDP_L4, 10, 121, REFUSED),
        ("start a byte too late for TCP", TCP4, GSO_TCPV4, 10, 121, REFUSED),
        ("start beyond the end", TCP4, GSO_TCPV4, 10, 65535, REFUSED),
        ("start beyond the end, UDP", UDP6, GSO_UDP_L4, 10, 65535, REFUSED),
        ("data offset 0", offset(TCP4, 20, 0), GSO_TCPV4, 10, 20, REFUSED),
        ("data offset 4", offset(TCP4, 20, 4), GSO_TCPV4, 10, 20, REFUSED),
        ("data offset 4, IPv6", offset(TCP6, 40, 4), GSO_TCPV6, 10, 40, REFUSED),
        ("data offset beyond the end", offset(TCP4[:76], 20, 15), GSO_TCPV4, 10, 20, REFUSED),
        ("data offset beyond the end, IPv6", offset(TCP6[:99], 40, 15), GSO_TCPV6, 10, 40, REFUSED),
        ("cut in the TCP header", TCP4[:39], GSO_TCPV4, 10, 20, REFUSED),
        ("cut in the UDP header", UDP4[:27], GSO_UDP_L4, 10, 20, REFUSED),
        ("one byte", TCP4[:1], GSO_TCPV4, 10, 20, REFUSED),
    ],
)  # fmt: skip
def test_check(name, superpacket, gso_type, size, start, expected):
    assert segment.check(superpacket, 0, len(superpacket), gso_type, size, start) == expected
    amid = poisoned(superpacket)
    assert segment.check(amid, 9, len(superpacket), gso_type, size, start) == expected
    assert amid == poisoned(superpacket)


@given(
    first=st.sampled_from([0x45, 0x46, 0x4F, 0x40, 0x44, 0x60, 0x6F, 0x00, 0x55, 0xFF]),
    rest=st.binary(max_size=150),
    gso_type=st.one_of(st.sampled_from([GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4]), st.integers(0, 255)),
    size=st.one_of(st.integers(0, 60), st.integers(0, 65535)),
    start=st.one_of(st.sampled_from([20, 24, 40, 48, 60]), st.integers(0, 160), st.integers(0, 65535)),
    offset_byte=st.integers(0, 255),
)
@example(first=0x45, rest=bytes(19), gso_type=GSO_UDP_L4, size=1, start=12, offset_byte=0)
@example(first=0x4F, rest=bytes(40), gso_type=GSO_UDP_L4, size=1, start=20, offset_byte=0)
@example(first=0x4F, rest=bytes(60), gso_type=GSO_TCPV4, size=1, start=20, offset_byte=0x50)
def test_hostile_values_are_refused_or_give_packets(first, rest, gso_type, size, start, offset_byte):
    superpacket = bytearray([first]) + rest
    if start + 12 < len(superpacket):
        superpacket[start + 12] = offset_byte
    result = segment.check(bytes(poisoned(superpacket)), 9, len(superpacket), gso_type, size, start)
    if result < 0:
        assert result == REFUSED
        return
    assert start < result <= len(superpacket)
    pieces = cut(bytes(superpacket), gso_type, size, start, indices=(0, 1, 2, -1))
    assert all(piece[0] == first and len(piece) <= result + size for piece in pieces)
