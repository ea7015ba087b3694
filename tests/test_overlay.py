"""Overlay networks in memory: what a test can say to one, and that the same seed says the same again."""

import asyncio
import gc
import subprocess
import typing
from collections.abc import Awaitable
from ipaddress import IPv4Address, IPv4Network, ip_address

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from dataplane.overlay import Burst, LinkSpec, Overlay, StalledError, VirtualLoop, inner
from dataplane.underlay.fake import Datagram, FakeNetwork, Fate
from dataplane.underlay.link import LinkCounts
from encap.checksum import pseudo_sum
from encap.fields import store16
from routing.allocator import NoFreeSubnetError


@pytest.fixture
def three():
    with Overlay() as made:
        yield made, *made.add_nodes(3)


# Reaching each other


@pytest.mark.parametrize("framing", ["vxlan", "ip"])
@pytest.mark.parametrize("underlay", ["ipv4", "ipv6", "both"])
@pytest.mark.parametrize(
    "networks",
    [{}, {"network": None, "ipv6_network": "fd00::/48"}, {"ipv6_network": "fd00::/48"}],
    ids=["v4", "v6", "dual"],
)
def test_every_node_reaches_every_other(framing, underlay, networks):
    with Overlay(framing=framing, underlay=underlay, **networks) as overlay:
        nodes = overlay.add_nodes(3)
        assert overlay.pings_all() == 6
        for node in nodes:
            assert node.verdicts == {"outbound": {"forwarded": 4}, "inbound": {"forwarded": 4}}
            assert {len(packet) for packet in node.received} == {len(nodes[0].received[0])}


def test_packets_cross_unchanged_as_bytes_or_as_scapy_makes_them(three):
    overlay, a, b, c = three
    packet = IP(src=str(a.pod()), dst=str(b.pod(3))) / UDP(sport=1, dport=2) / Raw(b"payload")
    a.send(packet)
    b.send(bytes(IP(src=str(b.pod()), dst=str(c.pod())) / ICMP(type=13) / Raw(b"12345678")))
    overlay.settle()
    assert b.take() == [bytes(packet)]
    assert b.received == []
    assert [IP(one)[ICMP].type for one in c.received] == [13]


def test_what_crosses_the_underlay_can_be_looked_at(three):
    overlay, a, b, _ = three
    assert a.pings(b)
    request, reply = overlay.underlay.crossed
    assert (request.source, request.destination, request.port) == (a.addresses[0], b.addresses[0], 8472)
    assert request.payload[:8] == bytes([8, 0, 0, 0, 0, 0, 1, 0])
    assert IP(request.payload[22:])[ICMP].type == 8
    assert IP(reply.payload[22:])[ICMP].type == 0
    assert request.arrivals == (request.sent_at,)


def test_nobody_answers_where_nobody_lives(three):
    overlay, a, b, _ = three
    b.host.answers_pings = False
    assert not a.pings(b)
    assert not a.pings(IPv4Address("10.77.0.1"))
    assert a.verdicts["outbound"] == {"forwarded": 1, "no_route": 1}
    assert [(error.type, error.code, error.mtu) for error in a.host.errors] == [(3, 0, 0)]
    overlay.add_leases(1)
    assert not a.pings(IPv4Address("10.0.4.10"))  # a lease, and no node behind it
    assert a.verdicts["outbound"]["forwarded"] == 2


def test_udp_sockets(three):
    overlay, a, b, _ = three
    one, other = a.open_udp(7000), b.open_udp(7001, b.pod(5))
    one.send_to(b"hello", other)
    one.send_to(b"again", (b.pod(5), 7001))
    one.send_to(b"nobody", (b.pod(5), 7002))
    overlay.settle()
    assert other.take() == [(b"hello", (a.pod(), 7000)), (b"again", (a.pod(), 7000))]
    assert other.take() == []
    with pytest.raises(ValueError, match=r"UDP port 7000 of 10\.0\.1\.10 is open already"):
        a.open_udp(7000)
    one.close()
    a.open_udp(7000).close()
    with pytest.raises(ValueError, match="MTU is 1450"):
        one.send_to(b"x" * 1423, other)

    async def answered() -> bytes:
        other.send_to(b"x" * 1422, one)
        waiting = asyncio.ensure_future(other.receive())
        one.send_to(b"late", other)
        return (await waiting)[0]

    assert overlay.run(answered()) == b"late"


def test_a_socket_is_a_context_manager_and_need_not_wait_for_ever(three):
    overlay, a, b, _ = three
    with a.open_udp(7000) as one, b.open_udp(7001) as other:
        with pytest.raises(TimeoutError):
            overlay.run(other.receive(timeout=3))
        assert overlay.now == pytest.approx(3)
        one.send_to(b"hello", other)
        assert overlay.run(other.receive(timeout=3)) == (b"hello", (a.pod(), 7000))
    a.open_udp(7000)


def test_the_pods_of_a_node_end_with_its_subnet():
    with Overlay(network="10.5.0.0/16", ipv6_network="fd00::/48", ipv6_subnet_length=123) as overlay:
        a = overlay.add_node()
        assert a.pod(244) == IPv4Address("10.5.1.254")  # 255 is the broadcast address
        assert a.pings(a.pod(244)) is False  # nothing goes out: pods of one node have a bridge for that
        assert str(a.pod(21, version=6)).endswith("3f")
        for number, version, message in (
            (245, 4, r"node1 has no pod 245 in 10\.5\.1\.0/24: its pods are 0 to 244"),
            (-1, 4, "no pod -1"),
            (22, 6, "no pod 22 in .*/123: its pods are 0 to 21"),
        ):
            with pytest.raises(ValueError, match=message):
                a.pod(number, version)
    with Overlay(network="10.5.0.0/16", subnet_length=30) as overlay, pytest.raises(ValueError, match="too small for any"):
        overlay.add_node().pod()


# Checksums


def damaged(packet, at: int) -> bytes:
    """With one bit flipped."""
    whole = bytearray(bytes(packet))
    whole[at] ^= 0x10
    return bytes(whole)


@pytest.fixture
def dual():
    with Overlay(ipv6_network="fd00::/48") as overlay:
        yield overlay, *overlay.add_nodes(2)


@pytest.mark.parametrize("payload", [b"", b"odd", b"even"])
@pytest.mark.parametrize("layer", [IP, IPv6])
def test_a_datagram_with_a_wrong_checksum_is_counted_and_reaches_no_socket(dual, layer, payload):
    overlay, a, b = dual
    version = 4 if layer is IP else 6
    socket = b.open_udp(2, b.pod(version=version))
    packet = layer(src=str(a.pod(version=version)), dst=str(b.pod(version=version))) / UDP(sport=1, dport=2) / Raw(payload)
    a.send(packet)
    a.send(damaged(packet, len(packet) - 1))
    overlay.settle()
    assert [data for data, _ in socket.take()] == [payload]
    assert b.host.bad_checksums == 1
    assert len(b.received) == 2  # what the device delivered
    assert "    dropped by the host, for a wrong checksum: 1\n" in overlay.report() + "\n"


def test_over_ipv4_a_datagram_may_have_no_checksum_and_over_ipv6_it_may_not(dual):
    overlay, a, b = dual
    for layer, version in ((IP, 4), (IPv6, 6)):
        b.open_udp(2, b.pod(version=version))
        header = layer(src=str(a.pod(version=version)), dst=str(b.pod(version=version)))
        a.send(header / UDP(sport=1, dport=2, chksum=0) / Raw(b"x"))
    overlay.settle()
    assert [len(socket.take()) for socket in b.host._sockets.values()] == [1, 0]
    assert b.host.bad_checksums == 1


def test_a_checksum_that_was_left_for_hardware_is_wrong():
    a, b = IPv4Address("10.0.1.10"), IPv4Address("10.0.2.10")
    packet = bytearray(inner.udp(a, 1, b, 2, b"payload"))
    store16(packet, 26, pseudo_sum(packet, 12, 8, 17, 15))
    with pytest.raises(inner.BadChecksumError):
        inner.parse(bytes(packet))


def test_zeros_are_no_checksum():
    with pytest.raises(inner.BadChecksumError, match="of ICMP"):
        inner.parse(bytes(IP(src="10.0.1.10", dst="10.0.2.10", proto=1) / Raw(bytes(8))))


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("version", [4, 6])
def test_what_hosts_send_has_right_checksums(version, length):
    layer, a, b = (IP, "10.0.1.10", "10.0.2.10") if version == 4 else (IPv6, "fd00::1", "fd00::2")
    sent = inner.udp(ip_address(a), 1, ip_address(b), 2, b"x" * length)
    header = layer(src=a, dst=b, **({"id": 0, "flags": "DF"} if version == 4 else {}))
    assert sent == bytes(header / UDP(sport=1, dport=2) / Raw(b"x" * length))
    for packet in (sent, inner.echo(ip_address(a), ip_address(b), 1, 1, b"x" * length)):
        assert inner.parse(packet).source == ip_address(a)


def test_udp_is_as_long_as_it_says():
    packet = IP(src="10.0.1.10", dst="10.0.2.10") / UDP(sport=1, dport=2, len=10) / Raw(b"ab")
    trailing = IP(src="10.0.1.10", dst="10.0.2.10", proto=17) / Raw(bytes(packet)[20:] + b"cd")
    assert inner.parse(bytes(trailing)).body[8:] == b"ab"
    for length in (7, 99):
        assert inner.parse(bytes(IP(src="10.0.1.10", dst="10.0.2.10") / UDP(sport=1, dport=2, len=length))) is None


@pytest.mark.parametrize("version", [4, 6])
def test_a_damaged_ping_is_not_answered(dual, version):
    overlay, a, b = dual
    ping = inner.echo(a.pod(version=version), b.pod(version=version), 1, 1, b"payload")
    a.send(damaged(ping, -1))
    a.send(ping)
    overlay.settle()
    assert b.host.bad_checksums == 1
    assert a.host.replies == 1


def test_a_damaged_ipv4_header_is_found_whatever_is_in_it(dual):
    _, a, b = dual
    for content in (UDP(sport=1, dport=2), ICMP(), Raw(b"12345678")):
        packet = IP(src=str(a.pod()), dst=str(b.pod()), proto=99 if isinstance(content, Raw) else None) / content
        with pytest.raises(inner.BadChecksumError, match="IPv4 header"):
            inner.parse(damaged(packet, 1))
        inner.parse(bytes(packet))


def test_a_link_that_corrupts_loses_datagrams_as_behind_a_kernel():
    with Overlay(seed=2, link="corrupt=100%") as overlay:
        a, b = overlay.add_nodes(2)
        socket = b.open_udp(2)
        sender = a.open_udp(1)
        for _ in range(300):
            sender.send_to(b"x" * 1000, socket)
            overlay.settle()
        arrived = socket.take()
        assert {data for data, _ in arrived} <= {b"x" * 1000}  # hit in the outer headers' parts that nobody reads
        assert b.host.bad_checksums > 250


# Nodes and leases


def test_nodes_get_subnets_one_after_the_other_or_as_asked():
    with Overlay(network="10.5.0.0/16") as overlay:
        first = overlay.add_node()
        named = overlay.add_node("gateway", subnet="10.5.77.0/24")
        assert [str(node.lease.subnet) for node in (first, named)] == ["10.5.1.0/24", "10.5.77.0/24"]
        assert overlay.node("gateway") is named
        with pytest.raises(KeyError, match="there are node1, gateway"):
            overlay.node("nobody")
        with pytest.raises(ValueError, match=r"10\.5\.77\.0/24 is taken"):
            overlay.add_node(subnet="10.5.77.0/24")
        with pytest.raises(ValueError, match="no subnet of this overlay"):
            overlay.add_node(subnet="10.6.0.0/24")
        with pytest.raises(ValueError, match="has no IPv6 subnet"):
            first.pod(version=6)
        assert first.pings(named)


def test_a_full_network_has_no_room_for_more():
    with Overlay(network="10.5.0.0/28", subnet_length=30) as overlay:
        overlay.add_node()
        with pytest.raises(NoFreeSubnetError):
            overlay.add_nodes(9)


def test_a_lease_that_is_not_renewed_ends_and_the_others_forget_the_node():
    with Overlay(lease_seconds=3600) as overlay:
        a, b = overlay.add_nodes(2)
        assert a.pings(b)
        overlay.run(10_000)  # renewed again and again
        assert a.pings(b)
        b.stop()
        assert not a.pings(b)
        assert a.verdicts["outbound"] == {"forwarded": 3}
        overlay.run(3600)
        assert not a.pings(b)
        assert a.verdicts["outbound"] == {"forwarded": 3, "no_route": 1}
        assert [lease.key for lease in overlay.book.leases()] == [a.lease.key]


def test_a_node_that_leaves_is_forgotten_at_once(three):
    _, a, b, c = three
    b.leave()
    assert not a.pings(b)
    assert a.verdicts["outbound"] == {"no_route": 1}
    assert a.pings(c)


def test_without_its_store_a_node_goes_on_with_what_it_knows_until_its_lease_ends():
    with Overlay(lease_seconds=3600) as overlay:
        a, b = overlay.add_nodes(2)
        overlay.settle()
        a.lose_store()
        c = overlay.add_node()
        assert a.pings(b)
        assert not a.pings(c)
        a.find_store()
        assert a.pings(c)
        a.lose_store()
        overlay.run(3601)
        assert not b.pings(a)
        assert b.verdicts["outbound"].get("no_route") == 1
        a.find_store()
        overlay.run(10)
        assert not a.is_running
        assert "is gone from the store" in a.failure
        assert a.failure in overlay.report()


def test_a_name_that_was_freed_can_be_taken_again(three):
    overlay, a, b, _ = three
    b.leave()
    again = overlay.add_node(subnet=str(b.lease.subnet))
    assert a.pings(again)
    assert again.received


def test_a_name_belongs_to_one_node_that_runs(three):
    overlay, a, b, _ = three
    with pytest.raises(ValueError, match="there is a node 'node2' already, and it runs"):
        overlay.add_node("node2")
    assert len(overlay.nodes) == 3
    b.leave()
    assert overlay.node("node2") is b
    again = overlay.add_node("node2")
    assert overlay.node("node2") is again
    with pytest.raises(ValueError, match="already, and it runs"):
        b.start()
    again.stop()
    b.start()
    assert overlay.node("node2") is b
    assert a.pings(b)


def test_a_default_name_is_one_that_nobody_has():
    with Overlay() as overlay:
        taken = overlay.add_node("node2")
        assert [node.name for node in overlay.add_nodes(2)] == ["node3", "node4"]
        assert overlay.node("node2") is taken


def test_a_stopped_node_starts_again_with_its_subnet_and_nothing_of_what_was_sent_meanwhile():
    with Overlay(lease_seconds=3600) as overlay:
        a, b, c = overlay.add_nodes(3)
        socket = b.open_udp(7)
        assert a.pings(b)
        before = b.lease
        overlay.run(1000)
        b.stop()
        b.send_echo(a)
        assert not a.pings(b)
        b.start()
        assert b.is_running
        assert (b.lease.subnet, b.lease.expiration) == (before.subnet, overlay.now + 3600)
        assert a.pings(b)
        assert b.pings(c)
        assert b.verdicts == {"outbound": {"forwarded": 2}, "inbound": {"forwarded": 2}}  # as of a new process
        a.open_udp(7).send_to(b"hello", socket)
        overlay.settle()
        assert [data for data, _ in socket.take()] == [b"hello"]  # pods live on

        b.stop()
        overlay.run(3601)
        assert not a.pings(b)
        b.start()
        assert b.lease.subnet == before.subnet  # nobody has taken it
        overlay.run(10_000)  # renewed again
        assert a.pings(b)
        b.start()  # runs already


def test_a_node_that_starts_again_takes_another_subnet_if_its_own_is_gone():
    with Overlay(lease_seconds=60) as overlay:
        a, b = overlay.add_nodes(2)
        b.leave()
        overlay.add_node(subnet=str(b.lease.subnet))
        b.start()
        overlay.settle()
        assert b.lease.subnet not in {node.lease.subnet for node in overlay.nodes if node is not b}
        assert a.pings(b)
        b.lose_store()
        overlay.run(100)
        b.find_store()
        overlay.run(6)
        assert "gone from the store" in b.failure
        b.start()
        assert b.failure is None
        assert a.pings(b)
        b.stop()
        b.lose_store()
        with pytest.raises(RuntimeError, match="cannot start without its store"):
            b.start()


@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_a_node_behind_a_nat_that_publishes_its_outside_address_is_reached_and_reaches(framing):
    with Overlay(framing=framing, underlay="both") as overlay:
        a = overlay.add_node()
        b = overlay.add_node("hidden", public_ip="203.0.113.7", public_ipv6="2001:db8:ffff::7")
        c = overlay.add_node(public_ip="203.0.113.8")
        assert b.addresses == ["198.18.0.2", "2001:db8::2"]
        assert str(b.lease.attributes.public_ip) == "203.0.113.7"
        assert overlay.pings_all() == 6
        assert {one.destination for one in overlay.underlay.crossed} == {"198.18.0.1", "203.0.113.7", "203.0.113.8"}
        assert {node.verdicts["inbound"]["forwarded"] for node in (a, b, c)} == {4}
        assert "hidden: 10.0.2.0-24 at 198.18.0.2, 2001:db8::2 (outside 203.0.113.7, 2001:db8:ffff::7)" in overlay.report()
        overlay.partition(a, b)
        assert not a.pings(b)
        overlay.heal()
        overlay.impair(a, b, delay="10ms")
        assert overlay.run(a.ping(b)) == pytest.approx(0.020)
        assert overlay.counts(a, b).sent == 3  # a partition stopped one before
        b.stop()
        b.start()
        assert b.pings(a)
        assert b.pings(c)


def test_an_outside_address_belongs_to_one_node():
    with Overlay() as overlay:
        a = overlay.add_node(public_ip="198.18.0.2")  # where the second node would be
        b = overlay.add_node()
        assert b.addresses == ["198.18.0.3"]
        assert a.pings(b)
        for taken in ("198.18.0.1", "198.18.0.2", "198.18.0.3"):
            with pytest.raises(ValueError, match="is the address of another node"):
                overlay.add_node(public_ip=taken)
        with pytest.raises(ValueError, match="has no IPv6"):
            overlay.add_node(public_ipv6="2001:db8:1::1")
        with pytest.raises(ValueError, match="nowhere"):
            overlay.add_node(public_ip="nowhere")
        assert len(overlay.nodes) == 2


def test_a_node_whose_lease_is_gone_ends_when_it_hears_of_it(three):
    overlay, a, b, _ = three
    overlay.book.release(a.lease)
    overlay.settle()
    assert not a.is_running
    assert "10.0.1.0-24 is gone" in a.failure
    assert not b.pings(a)
    assert b.verdicts["outbound"] == {"no_route": 1}


def test_a_node_whose_engine_fails_ends_and_says_why(three, monkeypatch):
    overlay, a, b, _ = three

    def broken(packet: bytes) -> None:
        raise OSError("the host is on fire")

    monkeypatch.setattr(b.host, "deliver", broken)
    assert not a.pings(b)
    assert (b.is_running, b.failure) == (False, "the host is on fire")
    assert "the host is on fire" in overlay.report()


# The underlay


def test_loss_in_one_direction():
    with Overlay(seed=3) as overlay:
        a, b = overlay.add_nodes(2)
        overlay.impair(a, b, loss=1.0, both=False)
        assert not a.pings(b)
        assert not b.pings(a)  # the reply is lost
        assert [len(node.received) for node in (a, b)] == [1, 0]
        assert overlay.counts(a, b).lost == 2
        overlay.impair(a, b)
        assert a.pings(b)


def test_loss_is_as_often_as_it_is_said():
    with Overlay(seed=5, link="loss=30%") as overlay:
        a, b = overlay.add_nodes(2)
        socket = b.open_udp(9)
        overlay.settle()
        for _ in range(20):
            sender = a.open_udp(8)
            for _ in range(100):
                sender.send_to(b"x", socket)
            sender.close()
            overlay.settle()
        arrived = len(socket.take())
        assert abs(arrived - 1400) < 3 * (2000 * 0.3 * 0.7) ** 0.5
        assert overlay.counts(a, b).lost == 2000 - arrived


def test_links_count_from_the_beginning_and_on_through_every_change():
    with Overlay() as overlay:
        a, b = overlay.add_nodes(2)
        assert overlay.counts(a, b) == LinkCounts()
        assert a.pings(b)
        assert overlay.counts(a, b) == LinkCounts(sent=1, delivered=1)
        overlay.impair(delay="1ms")
        assert overlay.counts(a, b).sent == 1
        overlay.impair()
        assert a.pings(b)
        overlay.impair(a, b, loss=1.0)
        assert not a.pings(b)
        overlay.impair(a, b)
        assert a.pings(b)
        assert overlay.counts(a, b) == LinkCounts(sent=4, delivered=3, lost=1)
        assert overlay.counts(b, a) == LinkCounts(sent=3, delivered=3)
        overlay.counts(a, b).sent = 99  # a copy
        assert overlay.counts(a, b).sent == 4


def test_counts_are_of_both_families():
    with Overlay(underlay="both") as overlay:
        a, b = overlay.add_nodes(2)
        for source, destination in zip(a.addresses, b.addresses, strict=True):
            overlay.underlay.send(Datagram(source, destination, 1, b"x"))
        overlay.impair(a, b, loss=1.0)
        for source, destination in zip(a.addresses, b.addresses, strict=True):
            overlay.underlay.send(Datagram(source, destination, 1, b"x"))
        assert overlay.counts(a, b) == LinkCounts(sent=4, delivered=2, lost=2)


def test_every_datagram_tells_what_became_of_it():
    with Overlay() as overlay:
        a, b = overlay.add_nodes(2)
        overlay.settle()

        def fates(count: int = 1) -> list[str]:
            for _ in range(count):
                a.send_echo(b)
            before = overlay.underlay.sent
            overlay.run(0)
            overlay.run(0)
            sent = overlay.underlay.sent - before
            return [one.fate for one in list(overlay.underlay.crossed)[-sent:]]

        b.host.answers_pings = False
        assert fates() == ["arrived"]
        overlay.impair(a, b, loss=1.0)
        assert fates() == ["lost"]
        overlay.impair(a, b, mtu=68, oversize="drop")
        assert fates() == ["oversize"]
        overlay.impair(a, b, rate="1kbit", queue=0)
        assert fates(2) == ["on its way", "queue full"]
        overlay.settle()
        overlay.impair(a, b)
        overlay.partition(a, b)
        assert fates() == ["partition"]
        overlay.heal()
        overlay.impair(a, b, delay=1.0)
        assert fates() == [Fate.ON_ITS_WAY]
        b.stop()
        overlay.settle()
        assert [one.fate for one in overlay.underlay.crossed][-1] == "nobody there"
        report = overlay.report()
        assert "1 stopped by partitions, 1 lost, 1 stopped by a full queue, 1 longer than the link's MTU" in report
        assert "1 to an address that nobody has\n" in report


def test_the_luckier_copy_of_a_duplicated_datagram_counts():
    network = FakeNetwork(link=LinkSpec(duplicate=1.0))
    receiver = network.attach(9, "192.0.2.2")
    for _ in range(4095):
        receiver.queue.put(Datagram("", "", 9, b""))
    network.send(Datagram("192.0.2.1", "192.0.2.2", 9, b"one"))
    network.send(Datagram("192.0.2.1", "192.0.2.2", 9, b"other"))
    assert [one.fate for one in network.crossed] == [Fate.ARRIVED, Fate.RECEIVE_QUEUE_FULL]
    assert network.queue_full == 3


async def test_a_network_on_a_loop_that_runs_is_awaited(recwarn):
    network = FakeNetwork(link=LinkSpec(delay=0.001))
    network.send(Datagram("192.0.2.1", "192.0.2.2", 9, b"one"))
    for drive in (network.settle, lambda: network.run(1)):
        with pytest.raises(RuntimeError, match=r"await asyncio\.sleep instead"):
            drive()
    gc.collect()
    assert not list(recwarn)
    network.close()


def test_a_datagram_that_is_sent_twice_is_two():
    network = FakeNetwork()
    one = Datagram("192.0.2.1", "192.0.2.2", 9, b"one")
    network.send(one)
    network.attach(9, "192.0.2.2")
    network.send(one)
    assert [sent.fate for sent in network.crossed] == ["nobody there", "arrived"]
    assert network.nobody_there == 1
    assert one == Datagram("192.0.2.1", "192.0.2.2", 9, b"one")


def test_what_a_full_queue_refused_is_in_the_report(three):
    overlay, a, b, c = three
    overlay.settle()
    for _ in range(1003):
        a.send_echo(b)
    b.engine.stop()  # nothing is taken from its queue any more
    for _ in range(5):
        overlay.settle()
        for _ in range(900):
            c.send_echo(b)
    overlay.settle()
    text = overlay.report()
    assert "    dropped by the host's device, its queue being full: 3\n" in text
    refused = 1000 + 4500 - 4096
    assert f"    dropped by the node's underlay, its queue being full: {refused}\n" in text
    assert f", {refused} refused by a full receive queue\n" in text


def test_delay_is_what_a_ping_takes(three):
    overlay, a, b, c = three
    overlay.impair(delay="20ms")
    overlay.impair(a, b, delay="50ms", both=False)
    assert overlay.run(a.ping(b)) == pytest.approx(0.070)
    assert overlay.run(b.ping(a)) == pytest.approx(0.070)
    assert overlay.run(a.ping(c)) == pytest.approx(0.040)
    assert overlay.run(a.ping(c, timeout=0.030)) is None


def test_a_partition_and_its_end(three):
    overlay, a, b, c = three
    overlay.partition([a, b], c)
    assert (a.pings(b), a.pings(c), c.pings(b)) == (True, False, False)
    assert overlay.underlay.cut_off == 2
    overlay.partition(a, b)
    assert (a.pings(b), a.pings(c), c.pings(b)) == (False, True, True)
    overlay.heal()
    assert overlay.pings_all() == 6


def test_a_link_changes_in_mid_test_and_nothing_overtakes_what_is_on_its_way(three):
    overlay, a, b, c = three
    overlay.impair(delay=5.0)
    sender, receiver = a.open_udp(1), b.open_udp(2)
    sender.send_to(b"slow", receiver)
    overlay.run(1)
    overlay.impair()
    sender.send_to(b"soon after", receiver)
    assert overlay.run(a.ping(c)) == 0  # nothing was on its way there
    assert receiver.take() == []
    assert overlay.underlay.in_flight == 2
    overlay.settle()
    assert [data for data, _ in receiver.take()] == [b"slow", b"soon after"]
    assert overlay.now == pytest.approx(5.0)
    sender.send_to(b"now", receiver)
    overlay.settle()
    assert overlay.now == pytest.approx(5.0)
    assert overlay.counts(a, b).delivered == 3


def test_to_impair_all_links_is_to_impair_all(three):
    overlay, a, b, c = three
    overlay.impair(a, b, loss=1.0)
    assert not a.pings(b)
    overlay.impair()
    assert a.pings(b)
    overlay.impair(a, b, delay="1ms")
    overlay.impair(delay="2ms")
    assert overlay.run(a.ping(b)) == overlay.run(a.ping(c)) == pytest.approx(0.004)


def test_a_host_behind_a_nat_is_known_by_its_outside_address(three):
    overlay, a, b, _ = three
    overlay.settle()
    overlay.underlay.translate(a.addresses[0], "198.19.0.1")
    assert not a.pings(b)
    assert overlay.underlay.crossed[-1].source == "198.19.0.1"
    assert b.verdicts["inbound"] == {"unknown_vtep": 1}
    assert not b.pings(a)  # its own address is not reached from outside
    assert a.verdicts["inbound"] == {}


def test_a_known_path_mtu_is_told_to_the_sender_and_a_black_hole_is_silent(three):
    overlay, a, b, c = three
    overlay.impair(a, b, mtu=1400)
    overlay.impair(a, c, mtu=1400, oversize="drop")
    big = Raw(b"x" * 1372)
    a.send(IP(src=str(a.pod()), dst=str(b.pod()), flags="DF") / UDP(sport=1, dport=2) / big)
    a.send(IP(src=str(a.pod()), dst=str(c.pod()), flags="DF") / UDP(sport=1, dport=2) / big)
    overlay.settle()
    assert [(error.type, error.code, error.mtu) for error in a.host.errors] == [(3, 4, 1350)]
    assert a.verdicts["outbound"] == {"forwarded": 1, "too_big": 1}
    assert (b.received, c.received) == ([], [])
    assert overlay.counts(a, c).oversize == 1


def test_a_path_that_fragments_carries_what_is_too_big(three):
    overlay, a, b, _ = three
    overlay.impair(a, b, mtu=1400, oversize="fragment")
    a.send(IP(src=str(a.pod()), dst=str(b.pod()), flags="DF") / UDP(sport=1, dport=2) / Raw(b"x" * 1372))
    overlay.settle()
    assert [len(packet) for packet in b.received] == [1400]
    assert overlay.counts(a, b).fragmented == 1


@pytest.mark.parametrize(
    "impairment",
    [
        {"loss": 0.3},
        {"burst": Burst(0.1, 0.4), "duplicate": 0.2},
        {"delay": 0.01, "jitter": 0.005, "reorder": 0.2, "corrupt": 0.3},
        {"rate": "1mbit", "queue": 5},
    ],
    ids=["loss", "burst", "reorder", "rate"],
)
def test_the_same_seed_gives_the_same_bytes_at_the_same_instants(impairment):
    def story(seed: int) -> list:
        with Overlay(seed=seed) as overlay:
            nodes = overlay.add_nodes(3)
            overlay.impair(**impairment)
            sockets = [node.open_udp(5) for node in nodes]
            for i in range(60):
                sockets[i % 3].send_to(bytes([i]) * 50, sockets[(i + 1) % 3])
                overlay.run(0.001)
            overlay.settle()
            return [*overlay.underlay.crossed, *(node.received for node in nodes)]

    assert story(1) == story(1)
    assert story(1) != story(2) or "rate" in impairment  # a queue draws nothing


# Time, loops, and mistakes


async def test_it_keeps_the_time_of_the_loop_that_it_is_made_in():
    async with Overlay() as overlay:
        assert overlay.loop is asyncio.get_running_loop()
        a, b = overlay.add_nodes(2)
        overlay.impair(delay=0.01)
        assert 0.02 <= await a.ping(b) < 1
        a.send(IP(src=str(a.pod()), dst=str(b.pod())) / UDP(sport=1, dport=2))
        await overlay.settled()
        assert len(b.received) == 2
        with pytest.raises(RuntimeError, match=r"await settled\(\) instead"):
            overlay.settle()
        with pytest.raises(RuntimeError, match="runs already"):
            overlay.pings_all()


async def test_pings_in_a_loop_leaves_no_coroutine_behind(recwarn):
    async with Overlay() as overlay:
        a, b = overlay.add_nodes(2)
        with pytest.raises(RuntimeError, match=r"await ping\(\) instead"):
            a.pings(b)
        with pytest.raises(RuntimeError, match="runs already"):
            overlay.run(a.ping(b))
        gc.collect()
        assert not list(recwarn)


def test_waiting_for_a_datagram_that_nobody_sends_is_told_and_ends():
    with Overlay(lease_seconds=100) as overlay:
        a, b = overlay.add_nodes(2)
        sender, receiver = a.open_udp(1), b.open_udp(2)
        with pytest.raises(StalledError, match="is something awaited that nobody sends"):
            overlay.run(receiver.receive())
        assert overlay.now == 0
        sender.send_to(b"late", receiver)
        overlay.settle()
        assert receiver.take()  # nobody waits for it any more
        a.lose_store()
        overlay.run(51)  # and is now tried again every five seconds
        with pytest.raises(StalledError):
            overlay.run(receiver.receive())
        overlay.impair(delay=30)  # what is on its way is worth waiting for
        sender.send_to(b"slow", receiver)
        assert overlay.run(receiver.receive())[0] == b"slow"
        assert overlay.now == pytest.approx(81)
        assert b.lease.expiration == pytest.approx(150)  # renewed meanwhile
        overlay.run(40)
        assert [lease.key for lease in overlay.book.leases()] == [b.lease.key]


def test_time_that_passes_may_be_text():
    with Overlay() as overlay:
        overlay.run("10ms")
        overlay.run("1.5s")
        assert overlay.now == pytest.approx(1.51)
        for wrong, message in (
            ("10 parsecs", "'10 parsecs' is not a time like 10ms"),
            (-1, "0 or more, not -1"),
            (float("nan"), "not nan"),
        ):
            with pytest.raises(ValueError, match=message):
                overlay.run(wrong)
        with pytest.raises(TypeError, match="run takes seconds, a time like '20ms', or something to await, not None"):
            overlay.run(None)


def test_the_type_of_what_run_returns_is_that_of_the_coroutine():
    results = [typing.get_type_hints(one) for one in typing.get_overloads(Overlay.run)]
    assert [one["return"] for one in results] == [type(None), results[1]["what"].__args__[0]]
    assert results[1]["what"].__origin__ is Awaitable


async def fail(text: str) -> None:
    raise LookupError(text)


def test_what_a_task_raises_and_nobody_asks_for_is_raised_in_the_end():
    overlay = Overlay()
    kept = overlay.loop.create_task(fail("kept"))
    overlay.run(1)
    with pytest.raises(LookupError, match="kept"):
        overlay.close()
    assert kept.done()
    assert overlay.loop.is_closed()
    overlay.close()


def test_so_is_what_callbacks_and_forgotten_tasks_raise():
    async def resist() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise OSError("in the end")

    overlay = Overlay()
    overlay.loop.create_task(fail("forgotten"))
    overlay.loop.call_later(1, lambda: 1 // 0)
    overlay.loop.create_task(resist())
    overlay.run(2)
    gc.collect()
    with pytest.raises(ExceptionGroup) as caught:
        overlay.close()
    assert {repr(error) for error in caught.value.exceptions} == {
        "LookupError('forgotten')", "ZeroDivisionError('integer division or modulo by zero')", "OSError('in the end')",
    }  # fmt: skip


def test_it_does_not_hide_what_the_test_raised():
    def story() -> None:
        with Overlay() as overlay:
            kept.append(overlay.loop.create_task(fail("kept")))
            overlay.run(1)
            raise KeyError("the test's own")

    kept = []
    with pytest.raises(KeyError) as caught:
        story()
    (note,) = caught.value.__notes__
    assert note == "besides, on the overlay's loop there was LookupError('kept'), and nobody asked for it"


def test_what_somebody_has_asked_for_is_not_raised_again():
    with Overlay() as overlay:
        kept = overlay.loop.create_task(fail("kept"))
        overlay.run(1)
        assert isinstance(kept.exception(), LookupError)
        with pytest.raises(LookupError):
            overlay.run(fail("run"))


async def test_a_coroutine_on_another_loop_is_told_so():
    loop = VirtualLoop()
    with Overlay(loop=loop) as overlay:
        a, b = overlay.add_nodes(2)
        with pytest.raises(RuntimeError, match="event loop of its own"):
            await a.ping(b)
        with pytest.raises(RuntimeError, match="event loop of its own"):
            await overlay.settled()
        overlay.loop = asyncio.get_running_loop()  # closing would run the other one
    loop.close()


def test_real_time_can_be_asked_for():
    loop = asyncio.new_event_loop()
    with Overlay(loop=loop, link="delay=5ms") as overlay:
        a, b = overlay.add_nodes(2)
        assert overlay.run(a.ping(b)) >= 0.010
    assert not loop.is_closed()
    loop.close()


def test_tasks_that_a_test_leaves_behind_are_ended():
    with Overlay() as overlay:
        (a,) = overlay.add_nodes(1)
        receiver = a.open_udp(1)

        async def leave() -> asyncio.Task:
            return asyncio.create_task(receiver.receive())

        task = overlay.run(leave())
    assert task.cancelled()
    overlay.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framing": "gre"}, "framing 'gre' is none of vxlan, ip"),
        ({"underlay": "ipx"}, "underlay 'ipx' is none of ipv4, ipv6, both"),
        ({"link": "loss=2"}, "loss"),
        ({"network": "10.0.0.0/31"}, "10.0.0.0/31"),
        ({"lease_seconds": 0}, "longer than 0 s, not 0"),
        ({"lease_seconds": float("nan")}, "not nan"),
        ({"mtu": 70_000}, r"MTU of 70000 will not do: it must lie in 626\.\.65535"),
        ({"mtu": 1300, "ipv6_network": "fd00::/48"}, "must lie in 1330"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Overlay(**options)


def test_nonsense_about_links_is_refused(three):
    overlay, a, b, _ = three
    with pytest.raises(ValueError, match="both nodes"):
        overlay.impair(a, loss=0.1)
    with pytest.raises(ValueError, match="not both"):
        overlay.impair(a, b, LinkSpec(), loss=0.1)
    with pytest.raises(ValueError, match="speed"):
        overlay.impair(speed=3)


def test_settling_waits_for_tasks_that_wake_each_other(three):
    overlay, a, b, _ = three
    client, server = a.open_udp(1), b.open_udp(2)

    async def nested(depth: int) -> bytes:
        if depth:
            return await asyncio.wait_for(nested(depth - 1), 1000)
        return (await server.receive())[0]

    async def answer() -> None:
        server.send_to(b"answer to " + await nested(8), client)

    async def story() -> list:
        task = asyncio.create_task(answer())
        client.send_to(b"request", server)
        await overlay.settled()
        await task
        return client.take()

    assert [data for data, _ in overlay.run(story())] == [b"answer to request"]
    assert overlay.now == 0


def test_settling_ends_with_a_protocol_that_never_does(three):
    overlay, a, b, _ = three
    overlay.impair(delay=1.0)
    sender, receiver = a.open_udp(1), b.open_udp(2)

    async def chatter() -> None:
        while True:
            sender.send_to(b"x", receiver)
            await asyncio.sleep(0.5)

    task = overlay.loop.create_task(chatter())
    with pytest.raises(RuntimeError, match=r"after 60 s there is still something on its way\nseed 0"):
        overlay.settle(60)
    assert 60 <= overlay.now < 63
    task.cancel()


def test_years_pass():
    with Overlay(lease_seconds=86_400 * 30) as overlay:
        a, b = overlay.add_nodes(2)
        overlay.run(86_400 * 365 * 3)
        assert a.pings(b)
        overlay.impair(delay="1ms")
        assert overlay.run(a.ping(b)) == pytest.approx(0.002, abs=1e-6)


async def test_the_tasks_of_a_loop_that_is_not_the_overlays_are_left_alone():
    task = asyncio.create_task(asyncio.Event().wait())
    async with Overlay() as overlay:
        overlay.add_nodes(1)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()


def test_a_node_pings_more_others_than_its_queue_holds():
    with Overlay(record=0) as overlay:
        first, *others = overlay.add_nodes(1100)
        for node in others:
            node.host.answers_pings = False
        overlay.settle()
        overlay.nodes = [first, *others]
        sent = overlay.ping_from(first)
        assert (sent, first.host.refused) == (1099, 0)
        assert sum(len(node.host.received) for node in others) == 1099


# Reports


def test_the_report_has_the_seed_and_every_counter(three):
    overlay, a, b, _ = three
    assert a.pings(b)
    a.pings(IPv4Address("10.77.0.1"))
    b.stop()
    text = overlay.report()
    assert "seed 0" in text
    assert "node1: 10.0.1.0-24 at 198.18.0.1\n    outbound: forwarded 1, no_route 1\n    inbound: forwarded 1" in text
    assert "node2: 10.0.2.0-24 at 198.18.0.2, stopped" in text
    assert "node3: 10.0.3.0-24 at 198.18.0.3\n    outbound: nothing" in text


def test_the_capture_opens_in_tshark_with_every_datagram_and_its_fate(three, tmp_path):
    overlay, a, b, _ = three
    overlay.impair(delay="20ms")
    a.pings(b)
    overlay.impair(loss=1.0)
    a.pings(b)
    path = tmp_path / "underlay.pcapng"
    assert overlay.write_capture(path) == 3
    fields = ["frame.time_epoch", "vxlan.vni", "ip.src", "icmp.type", "udp.checksum.status", "frame.comment"]
    command = ["tshark", "-n", "-r", str(path), "-d", "udp.port==8472,vxlan", "-o", "udp.check_checksum:TRUE"]
    command += ["-T", "fields", "-E", "separator=|", *(word for name in fields for word in ("-e", name))]
    rows = [
        line.split("|") for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    assert [row[1] for row in rows] == ["1"] * 3
    assert [row[2] for row in rows] == [
        "198.18.0.1,10.0.1.10", "198.18.0.2,10.0.2.10", "198.18.0.1,10.0.1.10",
    ]  # fmt: skip
    assert [row[3] for row in rows] == ["8", "0", "8"]
    assert [row[4] for row in rows] == ["1"] * 3
    assert [row[5] for row in rows] == ["arrived after 20.000 ms", "arrived after 20.000 ms", "lost"]
    assert [float(row[0]) for row in rows] == pytest.approx([0.0, 0.020, 0.040])


def test_a_thousand_nodes_and_ten_thousand_leases():
    with Overlay(record=0) as overlay:
        nodes = overlay.add_nodes(1000)
        overlay.add_leases(9000)
        assert nodes[0].pings(nodes[999])
        assert all(len(node.engine.table.routes) == 10_000 for node in nodes)
        assert nodes[500].engine.table.route_to(nodes[7].pod()).subnet == nodes[7].lease.subnet
        assert nodes[7].engine.table.route_to(nodes[7].pod()) is None


def test_pods_of_ipv6_only_nodes_are_ipv6():
    with Overlay(network=None, ipv6_network="fd00::/48", underlay="ipv6") as overlay:
        a, b = overlay.add_nodes(2)
        assert a.pings(b)
        assert IPv6(b.received[0]).src == str(a.pod())
        assert not a.pings(IPv4Address("10.0.0.1")) if a.lease.subnet else True


def test_subnets_of_other_lengths():
    with Overlay(network="10.5.0.0/16", subnet_length=26) as overlay:
        a, b = overlay.add_nodes(2)
        assert b.lease.subnet == IPv4Network("10.5.0.128/26")
        assert a.pings(b)
