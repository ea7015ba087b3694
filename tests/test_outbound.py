"""dataplane/outbound.py: virtio-net headers judged, and batches laid out as trains, against a slow twin."""

import pytest
import reference_offload as twin
from hypothesis import given
from hypothesis import strategies as st
from packets import mac, table_of
from reference_encap import POISON
from reference_offload import GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, SHAPES, TCP, UDP, Datagram, body, packet

from dataplane.batch import Batch
from dataplane.outbound import MAX_SEGMENTS, MAX_TRAIN_LENGTH, Outbound, judge_batch, judge_offload
from dataplane.verdict import Verdict
from encap import vnet
from encap.ip import flow_hash
from routing.table import Table

NO_HEADER = bytes(10)
LARGE = Outbound(arena_bytes=8 << 20, trains=4096)
"""Has room for whatever a test makes, so that one call lays all of it out."""
SMALL = Outbound(arena_bytes=70000, trains=3)
BATCH = Batch(32)
TABLES = {framing: table_of(1, [2, 3], framing) for framing in ("vxlan", "ip")}
HOSTS = {(4, 2): "10.1.2.5", (4, 3): "10.1.3.5", (6, 2): "fd00:0:0:2::5", (6, 3): "fd00:0:0:3::5"}


def header(*values: int) -> bytes:
    buf = bytearray(10)
    vnet.store(buf, 0, *values)
    return bytes(buf)


def superpacket(name: str, length: int, size: int, node: int = 2, **fields) -> tuple[bytes, bytes]:
    """A superpacket with `length` bytes of payload for `node`, and its virtio-net header."""
    shape = SHAPES[name]
    whole = shape.make(body(length), destination=HOSTS[shape.version, node], **fields)
    offset = 16 if shape.protocol == TCP else 6
    return whole, header(1, shape.gso_type, shape.header_length, size, shape.start, offset)


def plain(name: str, length: int, node: int = 2, checksum: str = "complete", **fields) -> tuple[bytes, bytes]:
    """An ordinary packet, with its checksum left to us or not."""
    shape = SHAPES[name]
    whole = shape.make(body(length), destination=HOSTS[shape.version, node], checksum=checksum, **fields)
    offset = 16 if shape.protocol == TCP else 6
    return whole, header(1, 0, 0, 0, shape.start, offset) if checksum == "partial" else NO_HEADER


def fill(items: list[tuple[bytes, bytes]], table: Table) -> Batch:
    BATCH.clear()
    for octets, head in items:
        BATCH.put(octets, vnet=head)
    judge_batch(BATCH, table)
    return BATCH


def on_the_wire(octets: bytes, head: bytes) -> list[bytes]:
    flags, gso_type, _, size, start, offset = vnet.parse(head, 0)
    if gso_type:
        return twin.segments(octets, gso_type, size, start)
    if flags & 1:
        return [twin.complete(octets, start, TCP if offset == 16 else UDP)]
    return [octets]


def expected(items: list[tuple[bytes, bytes]], table: Table, lanes: int) -> list[Datagram]:
    """All datagrams of the batch as it was judged, in order."""
    out = []
    for index, (octets, head) in enumerate(items):
        if BATCH.verdict[index] != Verdict.FORWARDED:
            continue
        row = BATCH.peer[index]
        node = int(str(table.routes[row].public[0]).rpartition(".")[2])
        for piece in on_the_wire(octets, head):
            if table.is_vxlan:
                datagram = twin.vxlan_header(1, mac(node), mac(1), octets[0] >> 4) + piece
            else:
                datagram = twin.one_hop_less(piece)
            out.append(Datagram(row, BATCH.flow[index] % lanes, index, datagram))
    return out


def read(outbound: Outbound) -> list[list[Datagram]]:
    """The trains that were laid out; that they are sound in themselves is checked on the way."""
    batch, out, end = outbound.trains, [], 0
    assert batch.count <= batch.capacity
    for i in range(batch.count):
        octets, size = bytes(batch.packet(i)), batch.stride[i]
        assert batch.offset[i] == end  # one behind the other
        end = batch.offset[i] + len(octets)
        assert end <= len(batch.data)
        assert batch.verdict[i] == Verdict.FORWARDED
        assert 0 < size <= len(octets)
        assert len(octets) <= MAX_TRAIN_LENGTH or len(octets) == size
        assert 0 <= batch.flow[i] < outbound.lanes
        assert batch.head[i] <= batch.last[i]
        train = [octets[at : at + size] for at in range(0, len(octets), size)]
        assert len(train) <= min(MAX_SEGMENTS, outbound.max_segments)
        out.append([Datagram(batch.peer[i], batch.flow[i], -1, datagram) for datagram in train])
    return out


def check(items: list[tuple[bytes, bytes]], table: Table, lanes: int = 4, most: int = MAX_SEGMENTS) -> list[list[Datagram]]:
    """Lay out with much room, and with little; returns the trains."""
    batch = fill(items, table)
    before = [bytes(batch.packet(i)) for i in range(batch.count)]
    wanted = expected(items, table, lanes)
    trains = twin.trains(wanted, most)
    LARGE.start(lanes, most)
    assert not LARGE.lay_out(batch, table)
    assert nameless(read(LARGE)) == nameless(trains)
    assert [(LARGE.trains.head[i], LARGE.trains.last[i]) for i in range(LARGE.trains.count)] == [
        (train[0].packet, train[-1].packet) for train in trains
    ]
    SMALL.start(lanes, most)
    found: list[Datagram] = []
    more = True
    while more:
        more = SMALL.lay_out(batch, table)
        assert SMALL.trains.count or not wanted
        here = read(SMALL)
        for i, train in enumerate(here):
            part = wanted[len(found) : len(found) + len(train)]
            assert (SMALL.trains.head[i], SMALL.trains.last[i]) == (part[0].packet, part[-1].packet)
            found += train
        length = sum(map(len, here))
        assert nameless(here) == nameless(twin.trains(wanted[len(found) - length : len(found)], most))
    assert nameless([found]) == nameless([wanted])
    assert [bytes(batch.packet(i)) for i in range(batch.count)] == before
    return trains


def nameless(trains: list[list[Datagram]]) -> list[list[tuple[int, int, bytes]]]:
    return [[(datagram.row, datagram.lane, datagram.octets) for datagram in train] for train in trains]


# judge_offload and judge_batch


@pytest.mark.parametrize("name", SHAPES)
def test_a_header_that_fits_passes(name):
    octets, head = superpacket(name, 1000, 100)
    assert judge_offload(head, 0, octets, 0, len(octets)) == 0
    assert judge_offload(b"\xa5" * 10 + head, 10, b"\xa5" * 9 + octets, 9, len(octets)) == 0
    octets, head = plain(name, 1000, checksum="partial")
    assert judge_offload(head, 0, octets, 0, len(octets)) == 0
    assert judge_offload(NO_HEADER, 0, octets, 0, len(octets)) == 0


TCP4, UDP6 = SHAPES["tcp4"].make(body(100)), SHAPES["udp6"].make(body(100))
HEADERS = [
    ("checksum in the last two bytes", TCP4, (1, 0, 0, 0, 122, 16), 0),
    ("checksum a byte too late", TCP4, (1, 0, 0, 0, 123, 16), Verdict.BAD_OFFLOAD),
    ("start beyond the end", TCP4, (1, 0, 0, 0, 65535, 65535), Verdict.BAD_OFFLOAD),
    ("offset beyond the end", TCP4, (1, 0, 0, 0, 20, 65535), Verdict.BAD_OFFLOAD),
    ("no checksum wanted, values wild", TCP4, (0, 0, 65535, 65535, 65535, 65535), 0),
    ("the other flag, DATA_VALID", TCP4, (2, 0, 0, 0, 0, 0), 0),
    ("DATA_VALID and wild values", TCP4, (2, 0, 0, 0, 65535, 65535), 0),
    ("hdr_len wild", TCP4, (1, GSO_TCPV4, 65535, 10, 20, 16), 0),
    ("size 0", TCP4, (1, GSO_TCPV4, 40, 0, 20, 16), Verdict.BAD_OFFLOAD),
    ("TCPV6 with IPv4", TCP4, (1, GSO_TCPV6, 40, 10, 20, 16), Verdict.BAD_OFFLOAD),
    ("unknown type", TCP4, (1, 7, 40, 10, 20, 16), Verdict.BAD_OFFLOAD),
    ("UFO", UDP6, (1, 3, 48, 10, 40, 6), Verdict.BAD_OFFLOAD),
    ("ECN", TCP4, (1, 0x81, 40, 10, 20, 16), Verdict.BAD_OFFLOAD),
    ("start in the header", UDP6, (1, GSO_UDP_L4, 48, 10, 39, 6), Verdict.BAD_OFFLOAD),
    ("start at the end", UDP6, (1, GSO_UDP_L4, 48, 10, 148, 6), Verdict.BAD_OFFLOAD),
    ("a type without the flag", UDP6, (0, GSO_UDP_L4, 48, 10, 40, 6), 0),
]


@pytest.mark.parametrize(("name", "octets", "values", "outcome"), HEADERS)
def test_judge_offload(name, octets, values, outcome):
    assert judge_offload(header(*values), 0, octets, 0, len(octets)) == outcome


@pytest.mark.parametrize(("name", "octets", "values", "outcome"), HEADERS)
@pytest.mark.parametrize("framing", TABLES)
def test_judge_batch(framing, name, octets, values, outcome):
    batch = fill([plain("udp4", 10), (octets, header(*values)), plain("udp6", 10, 3)], TABLES[framing])
    verdict = outcome or Verdict.FORWARDED
    assert list(batch.verdict[:3]) == [Verdict.FORWARDED, verdict, Verdict.FORWARDED]
    assert bytes(batch.packet(1)) == octets
    table = TABLES[framing]
    wanted = [table.routes[batch.peer[i]].public[0] for i in (0, 2)]
    assert [str(address) for address in wanted] == ["192.0.2.2", "192.0.2.3"]
    assert judge_batch(batch, table) == 2 + (not outcome)
    for i in (0, 2):
        one = bytes(batch.packet(i))
        assert batch.flow[i] == flow_hash(one, 0, len(one)) & 0x7FFFFFFF


def test_other_verdicts_come_first():
    wild = header(1, 7, 0, 0, 65535, 0)
    items = [
        (packet(4, TCP, destination="10.9.9.9"), wild),
        (packet(4, TCP, destination="224.0.0.1"), wild),
        (packet(4, TCP)[:-1], wild),
        (packet(4, TCP, ttl=1), wild),
    ]
    assert list(fill(items, TABLES["ip"]).verdict[:4]) == [
        Verdict.NO_ROUTE,
        Verdict.MULTICAST,
        Verdict.TRUNCATED,
        Verdict.TTL_EXPIRED,
    ]


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    head=st.tuples(
        st.integers(0, 3),
        st.sampled_from([0, 1, 4, 5, 3, 255]),
        *[st.one_of(st.integers(0, 64), st.integers(0, 65535))] * 4,
    ),
    length=st.integers(0, 40),
)
def test_hostile_headers_are_refused_or_laid_out(shape, head, length):
    octets = SHAPES[shape].make(body(length), destination=HOSTS[SHAPES[shape].version, 2])
    for table in TABLES.values():
        batch = fill([(octets, header(*head)), plain("udp4", 5)], table)
        assert batch.verdict[0] in {Verdict.FORWARDED, Verdict.BAD_OFFLOAD}
        LARGE.start(1, MAX_SEGMENTS)
        assert not LARGE.lay_out(batch, table)
        read(LARGE)
        assert LARGE.trains.last[LARGE.trains.count - 1] == 1
        assert bytes(batch.packet(0)) == octets


# lay_out

BATCHES = {
    "nothing": [],
    "one": [plain("udp4", 100)],
    "one for each node": [plain("udp4", 100, 2), plain("udp4", 100, 3)],
    "equal ones": [plain("udp4", 100)] * 5,
    "a shorter last one": [plain("udp4", 100)] * 3 + [plain("udp4", 99)],
    "a shorter one in between": [plain("udp4", 100), plain("udp4", 99), plain("udp4", 100), plain("udp4", 100)],
    "a longer one": [plain("udp4", 100), plain("udp4", 101), plain("udp4", 101)],
    "there and back": [plain("udp4", 100, 2), plain("udp4", 100, 3), plain("udp4", 100, 2)],
    "flows": [plain("udp4", 100, sport=port) for port in range(1000, 1030)],
    "both families": [plain("udp4", 120), plain("udp6", 100), plain("udp4", 120)],
    "partial checksums": [plain(name, 99, checksum="partial") for name in SHAPES],
    "no payload": [plain(name, 0) for name in SHAPES],
    "some refused": [
        plain("udp4", 100),
        (packet(4, UDP, body(100), destination="10.9.9.9"), NO_HEADER),
        plain("udp4", 100),
        (b"\x55" + bytes(60), NO_HEADER),
        (TCP4, header(1, 7, 0, 0, 0, 0)),
    ],
    "all refused": [(b"\x55" + bytes(60), NO_HEADER)] * 3,
    "large ones": [plain("udp4", 65507)] * 3,
    "65 535 bytes": [plain("tcp6", 65535 - 60), plain("udp4", 65535 - 28, 3)],
    "a superpacket": [superpacket("tcp4", 60000, 1398)],
    "a superpacket of one": [superpacket("udp4", 100, 1000)],
    "a superpacket without payload": [superpacket("tcp6", 0, 1000)],
    "64 segments": [superpacket("udp4", 64 * 900, 900)],
    "65 segments": [superpacket("udp4", 65 * 900, 900)],
    "130 segments": [superpacket("udp6", 130 * 100, 100, 3)],
    "as long as a train may be": [superpacket("udp6", 62000, 31000)],
    "superpackets of every kind": [superpacket(name, 5000, 900) for name in SHAPES],
    "a superpacket amid packets": [
        plain("tcp4", 900),
        superpacket("tcp4", 2700, 900),
        plain("tcp4", 900),
        plain("tcp4", 5),
    ],
    "a superpacket's tail amid packets": [
        superpacket("tcp4", 2600, 900),
        superpacket("tcp4", 2700, 900),
        plain("tcp4", 900),
    ],
    "superpackets for two": [superpacket("tcp4", 30000, 1400, 2 + i % 2) for i in range(6)],
    "many superpackets": [superpacket("tcp4", 40000, 1398, seq=7 * i) for i in range(12)],
    "tiny segments": [superpacket("tcp6", 500, 1), superpacket("udp4", 300, 2, 3)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("framing", TABLES)
@pytest.mark.parametrize(("lanes", "most"), [(1, MAX_SEGMENTS), (4, MAX_SEGMENTS), (2, 1), (3, 5)])
def test_lay_out(name, framing, lanes, most):
    trains = check(BATCHES[name], TABLES[framing], lanes, most)
    if most == 1:
        assert all(len(train) == 1 for train in trains)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("equal ones", [5]),
        ("a shorter last one", [4]),
        ("a shorter one in between", [2, 2]),
        ("a longer one", [1, 2]),
        ("there and back", [1, 1, 1]),
        ("64 segments", [64]),
        ("65 segments", [64, 1]),
        ("130 segments", [64, 64, 2]),
        ("a superpacket", [43]),
        ("a superpacket amid packets", [6]),
        ("a superpacket's tail amid packets", [3, 4]),
        ("some refused", [2]),
        ("large ones", [1, 1, 1]),
    ],
)
def test_how_many_datagrams_go_on_one_train(name, sizes):
    assert [len(train) for train in check(BATCHES[name], TABLES["vxlan"])] == sizes


@pytest.mark.parametrize("spare", [0, 1])
def test_a_train_of_65507_bytes_and_no_more(spare):
    length = 65507 - 4 * (22 + 28 + 16000)
    items = [plain("udp4", 16000)] * 4 + [plain("udp4", length - 22 - 28 + spare)]
    trains = check(items, TABLES["vxlan"])
    assert [len(train) for train in trains] == ([4, 1] if spare else [5])
    if not spare:
        assert sum(len(datagram.octets) for datagram in trains[0]) == MAX_TRAIN_LENGTH


def test_one_flow_stays_on_one_lane_and_flows_are_spread():
    items = [plain("udp4", 50, sport=port) for port in range(8)] * 2
    check(items, TABLES["vxlan"], lanes=5)
    lanes = [BATCH.flow[i] % 5 for i in range(16)]
    assert lanes[:8] == lanes[8:]
    assert len(set(lanes)) > 1


def test_the_ttl_falls_in_every_datagram_and_only_there():
    items = [superpacket("tcp4", 300, 100, ttl=2), superpacket("udp6", 300, 100, ttl=255)]
    trains = check(items, TABLES["ip"])
    assert [datagram.octets[8] for datagram in trains[0]] == [1, 1, 1]
    assert [datagram.octets[7] for datagram in trains[1]] == [254, 254, 254]
    assert [BATCH.packet(0)[8], BATCH.packet(1)[7]] == [2, 255]


def test_a_small_arena_stops_within_a_superpacket_and_goes_on():
    batch = fill([superpacket("tcp4", 64000, 1000), superpacket("tcp4", 64000, 1000)], TABLES["vxlan"])
    SMALL.start(1, MAX_SEGMENTS)
    parts = []
    more = True
    while more:
        more = SMALL.lay_out(batch, TABLES["vxlan"])
        parts.append([(SMALL.trains.head[i], SMALL.trains.last[i]) for i in range(SMALL.trains.count)])
    assert len(parts) == 2
    assert parts[0][-1][1] == parts[1][0][0] == 1  # the second superpacket is in both


def test_too_few_trains_stop_within_a_superpacket_too():
    batch = fill([superpacket("udp4", 1000, 100)], TABLES["vxlan"])
    SMALL.start(1, 1)
    counts = []
    more = True
    while more:
        more = SMALL.lay_out(batch, TABLES["vxlan"])
        counts.append(SMALL.trains.count)
    assert counts == [3, 3, 3, 1]


def test_a_batch_that_just_fits_is_finished_by_one_call():
    outbound = Outbound(arena_bytes=3 * 150, trains=1)
    batch = fill([plain("udp4", 100)] * 3, TABLES["vxlan"])
    outbound.start(1, MAX_SEGMENTS)
    assert not outbound.lay_out(batch, TABLES["vxlan"])
    assert (outbound.trains.count, outbound.trains.length[0], outbound.trains.stride[0]) == (1, 450, 150)


def test_nothing_behind_the_trains_is_written():
    outbound = Outbound(arena_bytes=1000, trains=4)
    outbound.trains.data[:] = bytes([POISON] * 1000)
    batch = fill([superpacket("tcp4", 230, 100), plain("udp4", 10)], TABLES["vxlan"])
    outbound.start(1, MAX_SEGMENTS)
    assert not outbound.lay_out(batch, TABLES["vxlan"])
    end = sum(outbound.trains.length[: outbound.trains.count])
    assert end == 3 * 62 + 230 + 60
    assert bytes(outbound.trains.data[end:]) == bytes([POISON] * (1000 - end))


def test_start_begins_anew_after_an_unfinished_batch():
    batch = fill([superpacket("udp4", 1000, 100)], TABLES["vxlan"])
    SMALL.start(1, 1)
    assert SMALL.lay_out(batch, TABLES["vxlan"])
    check([plain("udp4", 100, 3), superpacket("tcp6", 200, 100)], TABLES["vxlan"])


ITEM = st.builds(
    lambda name, length, size, node, kind, sport: (
        superpacket(name, length, size, node, sport=sport)
        if kind == "super"
        else plain(name, length % 1400, node, kind, sport=sport)
    ),
    st.sampled_from(sorted(SHAPES)),
    st.integers(0, 9000),
    st.sampled_from([100, 900, 1398]),
    st.sampled_from([2, 3]),
    st.sampled_from(["super", "complete", "partial"]),
    st.sampled_from([1000, 1001]),
)


@given(st.lists(ITEM, max_size=20), st.sampled_from(sorted(TABLES)), st.integers(1, 4), st.sampled_from([1, 2, 64]))
def test_any_batch(items, framing, lanes, most):
    check(items, TABLES[framing], lanes, most)
