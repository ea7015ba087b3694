"""Two or three nodes in memory: what happens to each kind of packet, in bytes and verdicts."""

import asyncio
import contextlib
import socket
from ipaddress import ip_address
from typing import ClassVar

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from packets import FakeNode, echo, exchange, mac, octets, pod, table_of, tcp, udp, underlay_host
from scapy.layers.inet import ICMP, IP, UDP, fragment
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6PacketTooBig, IPv6
from scapy.packet import Raw

from dataplane.batch import Batch
from dataplane.device import DeviceLostError
from dataplane.device.memory import MemoryDevice
from dataplane.device.tun import open_tun
from dataplane.engine import BATCH_CAPACITY, BATCHES_PER_WAKEUP, ICMP_BURST, Engine
from dataplane.lab import Lab, Namespace, inside
from dataplane.mailbox import Mailbox
from dataplane.outbound import judge_batch
from dataplane.underlay.fake import Datagram, FakeNetwork
from dataplane.underlay.udp import open_udp
from dataplane.verdict import Verdict, by_name
from encap import vnet, vxlan


def pair(**options) -> tuple[FakeNetwork, FakeNode, FakeNode]:
    network = FakeNetwork(mtu=options.pop("network_mtu", 1500))
    return network, FakeNode(network, 1, [2], **options), FakeNode(network, 2, [1], **options)


def counts(direction) -> dict[str, int]:
    return {name: count for name, count in by_name(direction.verdicts).items() if count}


def assert_adds_up(*nodes: FakeNode) -> None:
    for node in nodes:
        for direction in (node.engine.outbound, node.engine.inbound):
            assert direction.received == sum(direction.verdicts)
            assert direction.verdicts[Verdict.PENDING] == 0


def with_ttl_lowered(packet: bytes, by: int) -> bytes:
    layer = IP(packet) if packet[0] >> 4 == 4 else IPv6(packet)
    if packet[0] >> 4 == 4:
        layer.ttl -= by
        del layer.chksum
    else:
        layer.hlim -= by
    return bytes(layer)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("build", [udp, tcp])
@pytest.mark.parametrize("underlay", [4, 6])
def test_vxlan_carries_a_packet_unchanged(version, build, underlay):
    network, a, b = pair(underlay=underlay)
    packet = build(version=version)
    a.device.inject(packet)
    exchange(a, b)
    assert b.device.delivered == [packet]
    (datagram,) = network.crossed
    ethertype = 0x0800 if version == 4 else 0x86DD
    assert datagram.payload == vxlan.header(1, mac(2), mac(1), ethertype) + packet
    assert (datagram.source, datagram.destination) == (underlay_host(1, underlay), underlay_host(2, underlay))
    assert counts(a.engine.outbound) == counts(b.engine.inbound) == {"forwarded": 1}
    assert_adds_up(a, b)


@pytest.mark.parametrize("version", [4, 6])
def test_ip_framing_is_the_bare_packet_and_costs_one_ttl_at_each_end(version):
    network, a, b = pair(framing="ip")
    packet = udp(version=version)
    a.device.inject(packet)
    exchange(a, b)
    assert [d.payload for d in network.crossed] == [with_ttl_lowered(packet, 1)]
    assert b.device.delivered == [with_ttl_lowered(packet, 2)]


def test_vxlan_leaves_the_ttl_alone_even_at_one():
    _, a, b = pair()
    packet = udp(ttl=1)
    a.device.inject(packet)
    exchange(a, b)
    assert b.device.delivered == [packet]


@pytest.mark.parametrize("ttl", [0, 1])
def test_ip_framing_answers_time_exceeded_at_the_sending_end(ttl):
    network, a, b = pair(framing="ip")
    a.device.inject(udp(ttl=ttl))
    exchange(a, b)
    assert not network.crossed
    (answer,) = map(IP, a.device.delivered)
    assert (answer.src, answer.dst, answer[ICMP].type, answer[ICMP].code) == ("10.1.1.0", pod(1), 11, 0)
    assert bytes(answer[ICMP].payload) == udp(ttl=ttl)
    assert counts(a.engine.outbound) == {"ttl_expired": 1}


def test_ip_framing_answers_time_exceeded_at_the_receiving_end_through_the_tunnel():
    network, a, b = pair(framing="ip")
    a.device.inject(udp(ttl=2))
    exchange(a, b)
    assert b.device.delivered == []
    (answer,) = map(IP, a.device.delivered)
    assert (answer.src, answer.dst, answer[ICMP].type, answer.ttl) == ("10.1.2.0", pod(1), 11, 62)
    assert counts(b.engine.inbound) == {"ttl_expired": 1}
    assert b.engine.icmp_sent == 1
    assert len(network.crossed) == 2
    assert_adds_up(a, b)


def test_ip_framing_receiving_ttl_zero_expires_and_does_not_wrap():
    network, a, b = pair(framing="ip")
    network.send(Datagram(underlay_host(1), underlay_host(2), 8472, udp(ttl=0)))
    exchange(a, b)
    assert b.device.delivered == []
    assert counts(b.engine.inbound) == {"ttl_expired": 1}


def test_no_lease_for_the_destination_is_told_to_the_sender():
    _, a, b = pair()
    packet = echo(destination=77)
    a.device.inject(packet)
    exchange(a, b)
    (answer,) = map(IP, a.device.delivered)
    assert (answer.src, answer.dst) == ("10.1.1.0", pod(1))
    assert (answer[ICMP].type, answer[ICMP].code) == (3, 0)
    assert bytes(answer[ICMP].payload) == packet
    assert counts(a.engine.outbound) == {"no_route": 1}


def test_no_lease_over_ipv6():
    _, a, b = pair()
    a.device.inject(udp(destination=77, version=6))
    exchange(a, b)
    (answer,) = map(IPv6, a.device.delivered)
    assert (answer.src, answer.dst) == ("fd00:0:0:1::", pod(1, 6))
    assert (answer[ICMPv6DestUnreach].type, answer[ICMPv6DestUnreach].code) == (1, 0)


NEVER_ANSWERED = {
    "an ICMP error": octets(IP(src=pod(1), dst=pod(77)) / ICMP(type=3, code=1) / Raw(b"x" * 28)),
    "a later fragment": octets(IP(src=pod(1), dst=pod(77), frag=5, proto=17) / Raw(b"x" * 16)),
    "an unspecified source": octets(IP(src="0.0.0.0", dst=pod(77)) / UDP()),
}


@pytest.mark.parametrize("packet", NEVER_ANSWERED.values(), ids=NEVER_ANSWERED)
def test_no_route_is_not_told_about(packet):
    _, a, b = pair()
    a.device.inject(packet)
    exchange(a, b)
    assert a.device.delivered == []
    assert counts(a.engine.outbound) == {"no_route": 1}


@pytest.mark.parametrize(
    "packet",
    [
        octets(IP(src=pod(1), dst="224.0.0.13") / UDP()),
        octets(IP(src=pod(1), dst="255.255.255.255") / UDP()),
        octets(IP(src=pod(1), dst="10.1.255.255") / UDP()),
        octets(IPv6(src=pod(1, 6), dst="ff02::2") / UDP()),
    ],
    ids=["multicast", "limited broadcast", "the network's broadcast", "IPv6 multicast"],
)
def test_multicast_is_dropped_counted_and_not_told_about(packet):
    network, a, b = pair()
    a.device.inject(packet)
    exchange(a, b)
    assert (a.device.delivered, list(network.crossed)) == ([], [])
    assert counts(a.engine.outbound) == {"multicast": 1}


def test_icmp_errors_are_limited_in_rate_and_come_again_with_time():
    clock = [0.0]
    network = FakeNetwork()
    a = FakeNode(network, 1, [2], now=lambda: clock[0])
    burst = int(ICMP_BURST)
    for _ in range(burst + 30):
        a.device.inject(echo(destination=77))
    exchange(a)
    assert len(a.device.delivered) == a.engine.icmp_sent == burst
    assert a.engine.icmp_suppressed > 0
    assert counts(a.engine.outbound) == {"no_route": burst + 30}
    clock[0] = 1.0
    a.device.inject(echo(destination=77))
    exchange(a)
    assert len(a.device.delivered) == burst + 1


def test_a_datagram_larger_than_the_path_is_told_with_the_right_mtu():
    network, a, b = pair(network_mtu=1400)
    packet = udp(payload=b"x" * 1400, flags="DF")
    a.device.inject(packet)
    exchange(a, b)
    assert (b.device.delivered, list(network.crossed)) == ([], [])
    (answer,) = map(IP, a.device.delivered)
    assert (answer[ICMP].type, answer[ICMP].code, answer[ICMP].nexthopmtu) == (3, 4, 1350)
    assert a.device.delivered[0][28:] == packet[:548]
    assert counts(a.engine.outbound) == {"too_big": 1}


@pytest.mark.parametrize("hint", [40, 0, 3000], ids=["right", "none", "the whole packet"])
def test_a_superpacket_is_judged_by_its_segments_and_not_by_the_hint_in_its_header(hint):
    """Segments of 540 bytes are below the floor of 552, so they go in fragments whatever hdr_len says."""
    network, a, b = pair(network_mtu=560)
    header = bytearray(10)
    vnet.store(header, 0, 1, vnet.GSO_TCPV4, hint, 500, 20, 16)
    payload = bytes(range(250)) * 8
    a.device.inject(tcp(payload=payload, flags="DF"), bytes(header))
    exchange(a, b)
    assert b"".join(packet[40:] for packet in b.device.delivered) == payload
    assert {datagram.in_fragments for datagram in network.crossed} == {True}
    assert a.device.delivered == []


def test_a_flood_of_other_errors_does_not_hide_the_path_mtu():
    _, a, b = pair(network_mtu=1400)
    for _ in range(200):
        a.device.inject(echo(destination=77))
    a.device.inject(udp(payload=b"x" * 1400, flags="DF"))
    exchange(a, b)
    told = [IP(packet)[ICMP] for packet in a.device.delivered]
    assert [layer.nexthopmtu for layer in told if (layer.type, layer.code) == (3, 4)] == [1350]
    assert a.engine.icmp_sent + a.engine.icmp_suppressed == 201


def test_a_datagram_larger_than_the_path_over_ipv6():
    _, a, b = pair(network_mtu=1400, underlay=6)
    a.device.inject(udp(version=6, payload=b"x" * 1400))
    exchange(a, b)
    (answer,) = map(IPv6, a.device.delivered)
    assert answer[ICMPv6PacketTooBig].mtu == 1330


@pytest.mark.parametrize(
    ("packet", "network_mtu"),
    [
        (udp(payload=b"x" * 1400), 1400),
        (udp(payload=b"x" * 500, flags="DF"), 552),
        (udp(version=6, payload=b"x" * 1200), 1200),
    ],
    ids=["IPv4 without DF", "DF but shorter than the floor", "IPv6 shorter than 1280"],
)
def test_what_may_be_fragmented_goes_in_fragments(packet, network_mtu):
    network, a, b = pair(network_mtu=network_mtu)
    a.device.inject(packet)
    exchange(a, b)
    assert b.device.delivered == [packet]
    assert [d.in_fragments for d in network.crossed] == [True]
    assert counts(a.engine.outbound) == {"forwarded": 1}


def test_fragments_of_a_datagram_pass_in_order():
    _, a, b = pair()
    pieces = [bytes(piece) for piece in fragment(IP(udp(payload=b"x" * 5000, id=9)), fragsize=1000)]
    for piece in pieces:
        a.device.inject(piece)
    exchange(a, b)
    assert b.device.delivered == pieces
    assert len(pieces) == 6


class TestForgedDatagrams:
    """A third host that injects: each refusal has its verdict, and one switch turns the source checks off."""

    INNER = udp(source=1, destination=2)
    FRAME = vxlan.header(1, mac(2), mac(1), 0x0800)

    CASES: ClassVar = {
        "unknown outer source": (underlay_host(9), FRAME + INNER, "unknown_vtep"),
        "inner source of another peer": (underlay_host(3), FRAME + INNER, "spoofed_source"),
        "inner source in nobody's subnet": (underlay_host(1), FRAME + udp(source=50), "spoofed_source"),
        "inner source our own": (underlay_host(1), FRAME + udp(source=2, destination=2), "spoofed_source"),
        "inner destination of another peer": (underlay_host(1), FRAME + udp(destination=3), "not_for_us"),
        "multicast": (underlay_host(1), FRAME + octets(IP(src=pod(1), dst="224.0.0.5") / UDP()), "multicast"),
        "no I flag": (underlay_host(1), b"\x00" + FRAME[1:] + INNER, "bad_flags"),
        "another VNI": (underlay_host(1), vxlan.header(2, mac(2), mac(1), 0x0800) + INNER, "wrong_vni"),
        "another MAC": (underlay_host(1), vxlan.header(1, mac(3), mac(1), 0x0800) + INNER, "wrong_mac"),
        "broadcast MAC": (underlay_host(1), vxlan.header(1, b"\xff" * 6, mac(1), 0x0806) + INNER, "wrong_mac"),
        "ARP": (underlay_host(1), vxlan.header(1, mac(2), mac(1), 0x0806) + INNER, "not_ip"),
        "ethertype and version disagree": (underlay_host(1), vxlan.header(1, mac(2), mac(1), 0x86DD) + INNER, "not_ip"),
        "empty": (underlay_host(1), b"", "truncated"),
        "header only": (underlay_host(1), FRAME, "truncated"),
        "cut packet": (underlay_host(1), FRAME + INNER[:-1], "truncated"),
        "IHL of 4": (underlay_host(1), FRAME + b"\x44" + INNER[1:], "bad_length"),
    }

    def send(self, source: str, payload: bytes, **options) -> FakeNode:
        network = FakeNetwork()
        node = FakeNode(network, 2, [1, 3], **options)
        network.send(Datagram(source, underlay_host(2), 8472, payload))
        exchange(node)
        assert_adds_up(node)
        return node

    @pytest.mark.parametrize(("source", "payload", "verdict"), CASES.values(), ids=CASES)
    def test_is_refused(self, source, payload, verdict):
        node = self.send(source, payload)
        assert node.device.delivered == []
        assert counts(node.engine.inbound) == {verdict: 1}

    def test_the_vteps_own_overlay_address_may_send(self):
        packet = octets(IP(src="10.1.1.0", dst=pod(2)) / UDP())
        node = self.send(underlay_host(1), self.FRAME + packet)
        assert node.device.delivered == [packet]

    @pytest.mark.parametrize(
        "name", ["unknown outer source", "inner source of another peer", "inner destination of another peer"]
    )
    def test_one_flag_turns_the_source_checks_off(self, name):
        source, payload, _ = self.CASES[name]
        node = self.send(source, payload, check_sources=False)
        assert node.device.delivered == [payload[22:]]

    def test_reserved_bits_are_ignored(self):
        frame = b"\x88\xff\xff\xff" + self.FRAME[4:7] + b"\xff" + self.FRAME[8:]
        assert self.send(underlay_host(1), frame + self.INNER).device.delivered == [self.INNER]

    @pytest.mark.parametrize("padding", [1, 18, 30])
    def test_ethernet_padding_is_cut_off(self, padding):
        for packet in (octets(IP(src=pod(1), dst=pod(2)) / UDP()), self.INNER + b"", udp(payload=b"z" * 900)):
            assert self.send(underlay_host(1), self.FRAME + packet + b"\xa5" * padding).device.delivered == [packet]

    def test_trailing_bytes_are_a_fault_in_the_ip_framing(self):
        node = self.send(underlay_host(1), udp(ttl=9) + b"\0", framing="ip")
        assert counts(node.engine.inbound) == {"bad_length": 1}


def test_a_lease_change_moves_route_and_allow_list_in_one_step():
    network = FakeNetwork()
    a, b = FakeNode(network, 1, [2]), FakeNode(network, 2, [])
    a.device.inject(udp())
    exchange(a, b)
    assert counts(b.engine.inbound) == {"unknown_vtep": 1}
    b.engine.table = table_of(2, [1])
    a.device.inject(udp())
    exchange(a, b)
    assert b.device.delivered == [udp()]
    b.device.inject(udp(2, 1))
    exchange(a, b)
    assert a.device.delivered == [udp(2, 1)]


@pytest.mark.parametrize("verdict", [Verdict.QUEUE_FULL, Verdict.SEND_ERROR])
def test_a_refusing_underlay_drops_counts_and_goes_on(verdict):
    network = FakeNetwork()
    a, b, c = FakeNode(network, 1, [2, 3]), FakeNode(network, 2, [1]), FakeNode(network, 3, [1])
    a.underlay.refuse[underlay_host(2)] = verdict
    for destination in (2, 3, 2, 3):
        a.device.inject(udp(destination=destination))
    exchange(a, b, c)
    assert counts(a.engine.outbound) == {"forwarded": 2, verdict.name.lower(): 2}
    assert len(c.device.delivered) == 2
    assert_adds_up(a, b, c)


def test_a_full_device_drops_counts_and_does_not_spin():
    _, a, b = pair()
    b.device.room = 3
    for _ in range(10):
        a.device.inject(udp())
    exchange(a, b)
    assert len(b.device.delivered) == 3
    assert counts(b.engine.inbound) == {"forwarded": 3, "queue_full": 7}
    assert_adds_up(a, b)


def test_a_wakeup_moves_a_bounded_number_of_packets():
    _, a, _ = pair()
    for _ in range(900):
        a.device.inject(udp())
    a.engine.pump_outbound()  # begins with a single packet
    assert a.engine.outbound.received == 1 + (BATCHES_PER_WAKEUP - 1) * BATCH_CAPACITY
    a.engine.pump_outbound()
    assert a.engine.outbound.received == 1 + (2 * BATCHES_PER_WAKEUP - 1) * BATCH_CAPACITY


def test_flows_differ_in_their_hash_and_fragments_of_one_do_not():
    batch = Batch(4)
    batch.put(udp())
    batch.put(tcp())
    for piece in fragment(IP(udp(payload=b"x" * 1900, id=9)), fragsize=1000):
        batch.put(bytes(piece))
    assert judge_batch(batch, table_of(1, [2])) == 4
    assert batch.flow[2] == batch.flow[3]
    assert len(set(batch.flow)) == 3


@given(st.lists(st.one_of(st.binary(max_size=120), st.just(udp()), st.just(udp(version=6)), st.just(echo(destination=9)))))
def test_whatever_the_device_sends_nothing_raises_and_everything_is_counted(packets):
    for framing in ("vxlan", "ip"):
        _, a, b = pair(framing=framing)
        for packet in packets:
            a.device.inject(packet)
        exchange(a, b)
        assert a.engine.outbound.received == len(packets)
        assert_adds_up(a, b)


def _mutations(base: bytes):
    """`base` with some bytes overwritten, and cut somewhere."""
    edits = st.lists(st.tuples(st.integers(0, len(base) - 1), st.integers(0, 255)), max_size=6)

    def apply(drawn):
        places, cut = drawn
        changed = bytearray(base)
        for at, value in places:
            changed[at] = value
        return bytes(changed[:cut])

    return st.tuples(edits, st.integers(0, len(base))).map(apply)


_FRAMES = [
    vxlan.header(1, mac(2), mac(1), 0x0800) + tcp(),
    vxlan.header(1, mac(2), mac(1), 0x86DD) + udp(version=6),
    tcp(),
    udp(version=6),
]


@given(st.lists(st.one_of(st.binary(max_size=120), *map(_mutations, _FRAMES)), max_size=20), st.booleans())
def test_whatever_the_underlay_brings_nothing_raises_and_everything_is_counted(payloads, check):
    for framing in ("vxlan", "ip"):
        network = FakeNetwork()
        node = FakeNode(network, 2, [1], framing=framing, check_sources=check)
        for index, payload in enumerate(payloads):
            network.send(Datagram(underlay_host(1 + 8 * (index % 2)), underlay_host(2), 8472, payload))
        exchange(node)
        assert node.engine.inbound.received == len(payloads)
        assert_adds_up(node)


class Scripted:
    """A device whose receives bring the given numbers of packets, and which notes how many it was asked for."""

    name, mtu = "scripted0", 1450

    def __init__(self, *found: int) -> None:
        self.found, self.asked = list(found), []

    def receive(self, batch: Batch) -> None:
        self.asked.append(batch.limit)
        here = self.found.pop(0) if self.found else 0
        while here and not batch.is_full:
            batch.put(udp())
            here -= 1
        if here:
            self.found.insert(0, here)


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        ([1, 0], [[1, BATCH_CAPACITY]]),  # one packet goes out before the next read
        ([5, 0], [[1, BATCH_CAPACITY], [BATCH_CAPACITY]]),  # a burst: from now on in batches
        ([0, 3, 0, 2, 1], [[1], [1, BATCH_CAPACITY], [BATCH_CAPACITY], [1, BATCH_CAPACITY]]),
    ],
)
def test_a_quiet_link_is_served_packet_by_packet_and_a_busy_one_in_batches(found, asked):
    network = FakeNetwork()
    node = FakeNode(network, 1, [2])
    device = Scripted(*found)
    engine = Engine(device, network.attach(8472, "192.0.2.9"), node.engine.table)
    for expected in asked:
        device.asked.clear()
        engine.pump_outbound()
        assert device.asked == expected


async def test_a_watcher_is_called_once_a_turn_however_often_it_is_asked_to_watch():
    box, calls = Mailbox(100), []

    def ready() -> None:
        calls.append(box.take())
        box.put(len(calls))  # there is always one more

    for _ in range(5):
        box.watch(ready)
    box.put(0)
    box.put(0)
    for turn in range(1, 6):
        await asyncio.sleep(0)
        assert len(calls) == turn
    box.unwatch()
    await asyncio.sleep(0)
    assert len(calls) == 5


@pytest.mark.parametrize("version", [4, 6])
def test_the_longest_packet_there_is_is_too_big_and_ends_nothing(version):
    with contextlib.closing(open_udp([ip_address("127.0.0.1")], 0)) as underlay:
        device = MemoryDevice(mtu=65535)
        engine = Engine(device, underlay, table_of(1, [2]), now=lambda: 0.0)
        header = 28 if version == 4 else 48
        fields = {"flags": "DF"} if version == 4 else {}
        device.inject(udp(version=version, payload=bytes(65535 - header), **fields))
        engine.pump_outbound()
        assert counts(engine.outbound) == {"too_big": 1}
        assert len(device.delivered) == 1  # the sender is told


class Breakable(MemoryDevice):
    """A device that is lost when it is told to be, and as long as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = self.is_closed = False

    def receive(self, batch: Batch) -> None:
        if self.is_lost:
            raise DeviceLostError("memory0 is gone")
        super().receive(batch)

    def transmit(self, batch: Batch) -> None:
        if self.is_lost:
            raise DeviceLostError("memory0 is gone")
        super().transmit(batch)

    def close(self) -> None:
        self.is_closed = True
        super().close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def breakable_pair() -> tuple[Breakable, Engine, FakeNode, list[Exception]]:
    """An engine on a device that can break, the node that it talks to, and the errors that were told."""
    network = FakeNetwork()
    device, failures = Breakable(), []
    underlay = network.attach(8472, underlay_host(1))
    return device, Engine(device, underlay, table_of(1, [2]), failed=failures.append), FakeNode(network, 2, [1]), failures


@pytest.mark.parametrize("closed_before", [False, True])
@pytest.mark.parametrize("noticed_by", ["outbound", "inbound"])
async def test_a_lost_device_is_replaced_and_the_engine_started_again(noticed_by, closed_before):
    lost, engine, b, failures = breakable_pair()
    engine.start()
    lost.inject(udp())
    await turns()
    exchange(b)
    assert b.device.delivered == [udp()]
    lost.is_lost = True
    if noticed_by == "outbound":
        lost.inject(udp(payload=b"lost with the device"))
    else:
        b.device.inject(udp(2, 1, payload=b"lost with the device"))
        exchange(b)
    await turns()
    assert [str(one) for one in failures] == ["memory0 is gone"]
    b.device.inject(udp(2, 1))
    exchange(b)
    await turns()  # the engine waits, and so does the datagram
    assert len(failures) == 1
    if closed_before:
        lost.close()
    device = Breakable()
    engine.replace_device(device)
    lost.close()
    await turns()
    assert device.delivered == []
    engine.start()
    device.inject(udp(payload=b"goes on"))
    await turns()
    exchange(b)
    assert b.device.delivered == [udp(), udp(payload=b"goes on")]
    assert device.delivered == [udp(2, 1)]
    assert counts(engine.outbound) == {"forwarded": 2}
    assert counts(engine.inbound) == {"forwarded": 1}
    engine.stop()


async def test_a_device_is_replaced_while_the_engine_runs():
    old, engine, b, failures = breakable_pair()
    engine.start()
    new = Breakable()
    engine.replace_device(new)
    old.inject(udp(payload=b"nobody listens"))
    new.inject(udp())
    b.device.inject(udp(2, 1))
    exchange(b)
    await turns()
    exchange(b)
    assert (b.device.delivered, new.delivered, old.delivered, failures) == ([udp()], [udp(2, 1)], [], [])
    assert not old.is_closed
    engine.stop()


async def test_replacing_the_device_of_an_engine_that_does_not_run_starts_nothing():
    _, engine, b, _ = breakable_pair()
    new = Breakable()
    engine.replace_device(new)
    new.inject(udp())
    await turns()
    assert engine.outbound.received == 0
    engine.start()
    await turns()
    exchange(b)
    assert b.device.delivered == [udp()]
    engine.stop()


@pytest.mark.netns
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_tun_that_is_deleted_is_opened_anew(new_loop):
    async def lose(namespace: Namespace, name: str) -> None:
        _, engine, b, failures = breakable_pair()
        old = open_tun(name, 1450)
        engine.replace_device(old)
        namespace.ip(f"link set {name} up", f"addr add 10.1.1.0/32 dev {name}", f"route add 10.1.0.0/16 dev {name}")
        engine.start()
        namespace.ip(f"link del {name}")
        for _ in range(500):
            if failures:
                break
            await asyncio.sleep(0.01)
        assert [type(one) for one in failures] == [DeviceLostError]
        old.close()
        new = open_tun(name, 1450)
        engine.replace_device(new)
        namespace.ip(f"link set {name} up", f"addr add 10.1.1.0/32 dev {name}", f"route add 10.1.0.0/16 dev {name}")
        engine.start()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"again", ("10.1.2.5", 9))
        for _ in range(500):
            exchange(b)
            if b.device.delivered:
                break
            await asyncio.sleep(0.01)
        assert [one[28:] for one in b.device.delivered] == [b"again"]
        engine.stop()
        new.close()

    with Lab("eng") as lab:
        namespace = Namespace(lab, lab.new_namespace("a"))
        with inside(namespace.name), asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(lose(namespace, "lost0"))
