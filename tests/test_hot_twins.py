"""The inline C of encap/fields.pxd does what encap/fields.py does: through the compiled modules, and in two processes.

The inline functions cannot be called from Python; each test names the compiled function that passes through to one.
"""

import os
import subprocess
import sys
from ipaddress import IPv6Address
from pathlib import Path

import pytest
import reference_offload as twin
from hypothesis import example, given
from hypothesis import strategies as st
from packets import table_of
from reference_encap import POISON, poisoned
from reference_offload import TCP, UDP, body, packet

import encap
from dataplane.inbound import admit
from dataplane.outbound import judge
from dataplane.verdict import Verdict
from encap import checksum, fields, ip, segment, vxlan
from encap.coalesce import Coalescer, Outcome
from encap.pure import is_compiled

ROOT = Path(encap.__file__).resolve().parent.parent


def outcome(function, *arguments) -> object:
    """What `function` returns, or that it raised IndexError."""
    try:
        return function(*arguments)
    except IndexError:
        return IndexError


# sum_words, through checksum.add


@pytest.mark.parametrize("fill", [0x00, 0x01, 0x80, 0xFF, None])
def test_sums_of_every_length_and_alignment(fill):
    octets = body(300) if fill is None else bytes([fill]) * 300
    for length in range(200):
        for at in (0, 1, 2, 3, 7, 8, 31, 33):
            assert checksum.add(octets, at, length) == fields.sum_words(octets, at, length)


@pytest.mark.parametrize("length", [65534, 65535, 65536, 131072, 1 << 20])
@pytest.mark.parametrize("pattern", [b"\xff", b"\xff\xfe", b"\x00\x00\x00\x01", b"\x80\x00"])
def test_long_sums(length, pattern):
    octets = (pattern * length)[:length]
    assert checksum.add(octets, 0, length) == fields.sum_words(octets, 0, length)


@given(st.binary(max_size=600), st.integers(0, 40), st.integers(0, 1 << 40))
@example(b"\xff\xff", 0, 0)
@example(b"\x00\x00", 0, 0)
@example(b"\x7f\xff\x80\x00", 0, 0)  # adds up to 65 535 exactly
def test_any_sum(octets, at, total):
    length = max(0, len(octets) - at)
    at = min(at, len(octets))
    assert checksum.add(octets, at, length, total) == total + fields.sum_words(octets, at, length)


EXTREMES = [-(2**63), -(2**31), -100, -1, 0, 1, 15, 16, 17, 100, 2**31, 2**62, 2**63 - 1]


@pytest.mark.parametrize("at", EXTREMES)
@pytest.mark.parametrize("length", EXTREMES)
def test_sums_beyond_the_buffer_raise(at, length):
    octets = body(16)
    found = outcome(checksum.add, octets, at, length)
    assert found == outcome(fields.sum_words, octets, at, length)
    assert (found is IndexError) is not (0 <= at <= 16 and 0 <= length <= 16 - at)


# load16, through ip.stated_length; load32, through vxlan.check; load64, through outbound.judge and inbound.admit


@given(st.integers(0, 65535), st.integers(0, 9))
def test_load16(value, at):
    packet4 = bytearray(poisoned(bytes([0x45, 0]) + twin.word(value) + bytes(16), before=at))
    assert ip.stated_length(packet4, at, 20) == fields.load16(packet4, at + 2) == value


def test_load16_beyond_the_buffer():
    for there in range(1, 6):
        octets = bytes([0x45] * there)
        expected = fields.load16(octets, 2) if there >= 4 else IndexError
        assert outcome(ip.stated_length, octets, 0, 20) == expected
        assert outcome(fields.load16, octets, 2) == expected


@given(st.integers(0, 2**24 - 1), st.integers(0, 255), st.integers(0, 9))
@example(2**24 - 1, 255, 0)
@example(2**23, 0, 3)
def test_load32(vni, reserved, at):
    header = vxlan.header(vni, bytes(6), bytes(6), 0x0800)[:7] + bytes([reserved]) + bytes(12) + b"\x08\0\x45"
    buf = poisoned(header, before=at)
    assert fields.load32(buf, at + 4) == vni << 8 | reserved
    assert vxlan.check(buf, at, len(header), vni, 0, 0) == 0
    assert vxlan.check(buf, at, len(header), vni ^ 1, 0, 0) != 0
    assert vxlan.check(buf, at, len(header), vni ^ 0x800000, 0, 0) != 0


def test_load32_beyond_the_buffer():
    for there in range(4, 8):
        octets = b"\x08" * there
        assert outcome(vxlan.check, octets, 0, 23, 0x080808, 0, 0) is IndexError
        assert outcome(fields.load32, octets, 4) is IndexError


HALVES = [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
"""The last is the number that tells of an exception in C."""


def to_and_from(source: int, destination: int) -> bytes:
    return packet(6, UDP, b"abc", source=str(IPv6Address(source)), destination=str(IPv6Address(destination)))


@pytest.mark.parametrize("low", HALVES)
def test_load64_of_the_halves_of_a_destination(low):
    table = table_of(1, [2])
    routed = to_and_from(1, int(IPv6Address("fd00:0:0:2::")) + low)
    assert judge(routed, 0, len(routed), table) == table.find6(fields.load64(routed, 24), fields.load64(routed, 32)) == 1
    assert fields.load64(routed, 32) == low
    for high in HALVES[:4]:
        elsewhere = to_and_from(1, high << 64 | low)
        assert fields.load64(elsewhere, 24) == high
        assert judge(elsewhere, 0, len(elsewhere), table) == -Verdict.NO_ROUTE
    for high in HALVES[4:]:
        multicast = to_and_from(1, high << 64 | low)
        assert judge(multicast, 0, len(multicast), table) == -Verdict.MULTICAST


@pytest.mark.parametrize("low", HALVES)
@pytest.mark.parametrize("high", HALVES)
def test_load64_of_the_halves_of_a_source(high, low):
    table = table_of(2, [1])
    ours = int(IPv6Address("fd00:0:0:2::5"))
    foreign = to_and_from(high << 64 | low, ours)
    assert fields.load64(foreign, 8) == high
    assert fields.load64(foreign, 16) == low
    assert admit(foreign, 0, 0, table) == -Verdict.SPOOFED_SOURCE
    assert admit(to_and_from(int(IPv6Address("fd00:0:0:1::")) + low, ours), 0, 0, table) == 1  # row 0 is its IPv4 subnet


@pytest.mark.parametrize("there", [24, 31, 32, 39])
def test_load64_beyond_the_buffer(there):
    octets = to_and_from(1, int(IPv6Address("fd00:0:0:2::")))[:there]
    at = 24 if there < 32 else 32
    assert outcome(fields.load64, octets, at) is IndexError
    assert outcome(admit, octets, 0, 0, table_of(2, [1])) is IndexError


# store16, through checksum.write_ipv4_header_checksum; store32, through segment


@given(st.binary(min_size=20, max_size=20), st.integers(0, 9))
def test_store16(header, at):
    buf = poisoned(header, before=at)
    checksum.write_ipv4_header_checksum(buf, at, 20)
    expected = poisoned(header, before=at)
    fields.store16(expected, at + 10, 0)
    fields.store16(expected, at + 10, fields.sum_words(expected, at, 20) ^ 0xFFFF)
    assert buf == expected


def test_store16_beyond_the_buffer_writes_nothing():
    for there in range(12):
        buf = bytearray([POISON] * there)
        assert outcome(checksum.write_ipv4_header_checksum, buf, 0, 0) is IndexError
        assert buf[:10] == bytes([POISON] * min(there, 10))


@given(st.integers(0, 2**32 - 1), st.integers(1, 1000), st.integers(0, 3))
@example(2**32 - 1, 1, 1)
@example(2**31 - 1, 1, 1)
@example(2**32 - 1000, 1000, 3)
def test_store32_keeps_the_low_32_bits(seq, size, index):
    superpacket = packet(4, TCP, body(4 * size), seq=seq)
    target = bytearray(40 + size)
    segment.segment(superpacket, 0, len(superpacket), 40, 20, size, index, target, 0)
    expected = bytearray(4)
    fields.store32(expected, 0, seq + index * size)
    assert target[24:28] == expected


# move, through segment and the coalescer


def merge(first: bytes, second: bytes) -> int:
    buf = bytearray(first + bytes(len(second)) + second)
    coalescer = Coalescer()
    assert coalescer.begin(0, buf, 0, len(first), len(buf))
    return coalescer.append(buf, len(first) + len(second), len(second))


def test_move_beyond_either_buffer_copies_nothing():
    superpacket = packet(4, UDP, body(100))
    for room in range(28):
        target = bytearray([POISON] * room)
        assert outcome(segment.segment, superpacket, 0, 128, 28, 20, 50, 0, target, 0) is IndexError
        assert outcome(fields.move, target, 0, superpacket, 0, 28) is IndexError
        assert target == bytes([POISON] * room)
    target = bytearray([POISON] * 200)
    assert outcome(segment.segment, superpacket[:20], 0, 128, 28, 20, 50, 0, target, 0) is IndexError
    assert outcome(segment.segment, superpacket, 0, 128, 28, 20, 50, 0, target, -1) is IndexError
    assert outcome(segment.segment, superpacket, -1, 128, 28, 20, 50, 0, target, 0) is IndexError
    assert target == bytes([POISON] * 200)


@pytest.mark.parametrize("gap", [0, 1, 2, 7, 8, 22, 60])
def test_move_of_places_that_overlap(gap):
    """Headers are shorter than payloads, so each payload moves over itself."""
    packets = [packet(4, UDP, body(500)[i:][:400], identification=i) for i in range(5)]
    buf, places = bytearray(), []
    for one in packets:
        places.append(len(buf))
        buf += one + bytes([POISON] * gap)
    plain = bytearray(buf)
    coalescer = Coalescer()
    coalescer.begin(0, buf, 0, 428, len(buf))
    for number, at in enumerate(places[1:], 1):
        assert coalescer.append(buf, at, 428) == Outcome.MERGED
        fields.move(plain, 28 + 400 * number, plain, at + 28, 400)
    assert buf == plain
    assert buf[28 : 28 + 2000] == b"".join(one[28:] for one in packets)


# equal, through the coalescer's comparison of TCP options and addresses


@pytest.mark.parametrize("words", [1, 2, 3, 10])
def test_equal_sees_every_byte(words):
    options = bytes([1] * (4 * words))
    first = packet(4, TCP, b"abc", options=options)
    following = {"seq": 1003, "identification": 0x1235}
    assert merge(first, packet(4, TCP, b"abc", options=options, **following)) == Outcome.MERGED
    for at in range(len(options)):
        other = bytearray(options)
        other[at] ^= 0x80
        assert not fields.equal(options, 0, other, 0, len(options))
        assert merge(first, packet(4, TCP, b"abc", options=bytes(other), **following)) == Outcome.OTHER_HEADERS


@pytest.mark.parametrize("address", ["0.0.0.0", "255.255.255.255", "128.0.0.0", "0.0.0.1"])
def test_equal_sees_every_bit_of_the_addresses(address):
    first = packet(4, UDP, b"abc", source=address, destination=address)
    same = packet(4, UDP, b"abc", source=address, destination=address, identification=0x1235)
    assert merge(first, same) == Outcome.MERGED
    for bit in range(64):
        other = bytearray(same)
        other[12 + bit // 8] ^= 1 << bit % 8
        assert not fields.equal(first, 12, other, 12, 8)
        assert merge(first, bytes(other)) == Outcome.OTHER_FLOW


def test_equal_of_nothing():
    assert fields.equal(b"", 0, b"a", 1, 0)
    first = packet(4, TCP, b"abc")
    assert merge(first, packet(4, TCP, b"abc", seq=1003, identification=0x1235)) == Outcome.MERGED  # no options


# Whole modules in two processes: the same questions, the same answers

PROGRAM = """
import random, sys
sys.path.insert(0, "tests")
from array import array
import reference_offload as twin
from packets import mac, table_of
from dataplane.batch import PEER_NUMBERS, Batch
from dataplane.inbound import coalesce, decapsulate, unpack, write_vnet_headers
from dataplane.outbound import Outbound, judge_batch, judge_offload
from dataplane.verdict import new_counts
from encap import segment, vnet
from encap.coalesce import Coalescer

draw = random.Random(768)
names = sorted(twin.SHAPES)

def show(*values):
    print(*[bytes(value).hex() if isinstance(value, (bytes, bytearray, memoryview)) else int(value) for value in values])

def some_packet():
    shape = twin.SHAPES[draw.choice(names)]
    there = draw.choice([2, 2, 2, 3, 9])
    far = f"10.1.{there}.5" if shape.version == 4 else f"fd00:0:0:{there}::5"
    octets = bytearray(shape.make(draw.randbytes(draw.randrange(400)), destination=far, ttl=draw.choice([1, 64]),
                                  checksum=draw.choice(["partial", "complete"]), flags=draw.randrange(256)))
    offset = 16 if shape.protocol == 6 else 6
    size = draw.choice([0, 1, 7, 100, 100, 100, 65535])
    head = [draw.randrange(3), draw.choice([0, 0, shape.gso_type, shape.gso_type, 4, 255]), 0, size, shape.start, offset]
    if draw.random() < 0.2:
        head[draw.randrange(6)] = draw.randrange(256)
    if draw.random() < 0.2:
        octets[draw.randrange(len(octets))] = draw.randrange(256)
    return bytes(octets), head

for number in range(300):
    octets, head = some_packet()
    header_length = segment.check(octets, 0, len(octets), head[1], head[3], head[4])
    show(number, header_length)
    if header_length > 0:
        count = segment.count(len(octets), header_length, head[3])
        for index in sorted({0, 1 % count, count - 1}):
            target = bytearray(b"\\xa5" * 600)
            length = segment.segment(octets, 0, len(octets), header_length, head[4], head[3], index, target, 5)
            show(count, index, length, target)

batch, table_v, table_i = Batch(8), table_of(1, [2, 3]), table_of(1, [2, 3], "ip")
outbound = Outbound(arena_bytes=1500, trains=4)
for number in range(120):
    table = draw.choice([table_v, table_i])
    batch.clear()
    for _ in range(8):
        octets, head = some_packet()
        if head[3] == 65535:
            head[3] = 300
        buf = bytearray(10)
        vnet.store(buf, 0, *head)
        batch.put(octets, vnet=bytes(buf))
    show(number, judge_batch(batch, table), *batch.verdict, *batch.peer, *batch.flow)
    outbound.start(draw.choice([1, 3]), draw.choice([1, 5, 64]))
    more = True
    while more:
        more = outbound.lay_out(batch, table)
        trains = outbound.trains
        for i in range(trains.count):
            columns = (trains.offset, trains.stride, trains.peer, trains.flow, trains.head, trains.last)
            show(*[column[i] for column in columns], trains.packet(i))
        if more and not trains.count:
            print("too large for the arena")
            break

pieces, coalescer = Batch(40, batch.data), Coalescer()
for number in range(200):
    table = table_of(2, [1], draw.choice(["vxlan", "ip"]))
    front = b"" if not table.is_vxlan else twin.vxlan_header(1, mac(2), mac(1), 4)
    batch.clear()
    step = 0
    for _ in range(draw.randrange(1, 9)):
        group, protocol = [], draw.choice([6, 17])
        for _ in range(draw.randrange(1, 7)):
            fields = {"seq": 1000 + 50 * step, "identification": step, "tos": draw.random() < 0.1}
            one = bytearray(twin.packet(4, protocol, draw.randbytes(50), **fields))
            if draw.random() < 0.1:
                one[draw.randrange(len(one))] ^= 1
            group.append(front + one)
            step += 1
        stride = draw.choice([len(group[0]), len(group[0]), 0, 31])
        batch.put(b"".join(group), peer=draw.choice([0, 0, 0, -1]), stride=stride)
    first = 0
    while first < batch.count:
        first = unpack(batch, pieces, table, first)
        forwarded = decapsulate(pieces, table)
        merged = coalesce(pieces, coalescer, 1450)
        write_vnet_headers(pieces, 1450)
        show(number, first, pieces.count, forwarded, merged)
        for i in range(pieces.count):
            show(pieces.verdict[i], pieces.peer[i], pieces.head[i], pieces.offset[i], pieces.packet(i))
            if pieces.verdict[i] == 1 and pieces.head[i] == i:
                show(pieces.vnet_header(i))
        counts = new_counts()
        peers = array("q", bytes(8 * PEER_NUMBERS * (table.count + 1)))
        show(pieces.tally(counts, peers, number), *counts, *peers)
"""


def answers(pure: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYFLANNEL_DP_PURE"}
    if pure is not None:
        environment["PYFLANNEL_DP_PURE"] = pure
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.skipif(not is_compiled(segment) and not os.environ.get("PYFLANNEL_DP_PURE"), reason="nothing is compiled")
def test_both_give_the_same_answers():
    compiled, source = answers(None), answers("1")
    assert len(compiled) > 2000
    assert compiled == source
