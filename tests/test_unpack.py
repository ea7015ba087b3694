"""dataplane/inbound.py: buffers become pieces (unpack), and runs of packets of one flow become superpackets (coalesce)."""

import pytest
import reference_offload as twin
from hypothesis import given
from hypothesis import strategies as st
from packets import mac, table_of
from reference_encap import POISON
from reference_offload import ACK, FIN, PSH, TCP, UDP, body, packet

from dataplane.batch import HEADROOM, MAX_PACKET_LENGTH, Batch
from dataplane.inbound import coalesce, decapsulate, unpack, write_vnet_headers
from dataplane.verdict import Verdict
from encap import vnet
from encap.coalesce import Coalescer
from routing.table import Table

MTU = 1450
TABLES = {framing: table_of(2, [1], framing) for framing in ("vxlan", "ip")}
BATCH = Batch(8)
COALESCER = Coalescer()


def framed(inner: bytes, table: Table) -> bytes:
    return (twin.vxlan_header(1, mac(2), mac(1), inner[0] >> 4) if table.is_vxlan else b"") + inner


def received(buffers: list[tuple[bytes, int]], capacity: int = 600) -> tuple[Batch, Batch]:
    """A batch with each buffer and its stride, numbered by peer, and empty pieces on it."""
    BATCH.clear()
    BATCH.data[:] = bytes([POISON]) * len(BATCH.data)
    for number, (octets, stride) in enumerate(buffers):
        BATCH.put(octets, peer=number, stride=stride)
    pieces = Batch(capacity, BATCH.data)
    for column in (pieces.offset, pieces.length, pieces.peer, pieces.stride, pieces.last):
        for i in range(capacity):
            column[i] = -77  # whatever a batch before has left
    pieces.vnet[:] = bytes([POISON]) * len(pieces.vnet)
    return BATCH, pieces


def read(batch: Batch, pieces: Batch) -> list[tuple[int, bytes, int]]:
    """Of each piece the buffer that it came from, its bytes, and its segment size."""
    out = []
    for i in range(pieces.count):
        number = pieces.peer[i]
        start = batch.offset[number]
        assert start <= pieces.offset[i] <= pieces.offset[i] + pieces.length[i] <= start + batch.length[number]
        assert pieces.last[i] == start + MAX_PACKET_LENGTH
        out.append((number, bytes(pieces.packet(i)), pieces.stride[i]))
    return out


def rounds(buffers: list[tuple[bytes, int]], table: Table, capacity: int = 600) -> list[list[tuple[int, bytes, int]]]:
    """Unpack until nothing is left: the pieces of each call."""
    batch, pieces = received(buffers, capacity)
    before = bytes(batch.data)
    out, first = [], 0
    while first < batch.count:
        following = unpack(batch, pieces, table, first)
        assert first < following <= batch.count
        out.append(read(batch, pieces))
        assert {number for number, _, _ in out[-1]} <= set(range(first, following))
        first = following
    assert bytes(batch.data) == before
    return out


def expected(buffers: list[tuple[bytes, int]], table: Table) -> list[tuple[int, bytes, int]]:
    return [
        (number, octets, size)
        for number, (buffer, stride) in enumerate(buffers)
        for octets, size in twin.datagrams(buffer, stride, table.header_length)
    ]


def run_of(table: Table, count: int, length: int = 100, tail: int | None = None, version: int = 4) -> tuple[bytes, int]:
    """A buffer as UDP_GRO fills it, and its stride."""
    inner = [packet(version, UDP, body(length), identification=i) for i in range(count)]
    if tail is not None:
        inner[-1] = packet(version, UDP, body(tail), identification=count - 1)
    whole = [framed(one, table) for one in inner]
    return b"".join(whole), len(whole[0])


@pytest.fixture(params=TABLES)
def table(request) -> Table:
    return TABLES[request.param]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("count", [2, 3, 64, 500])
@pytest.mark.parametrize("tail", [None, 0, 1, 99])
def test_a_buffer_with_a_true_stride(table, version, count, tail):
    octets, stride = run_of(table, count, 50 if count == 500 else 100, tail if count < 500 or tail != 99 else 49, version)
    (pieces,) = rounds([(octets, stride)], table)
    assert len(pieces) == count
    assert pieces == expected([(octets, stride)], table)
    assert all(size == 0 for _, _, size in pieces)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("stride", [0, -1, -(2**31)])
def test_without_a_stride_a_buffer_is_one_datagram(table, version, stride):
    octets, _ = run_of(table, 3, version=version)
    assert rounds([(octets, stride)], table) == [[(0, octets, 0)]]


@pytest.mark.parametrize("more", [0, 1, 1000, 2**31 - 1 - 500])
def test_a_stride_of_the_buffer_or_more_means_one_datagram(table, more):
    octets, _ = run_of(table, 1)
    assert rounds([(octets, len(octets) + more)], table) == [[(0, octets, 0)]]


@pytest.mark.parametrize("cut", [1, 50])
def test_a_stride_of_the_buffer_says_nothing_of_what_is_inside(table, cut):
    octets = run_of(table, 1)[0][:-cut]
    assert rounds([(octets, len(octets))], table) == [[(0, octets, 0)]]


def test_a_stride_that_lies_leaves_one_piece_that_is_refused(table):
    octets, stride = run_of(table, 3)
    for lie in (1, 2, 22, stride - 1, stride + 1, 2 * stride, len(octets) - 1):
        batch, pieces = received([(octets, lie)])
        assert unpack(batch, pieces, table, 0) == 1
        assert read(batch, pieces) == [(0, octets, lie)]
        decapsulate(pieces, table)
        # behind a VXLAN header the rest looks like Ethernet padding, and the first datagram is a good one
        assert pieces.verdict[0] == (Verdict.FORWARDED if table.is_vxlan else Verdict.BAD_LENGTH)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("payload", [2401, 12000, 60000])
def test_an_inner_udp_superpacket_is_one_piece_with_its_segment_size(table, version, payload):
    octets = framed(packet(version, UDP, body(payload), checksum="partial"), table)
    assert rounds([(octets, 1200)], table) == [[(0, octets, 1200)]]
    batch, pieces = received([(octets, 1200)])
    unpack(batch, pieces, table, 0)
    pieces.peer[0] = table.origins["192.0.2.1"]
    assert decapsulate(pieces, table) == 1
    write_vnet_headers(pieces, MTU)
    start = 20 if version == 4 else 40
    assert vnet.parse(pieces.vnet_header(0), 0) == (1, vnet.GSO_UDP_L4, start + 8, 1200, start, 6)


def test_a_buffer_too_short_for_a_tunnel_header_is_one_piece():
    for length in range(2, 43):
        octets = framed(packet(4, UDP, body(100)), TABLES["vxlan"])[:length]
        for stride in (1, length - 1):
            assert rounds([(octets, stride)], TABLES["vxlan"]) == [[(0, octets, stride)]]


def test_zero_length_buffers_are_pieces_of_no_length(table):
    one, stride = run_of(table, 2)
    buffers = [(b"", 0), (b"", 100), (one, stride), (b"", 0)]
    assert rounds(buffers, table) == [
        [(0, b"", 0), (1, b"", 0), (2, one[:stride], 0), (2, one[stride:], 0), (3, b"", 0)],
    ]
    batch, pieces = received([(b"", 0)])
    unpack(batch, pieces, table, 0)
    pieces.peer[0] = 0
    assert decapsulate(pieces, table) == 0
    assert pieces.verdict[0] == Verdict.TRUNCATED


def test_a_zero_length_buffer_behind_full_pieces_comes_next(table):
    one, stride = run_of(table, 3)
    buffers = [(one, stride), (b"", 0), (b"", 0), (one[:stride], 0)]
    first, second = rounds(buffers, table, capacity=3)
    assert [number for number, _, _ in first] == [0, 0, 0]
    assert second == [(1, b"", 0), (2, b"", 0), (3, one[:stride], 0)]


@pytest.mark.parametrize(
    ("capacity", "calls"),
    [
        (5, [[0] * 3 + [1] * 2, [2] * 5, [3]]),
        (6, [[0] * 3 + [1] * 2, [2] * 5 + [3]]),
        (10, [[0] * 3 + [1] * 2 + [2] * 5, [3]]),
        (11, [[0] * 3 + [1] * 2 + [2] * 5 + [3]]),
    ],
)
def test_what_does_not_fit_the_pieces_comes_with_the_next_call(table, capacity, calls):
    buffers = [run_of(table, count) for count in (3, 2, 5, 1)]
    found = rounds(buffers, table, capacity)
    assert [[number for number, _, _ in pieces] for pieces in found] == calls
    assert [piece for pieces in found for piece in pieces] == expected(buffers, table)


def test_a_shorter_last_one_counts_for_the_capacity(table):
    buffers = [run_of(table, 3, tail=1), run_of(table, 3, tail=1)]
    assert [len(pieces) for pieces in rounds(buffers, table, 5)] == [3, 3]
    assert [len(pieces) for pieces in rounds(buffers, table, 6)] == [6]


def test_a_buffer_with_more_datagrams_than_there_are_pieces_does_not_stop_the_rest(table):
    many, few = run_of(table, 7), run_of(table, 1)
    found = rounds([many, few], table, capacity=4)
    assert found == [expected([many], table)[:4], [(1, few[0], 0)]]


def test_unpack_from_a_later_buffer(table):
    batch, pieces = received([run_of(table, 2), run_of(table, 3), run_of(table, 1)])
    assert unpack(batch, pieces, table, 1) == 3
    assert [number for number, _, _ in read(batch, pieces)] == [1, 1, 1, 2]
    assert unpack(batch, pieces, table, 3) == 3
    assert pieces.count == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.binary(max_size=90), st.integers(-1, 100)),
            st.tuples(st.integers(1, 9), st.integers(0, 80), st.sampled_from([4, 6])),
        ),
        max_size=6,
    ),
    st.sampled_from(sorted(TABLES)),
    st.integers(-2, 2),
)
def test_any_buffers(drawn, framing, lie):
    table, buffers = TABLES[framing], []
    for one in drawn:
        if isinstance(one[0], bytes):
            buffers.append(one)
        else:
            octets, stride = run_of(table, one[0], one[1], version=one[2])
            buffers.append((octets, stride + lie))
    found = rounds(buffers, table)
    assert [piece for pieces in found for piece in pieces] == expected(buffers, table)


# coalesce


def bring(groups: list[list[bytes]], table: Table) -> Batch:
    """The pieces of `groups` of inner packets, one received buffer each, unpacked and judged."""
    buffers = []
    for group in groups:
        whole = [framed(one, table) for one in group]
        buffers.append((b"".join(whole), len(whole[0]) if len(whole) > 1 else 0))
    batch, pieces = received(buffers)
    assert unpack(batch, pieces, table, 0) == batch.count
    for i in range(pieces.count):
        pieces.peer[i] = table.origins["192.0.2.1"]
    decapsulate(pieces, table)
    return pieces


def handed_on(pieces: Batch) -> list[tuple[bytes, vnet.VnetHeader]]:
    """What a device would write, in order."""
    write_vnet_headers(pieces, MTU)
    return [
        (bytes(pieces.packet(i)), vnet.parse(pieces.vnet_header(i), 0))
        for i in range(pieces.count)
        if pieces.verdict[i] == Verdict.FORWARDED and pieces.head[i] == i
    ]


def on_the_wire(out: list[tuple[bytes, vnet.VnetHeader]]) -> list[bytes]:
    packets = []
    for octets, head in out:
        packets += twin.segments(octets, head.gso_type, head.gso_size, head.csum_start) if head.gso_type else [octets]
    return packets


def judged(packets: list[bytes], table: Table) -> list[bytes]:
    return packets if table.is_vxlan else [twin.one_hop_less(one) for one in packets]


def tcp(step: int, length: int = 100, version: int = 4, **fields) -> bytes:
    return packet(version, TCP, body(length + step)[step:], **({"seq": 100 * step, "identification": step} | fields))


def udp(step: int, length: int = 100, version: int = 4, **fields) -> bytes:
    return packet(version, UDP, body(length + step)[step:], **({"identification": step} | fields))


@pytest.mark.parametrize("make", [tcp, udp])
@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("split", [[6], [1] * 6, [2, 3, 1], [5, 1]])
def test_one_flow_becomes_one_superpacket(table, make, version, split):
    packets = [make(i, version=version) for i in range(5)] + [make(5, 30, version)]
    numbers = iter(packets)
    pieces = bring([[next(numbers) for _ in range(count)] for count in split], table)
    wanted = judged(packets, table)
    assert coalesce(pieces, COALESCER, MTU) == 5
    superpacket, head = twin.join(wanted)
    assert handed_on(pieces) == [(superpacket, vnet.VnetHeader(*head))]
    assert list(pieces.head[:6]) == [0] * 6
    assert list(pieces.length[:6]) == [len(superpacket), 0, 0, 0, 0, 0]
    assert COALESCER.item == -1


def test_a_single_packet_stays_with_the_header_that_it_has(table):
    partial = tcp(0, checksum="partial")
    pieces = bring([[partial], [udp(1)]], table)
    before = handed_on(pieces)
    assert before[0][1] == (1, 0, 0, 0, 20, 16)
    assert coalesce(pieces, COALESCER, MTU) == 0
    pieces.vnet[:] = bytes([POISON]) * len(pieces.vnet)
    assert handed_on(pieces) == before


def test_flows_that_take_turns_stay_in_order(table):
    packets = [
        tcp(0),
        tcp(1),
        udp(0),
        udp(1),
        tcp(2),
        tcp(3, flags=ACK | PSH),
        tcp(4),
        udp(2),
        tcp(5),
        tcp(6, flags=ACK | FIN),
    ]
    pieces = bring([packets[:2], packets[2:4], packets[4:7], packets[7:8], packets[8:]], table)
    assert pieces.count == 10
    assert coalesce(pieces, COALESCER, MTU) == 3
    assert list(pieces.head[:10]) == [0, 0, 2, 2, 4, 4, 6, 7, 8, 9]
    assert on_the_wire(handed_on(pieces)) == judged(packets, table)


def test_refused_packets_are_stepped_over_and_left_alone(table):
    foreign = udp(9, source="10.1.9.9")
    packets = [udp(0), foreign, udp(1), foreign, udp(2)]
    pieces = bring([[one] for one in packets], table)
    assert list(pieces.verdict[:5]) == [1, Verdict.SPOOFED_SOURCE, 1, Verdict.SPOOFED_SOURCE, 1]
    assert coalesce(pieces, COALESCER, MTU) == 2
    assert list(pieces.head[:5]) == [0, 1, 0, 3, 0]
    assert pieces.length[1] == pieces.length[3] == len(foreign)
    assert bytes(pieces.packet(1)) == bytes(pieces.packet(3)) == foreign
    assert on_the_wire(handed_on(pieces)) == judged([udp(0), udp(1), udp(2)], table)


@pytest.mark.parametrize("version", [4, 6])
def test_packets_that_are_to_be_segmented_already_stay_as_they_are(table, version):
    superpacket = packet(version, TCP, body(20000), seq=100, identification=1, checksum="partial")
    packets = [[tcp(0, version=version)], [superpacket], [packet(version, TCP, body(100), seq=20100, identification=2)]]
    packets.append([packet(version, TCP, body(100), seq=20200, identification=3)])
    pieces = bring(packets, table)
    before = handed_on(pieces)
    assert before[1][1].gso_type != 0
    assert coalesce(pieces, COALESCER, MTU) == 1
    after = handed_on(pieces)
    assert after[:2] == before[:2]
    joined, head = twin.join([octets for octets, _ in before[2:]])
    assert after[2:] == [(joined, vnet.VnetHeader(*head))]


@pytest.mark.parametrize("merged_before", [False, True])
def test_nothing_overtakes_a_packet_that_is_to_be_segmented(table, merged_before):
    foreign = packet(4, TCP, body(20000), sport=9, checksum="partial")
    packets = [[udp(0)], [udp(1)]] if merged_before else [[udp(1)]]
    packets += [[foreign], [udp(2)]]
    pieces = bring(packets, table)
    assert coalesce(pieces, COALESCER, MTU) == merged_before
    assert list(pieces.head[: pieces.count]) == ([0, 0, 2, 3] if merged_before else [0, 1, 2])


def test_a_superpacket_grows_to_the_end_of_its_slot_and_no_further(table):
    """The first packet lies at the end of a full buffer, so that little room is behind it."""
    size = 1300
    count = MAX_PACKET_LENGTH // (table.header_length + 28 + size)
    packets = [udp(i, size, sport=7000 + (i < count - 1)) for i in range(count)]
    more = [udp(count + i, size, sport=7000) for i in range(4)]
    pieces = bring([packets, more], table)
    ends = [pieces.last[i] for i in range(pieces.count)]
    beyond = bytes(BATCH.data[HEADROOM + MAX_PACKET_LENGTH : BATCH.offset[1]])
    coalesce(pieces, COALESCER, MTU)
    assert bytes(BATCH.data[HEADROOM + MAX_PACKET_LENGTH : BATCH.offset[1]]) == beyond
    assert all(pieces.offset[i] + pieces.length[i] <= end for i, end in enumerate(ends))
    assert on_the_wire(handed_on(pieces)) == judged(packets + more, table)
    assert pieces.head[count] == count  # no room left for it behind the packet before
    assert pieces.head[count + 1] == count


def test_damage_is_not_hidden(table):
    packets = [tcp(i) for i in range(4)]
    bad = bytearray(packets[2])
    bad[-1] ^= 1
    packets[2] = bytes(bad)
    pieces = bring([packets], table)
    assert coalesce(pieces, COALESCER, MTU) == 1
    assert on_the_wire(handed_on(pieces)) == judged(packets, table)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_damage_to_an_ipv4_header_is_not_hidden(table, which):
    packets = [tcp(i) for i in range(3)]
    bad = bytearray(packets[which])
    bad[10] ^= 1  # its checksum
    packets[which] = bytes(bad)
    pieces = bring([packets], table)
    wanted = [bytes(pieces.packet(i)) for i in range(3)]
    coalesce(pieces, COALESCER, MTU)
    assert on_the_wire(handed_on(pieces)) == wanted


def test_nothing_at_all(table):
    pieces = Batch(4, BATCH.data)
    assert coalesce(pieces, COALESCER, MTU) == 0


@given(st.lists(st.tuples(st.sampled_from("tu"), st.sampled_from([4, 6]), st.integers(1, 4)), max_size=8), st.data())
def test_any_flows_come_out_as_they_came_in(runs, data):
    table = TABLES[data.draw(st.sampled_from(sorted(TABLES)))]
    steps: dict[tuple[str, int], int] = {}
    groups = []
    for kind, version, count in runs:
        first = steps.get((kind, version), 0)
        steps[kind, version] = first + count
        make = tcp if kind == "t" else udp
        groups.append([make(first + i, version=version) for i in range(count)])
    pieces = bring(groups, table)
    packets = [one for group in groups for one in group]
    merged = coalesce(pieces, COALESCER, MTU)
    out = handed_on(pieces)
    assert len(out) == len(packets) - merged
    assert on_the_wire(out) == judged(packets, table)
