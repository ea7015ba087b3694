"""What a replay carries comes out as it went in, and what does not is noticed: the comparison, the paths without root."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packets import octets, tcp, udp
from reference import internet_checksum
from scapy.layers.inet import IP, UDP, IPOption_RR
from scapy.layers.l2 import Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Raw
from scapy.utils import PcapWriter

from bench.replay.chunk import Chunk
from bench.replay.loading import Decapsulation, Loader
from bench.replay.pacing import Pace, Pacer
from bench.replay.paths import BATCH, LoopbackPath, MemoryPath, ReplayPath, ReversePath, verdicts
from bench.replay.rewrite import Rewriter
from bench.replay.sides import RECEIVERS, SENDER, Sides, make_sides
from bench.replay.traces import TRACES, write
from bench.replay.verify import Recogniser, count_differences, has_crossed, is_same
from bench.replay.wire import write_underlay
from dataplane.batch import Batch
from dataplane.offload import Offloads
from dataplane.underlay.udp import open_udp
from dataplane.verdict import Verdict
from encap import ip
from encap.pure import is_compiled
from routing.table import Endpoint

SENDER_HOST, RECEIVER_HOST = ip_address("127.0.0.1"), ip_address("127.0.0.2")
HOSTS = SENDER_HOST, RECEIVER_HOST
FRAMINGS = ["vxlan", "ip"]
FORWARDED = int(Verdict.FORWARDED)
COUNT = 800 if is_compiled(ip) else 300
"""More than a batch, and not a multiple of one."""


def sides(framing: str, *, peers: int = 1, leases: int = 1, port: int = 8472) -> Sides:
    return make_sides(
        framing=framing, peers=peers, leases=leases, sender_host=SENDER_HOST, peer_hosts=(RECEIVER_HOST,), port=port
    )


def loader(paths, ends: Sides, **options) -> Loader:
    return Loader(paths, Rewriter(SENDER, ends.peer_subnets, 0, keep_multicast=True), trouble=pytest.fail, **options)


def carry(path: ReplayPath, source: Loader, loops: int = 1) -> int:
    """All packets, `loops` times; returns how many they were."""
    packets, pacer = 0, Pacer(Pace(loops=loops))
    while pacer.next_loop():
        for chunk in source.chunks():
            packets += len(chunk)
            assert path.carry(chunk, pacer) > 0
    return packets


# --- the comparison


def crossed(packet: bytes, framing: str) -> bytes:
    """What comes out."""
    changed = bytearray(packet)
    for _ in range(2 if framing == "ip" else 0):
        ip.decrement_ttl(changed, 0)
    return bytes(changed)


def batch_of(packets: Sequence[bytes], refused: Mapping[int, int] = {}, flows: Sequence[int] = ()) -> Batch:
    batch = Batch(max(len(packets), 1))
    for packet in packets:
        batch.put(packet)
    for i in range(len(packets)):
        batch.verdict[i] = refused.get(i, FORWARDED)
        batch.flow[i] = flows[i] if flows else 0
    return batch


def wrong(packet: bytes) -> bytes:
    return packet[:10] + bytes((packet[10] ^ 0x5A,)) + packet[11:]


PACKETS = {
    "IPv4": udp(),
    "IPv4 with options": octets(IP(src="10.1.1.5", dst="10.1.2.5", options=[IPOption_RR()]) / UDP() / Raw(b"x" * 9)),
    "IPv4 with a wrong checksum": wrong(udp()),
    "IPv4 with a checksum of 0": udp()[:10] + bytes(2) + udp()[12:],
    "IPv4 header alone": octets(IP(src="10.1.1.5", dst="10.1.2.5", proto=255)),
    "IPv6": tcp(version=6),
    "IPv6 header alone": udp(version=6)[:40],
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("packet", PACKETS.values(), ids=PACKETS)
def test_every_byte_that_changed_is_noticed(packet, framing):
    is_vxlan = framing == "vxlan"
    arrived = crossed(packet, framing)
    sent = batch_of([packet])
    assert count_differences(sent, batch_of([arrived]), is_vxlan) == 0
    assert is_same(b"xyz" + packet, 3, len(packet), arrived, 0, len(arrived), is_vxlan)
    for at in range(len(packet)):
        for flip in (0x01, 0x02, 0x80, 0xFF):
            damaged = arrived[:at] + bytes((arrived[at] ^ flip,)) + arrived[at + 1 :]
            assert count_differences(sent, batch_of([damaged]), is_vxlan) == 1, (at, flip)
    for other in (arrived[:-1], arrived + b"x"):
        assert count_differences(sent, batch_of([other]), is_vxlan) == 1


def test_the_ttl_falls_by_two_and_the_checksum_is_right():
    packet = udp(ttl=7)
    arrived = bytearray(packet)
    arrived[8] = 5
    arrived[10:12] = bytes(2)
    arrived[10:12] = internet_checksum(bytes(arrived[:20])).to_bytes(2, "big")
    assert is_same(packet, 0, len(packet), arrived, 0, len(arrived), False)
    assert not is_same(packet, 0, len(packet), arrived, 0, len(arrived), True)
    assert not is_same(packet, 0, len(packet), packet, 0, len(packet), False)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_missing_and_surplus_packets(framing):
    packets = [udp(payload=bytes((i,)) * 9) for i in range(6)]
    sent = batch_of(packets, refused={2: Verdict.NO_ROUTE})
    arrived = [crossed(packet, framing) for i, packet in enumerate(packets) if i != 2]
    is_vxlan = framing == "vxlan"
    assert count_differences(sent, batch_of(arrived), is_vxlan) == 0
    assert count_differences(sent, batch_of(arrived[:-2]), is_vxlan) == 2
    assert count_differences(sent, batch_of([]), is_vxlan) == 5
    assert count_differences(sent, batch_of([*arrived, arrived[-1]]), is_vxlan) == 1
    assert count_differences(batch_of([]), batch_of(arrived), is_vxlan) == 5
    assert count_differences(sent, batch_of(arrived, refused={1: Verdict.WRONG_MAC}), is_vxlan) == 1


@pytest.mark.parametrize("version", [4, 6])
def test_a_packet_whose_ttl_ends_at_the_receiver_is_rightly_refused(version):
    field = "ttl" if version == 4 else "hlim"
    two, three = (udp(version=version, **{field: ttl}) for ttl in (2, 3))
    refused = {0: Verdict.TTL_EXPIRED}
    assert has_crossed(batch_of([two]), 0, batch_of([two], refused), 0, False)
    assert not has_crossed(batch_of([two]), 0, batch_of([two], refused), 0, True)
    assert not has_crossed(batch_of([three]), 0, batch_of([three], refused), 0, False)
    assert not has_crossed(batch_of([two]), 0, batch_of([two], {0: Verdict.BAD_LENGTH}), 0, False)


def numbers(lanes: int, sent: Batch, pieces: Batch, is_vxlan: bool) -> tuple[int, int, int]:
    one = Recogniser(lanes)
    one.recognise(sent, pieces, is_vxlan)
    return one.missing, one.strange, one.reordered


def test_lost_and_changed_are_told_apart():
    packets = [udp(payload=bytes((i,)) * 30) for i in range(8)]
    changed = packets[3][:-1] + b"\xff"
    sent = batch_of(packets, refused={7: Verdict.TOO_BIG})
    assert numbers(1, sent, batch_of(packets[:7]), True) == (0, 0, 0)
    assert numbers(1, sent, batch_of([*packets[:3], *packets[4:7]]), True) == (1, 0, 0)
    assert numbers(1, sent, batch_of([*packets[:3], changed, *packets[4:7]]), True) == (1, 1, 0)
    assert numbers(1, sent, batch_of([*packets[:7], packets[0]]), True) == (0, 1, 0)
    assert numbers(1, sent, batch_of(packets), True) == (0, 1, 0)
    assert numbers(1, sent, batch_of([packets[1], packets[0], *packets[2:7]]), True) == (0, 0, 1)


def test_lanes_may_overtake_each_other():
    packets = [udp(payload=bytes((i,)) * 30) for i in range(8)]
    sent = batch_of(packets, flows=[0, 1, 0, 1, 4, 5, 0, 1])
    by_lane = [packets[i] for i in (1, 3, 5, 7, 0, 2, 4, 6)]
    assert numbers(2, sent, batch_of(by_lane), True) == (0, 0, 0)
    assert numbers(1, sent, batch_of(by_lane), True) == (0, 0, 4)
    assert numbers(2, sent, batch_of([packets[i] for i in (3, 1, 5, 7, 0, 2, 6, 4)]), True) == (0, 0, 2)


def test_packets_that_are_alike_keep_their_order():
    twice = [udp(payload=b"same"), udp(payload=b"other"), udp(payload=b"same"), udp(payload=b"third")]
    assert numbers(1, batch_of(twice), batch_of(twice), True) == (0, 0, 0)
    assert numbers(1, batch_of(twice), batch_of(twice[1:]), True) == (1, 0, 0)


def twin(lanes: int, packets, flows, framing: str, arrived) -> tuple[int, int, int]:
    """`Recogniser` the slow way, for packets that are all different."""
    order = {crossed(packet, framing): i for i, packet in enumerate(packets)}
    latest = dict.fromkeys(range(lanes), -1)
    seen, strange, reordered = set(), 0, 0
    for piece in arrived:
        i = order.get(piece)
        if i is None or i in seen:
            strange += 1
            continue
        seen.add(i)
        lane = flows[i] % lanes
        reordered += i < latest[lane]
        latest[lane] = max(latest[lane], i)
    return len(packets) - len(seen), strange, reordered


BODIES = [[udp(version=version, payload=bytes((i, version)) * (9 + i % 3)) for i in range(20)] for version in (4, 6)]


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(1, 4), st.sampled_from(FRAMINGS), st.integers(0, 20), st.integers(0, 3))
def test_recognition_does_what_the_slow_way_does(seed, lanes, framing, swaps, losses):
    rng = random.Random(seed)
    packets = [rng.choice(BODIES)[i] for i in range(20)]
    flows = [rng.randrange(1 << 20) for _ in packets]
    arrived = [crossed(packet, framing) for packet in packets]
    arrived.sort(key=lambda piece: flows[[crossed(one, framing) for one in packets].index(piece)] % lanes)
    for _ in range(swaps):
        a, b = rng.randrange(20), rng.randrange(20)
        arrived[a], arrived[b] = arrived[b], arrived[a]
    for _ in range(losses):
        at = rng.randrange(len(arrived))
        what = rng.choice(["lose", "twice", "change"])
        if what == "lose":
            del arrived[at]
        elif what == "twice":
            arrived.insert(at, arrived[at])
        else:
            arrived[at] = arrived[at][:-1] + bytes((arrived[at][-1] ^ 0x55,))
    found = numbers(lanes, batch_of(packets, flows=flows), batch_of(arrived), framing == "vxlan")
    assert found == twin(lanes, packets, flows, framing, arrived)


# --- in memory, and over sockets


def check_all_is_well(path: ReplayPath, packets: int) -> None:
    """Every packet has a verdict on each way, and nothing was lost, changed or late."""
    assert (path.lost, path.corrupted, path.reordered) == (0, 0, 0)
    assert path.outbound.received == sum(path.outbound.verdicts) == packets
    assert path.inbound.received == sum(path.inbound.verdicts) == path.outbound.verdicts[FORWARDED]
    assert path.delivered_packets == path.inbound.verdicts[FORWARDED]
    expired = path.inbound.verdicts[Verdict.TTL_EXPIRED]
    assert path.delivered_packets + expired == path.outbound.verdicts[FORWARDED]
    assert all(path.stages_ns.values())


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", TRACES)
def test_in_memory_everything_comes_out(tmp_path, name, framing):
    write(tmp_path / "a.pcap", name, 1, COUNT)
    ends = sides(framing, peers=5, leases=300)
    path = MemoryPath(ends)
    source = loader([tmp_path / "a.pcap"], ends)
    packets = carry(path, source, loops=2)
    check_all_is_well(path, packets)
    assert packets == 2 * source.trace("a").packets > 0
    if name != "hostile":
        assert verdicts(path) == {"outbound": {"forwarded": 2 * COUNT}, "inbound": {"forwarded": 2 * COUNT}}
        assert path.delivered_bytes == 2 * source.trace("a").inner_bytes
    assert path.latency.count == path.outbound.verdicts[FORWARDED]


def test_packets_go_to_all_peers(tmp_path):
    write(tmp_path / "a.pcap", "flows", 1, COUNT)
    ends = sides("vxlan", peers=7)
    seen = set()

    class Watched(MemoryPath):
        def _carry_batch(self, batch: Batch) -> None:
            super()._carry_batch(batch)
            seen.update(ends.sending.routes[row].subnet for row in batch.peer[: batch.count])

    path = Watched(ends)
    check_all_is_well(path, carry(path, loader([tmp_path / "a.pcap"], ends)))
    assert len(seen) == 7


@pytest.fixture
def underlays() -> Iterator:
    with ExitStack() as stack:
        receiver = open_udp([RECEIVER_HOST], 0, 0, Offloads())
        stack.callback(receiver.close)
        sender = open_udp([SENDER_HOST], 0, 8, Offloads())
        stack.callback(sender.close)
        yield sender, receiver


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", TRACES)
def test_over_sockets_everything_comes_out(tmp_path, underlays, name, framing):
    write(tmp_path / "a.pcap", name, 1, COUNT)
    sender, receiver = underlays
    ends = sides(framing, peers=3, leases=50, port=receiver.port)
    path = LoopbackPath(ends, sender, receiver)
    packets = carry(path, loader([tmp_path / "a.pcap"], ends), loops=2)
    check_all_is_well(path, packets)
    if name == "hostile":
        assert path.outbound.verdicts[Verdict.TOO_BIG]  # 65 535 bytes and a tunnel header are more than UDP has
    else:
        assert path.delivered_packets == 2 * COUNT


def test_packets_that_are_large_do_not_fill_the_socket(tmp_path, underlays):
    chunk = Chunk(1 << 24)
    for i in range(200):
        chunk.append(udp(payload=bytes((i,)) * 60_000), i)
    sender, receiver = underlays
    ends = sides("vxlan", port=receiver.port)
    fit = Rewriter(SENDER, ends.peer_subnets, 0)
    for at, length in zip(chunk.offset, chunk.length, strict=True):
        fit.rewrite(chunk.data, at, length)
    path = LoopbackPath(ends, sender, receiver)
    pacer = Pacer(Pace())
    pacer.next_loop()
    path.carry(chunk, pacer)
    check_all_is_well(path, 200)


class Wire:
    """Both ends of an underlay that does what it is told to the datagrams: a function of their list."""

    lanes = 4
    max_segments = 64
    families = frozenset({4})

    def __init__(self, spoil=lambda datagrams: datagrams) -> None:
        self.spoil = spoil
        self.waiting: list[bytes] = []

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        sent = []
        for train in range(batch.count):
            data, size = bytes(batch.packet(train)), batch.stride[train]
            sent += [data[at : at + size] for at in range(0, len(data), size)]
        self.waiting += self.spoil(sent)
        return batch.count

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        while self.waiting and not batch.is_full:
            batch.put(self.waiting.pop(0), origins[str(SENDER_HOST)])


def carried_over(wire: Wire, tmp_path, framing: str, count: int = COUNT) -> LoopbackPath:
    write(tmp_path / "a.pcap", "flows", 1, count)
    ends = sides(framing)
    ticks = iter(range(0, 1 << 62, 60_000_000))  # so that waiting in vain takes no time
    path = LoopbackPath(ends, wire, wire, now=partial(next, ticks))  # type: ignore[arg-type]
    assert carry(path, loader([tmp_path / "a.pcap"], ends)) == count
    return path


@pytest.mark.parametrize("framing", FRAMINGS)
class TestSpoiltUnderlays:
    def test_none(self, tmp_path, framing):
        check_all_is_well(carried_over(Wire(), tmp_path, framing), COUNT)

    def test_one_byte_of_each_batch_is_changed(self, tmp_path, framing):
        path = carried_over(Wire(lambda sent: [sent[0][:-1] + bytes((sent[0][-1] ^ 1,)), *sent[1:]]), tmp_path, framing)
        batches = -(-COUNT // BATCH)
        assert (path.lost, path.corrupted, path.reordered) == (0, batches, 0)

    def test_the_last_of_each_batch_is_lost(self, tmp_path, framing):
        path = carried_over(Wire(lambda sent: sent[:-1]), tmp_path, framing)
        batches = path.lost
        assert batches >= -(-COUNT // BATCH)
        assert (path.corrupted, path.reordered) == (0, 0)
        assert path.delivered_packets == COUNT - batches

    def test_one_is_lost_and_one_is_changed(self, tmp_path, framing):
        def spoil(sent: list[bytes]) -> list[bytes]:
            return [*sent[:3], sent[4][:-1] + bytes((sent[4][-1] ^ 0x80,)), *sent[5:]]

        path = carried_over(Wire(spoil), tmp_path, framing, 40)
        assert (path.lost, path.corrupted, path.reordered) == (1, 1, 0)

    def test_one_comes_twice(self, tmp_path, framing):
        path = carried_over(Wire(lambda sent: [sent[0], *sent]), tmp_path, framing, 40)
        assert path.corrupted == 1  # it took the place of the last one, which nobody waited for
        assert path.lost == 0

    def test_damage_that_the_receiver_refuses(self, tmp_path, framing):
        path = carried_over(Wire(lambda sent: [b"\xff" * 30, *sent[1:]]), tmp_path, framing, 40)
        assert (path.lost, path.corrupted) == (0, 1)
        assert path.delivered_packets == 39

    def test_all_is_lost(self, tmp_path, framing):
        path = carried_over(Wire(lambda sent: []), tmp_path, framing, 40)
        assert (path.lost, path.corrupted, path.delivered_packets) == (40, 0, 0)


def test_what_comes_too_late_does_not_disturb_the_next_batch(tmp_path):
    """The first datagram of the first batch comes with the second."""

    class Late(Wire):
        late: bytes | None = None

        def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
            super().receive(batch, origins)
            if batch.count == 0 and self.late:
                self.waiting.append(self.late)
                self.late = None
                super().receive(batch, origins)

    wire = Late()

    def spoil(sent: list[bytes]) -> list[bytes]:
        wire.spoil = lambda later: later
        wire.late = sent[0]
        return sent[1:]

    wire.spoil = spoil
    path = carried_over(wire, tmp_path, "vxlan")
    assert (path.lost, path.corrupted, path.reordered) == (1, 0, 0)
    assert path.delivered_packets == COUNT - 1


# --- the way in alone


def decapsulating(paths, framing: str, **options) -> tuple[Loader, ReversePath]:
    ends = sides(framing)
    mac = ends.receiving.identity.vtep_mac or bytes(6)
    fit = Rewriter(SENDER, RECEIVERS, 0)
    source = Loader(paths, fit, trouble=pytest.fail, decapsulation=Decapsulation(framing, 1, mac), **options)
    return source, ReversePath(ends)


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", ["dual", "fragments", "bulk", "hostile"])
def test_what_was_written_comes_in_again(tmp_path, name, framing):
    write(tmp_path / "a.pcap", name, 1, COUNT)
    ends = sides(framing, peers=3, port=8472 if framing == "vxlan" else 8285)
    written = write_underlay(tmp_path / "b.pcapng", loader([tmp_path / "a.pcap"], ends), ends, HOSTS)
    source, path = decapsulating([tmp_path / "b.pcapng"], framing)
    assert carry(path, source) == written > COUNT // 2
    counted = verdicts(path)
    assert counted["outbound"] == {"forwarded": written}
    too_large = written // 61 if name == "hostile" else 0
    # One kind has 65 535 bytes; with a tunnel header that is more than a datagram holds, so the file has but a part.
    assert counted["inbound"].get("truncated", 0) == pytest.approx(too_large, abs=1)
    assert counted["inbound"]["forwarded"] + counted["inbound"].get("truncated", 0) == written
    if name != "hostile":
        assert written == COUNT


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_capture_that_is_read_once_is_the_same_in_the_hundredth_loop(tmp_path, framing):
    """The way in takes from the TTL, where the packet lies."""
    write(tmp_path / "a.pcap", "dual", 1, 20)
    ends = sides(framing, port=8472 if framing == "vxlan" else 8285)
    write_underlay(tmp_path / "b.pcapng", loader([tmp_path / "a.pcap"], ends), ends, HOSTS)
    source, path = decapsulating([tmp_path / "b.pcapng"], framing)
    carry(path, source, loops=100)
    assert verdicts(path)["inbound"] == {"forwarded": 2000}


def kernel_datagram(number: int, port: int) -> Ether:
    """As a kernel's VXLAN device makes it: another VNI, its own MACs, and short frames padded."""
    inner = Ether(src="4a:00:00:00:00:01", dst="4a:00:00:00:00:02") / IP(src="172.16.1.5", dst="172.16.9.9")
    padded = Raw(bytes(inner / UDP(sport=number, dport=9)).ljust(60, b"\0"))
    outer = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")
    outer = outer / Dot1Q(vlan=7) if number % 2 else outer
    return outer / IP(src="198.51.100.1", dst="198.51.100.2") / UDP(sport=40000, dport=port) / VXLAN(vni=99) / padded


def test_captures_of_kernel_vxlan_come_in(tmp_path):
    with PcapWriter(str(tmp_path / "a.pcap"), linktype=1) as file:
        for number in range(30):
            file.write(kernel_datagram(number, (8472, 4789)[number % 3 == 0]))
        file.write(Ether() / IP() / UDP(dport=53) / Raw(b"no overlay"))
        file.write(Ether() / IP(src="198.51.100.1", dst="198.51.100.2") / UDP(dport=8285) / udp())
        file.write(Ether() / IP(src="198.51.100.1", dst="198.51.100.2") / UDP(dport=8472) / Raw(b"short"))
    source, path = decapsulating([tmp_path / "a.pcap"], "vxlan")
    carry(path, source, loops=2)
    assert dict(source.skipped) == {"no datagram of an overlay": 1, "a datagram of the other framing": 1}
    assert verdicts(path) == {"outbound": {"forwarded": 62}, "inbound": {"forwarded": 60, "truncated": 2}}
    assert path.delivered_bytes == 60 * 28  # without the padding
