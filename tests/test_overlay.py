"""Overlay networks in memory: what a test can say to one, and that the same seed says the same again."""

import asyncio
import subprocess
from ipaddress import IPv4Address, IPv4Network

import pytest
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from dataplane.overlay import Burst, LinkSpec, Overlay, VirtualLoop
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
