"""Traffic by peer: whatever happens to packets, the numbers of all peers add up to what was forwarded, and never fall."""

from array import array
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packets import FakeNode, exchange, mac, table_of, tcp, udp, underlay_host

from dataplane.batch import PEER_NUMBERS, Batch
from dataplane.device.memory import MemoryDevice
from dataplane.engine import BATCH_BOUNDS, Direction, Engine
from dataplane.traffic import RouteTraffic, Traffic
from dataplane.underlay.fake import Datagram, FakeNetwork
from dataplane.verdict import Verdict
from encap import vxlan
from encap.vnet import GSO_TCPV4, VNET_LENGTH, store
from routing.route import Route
from routing.table import Table

EPOCH = 1_000_000.0


class Counted:
    """Node 1 with an engine that counts by peer, its clock in its hands, and nodes 2 to 4 that it talks to."""

    def __init__(self, **options) -> None:
        self.clock = 50.0
        self.network = FakeNetwork()
        self.device = MemoryDevice()
        self.underlay = self.network.attach(8472, underlay_host(1))
        self.engine = Engine(
            self.device, self.underlay, table_of(1, [2, 3], **options), now=lambda: self.clock, by_peer=True
        )
        self.peers = {number: FakeNode(self.network, number, [1]) for number in (2, 3, 4)}

    def pump(self) -> None:
        self.engine.pump_outbound()
        exchange(*self.peers.values())
        self.engine.pump_inbound()

    def traffic(self, number: int, version: int = 4) -> tuple:
        """The numbers of the route to one of node `number`'s subnets."""
        subnet = ip_network(f"10.1.{number}.0/24" if version == 4 else f"fd00:0:0:{number}::/64")
        (found,) = [one[1:] for one in self.engine.traffic(EPOCH) if one.route and one.route.subnet == subnet]
        return found

    def assert_adds_up(self) -> None:
        found = self.engine.traffic(EPOCH)
        assert [one.route for one in found] == [*self.engine.table.routes, None]
        for direction, packets, octets in ((self.engine.outbound, 1, 2), (self.engine.inbound, 3, 4)):
            assert sum(one[packets] for one in found) == direction.verdicts[Verdict.FORWARDED]
            assert sum(one[octets] for one in found) == direction.forwarded_bytes


def test_each_peer_has_what_was_sent_to_it_and_came_from_it():
    node = Counted()
    small, large, other = udp(1, 2), udp(1, 2, payload=b"x" * 500), udp(1, 3, version=6)
    for packet in (small, large, other):
        node.device.inject(packet)
    answer = udp(3, 1, payload=b"y" * 77)
    node.peers[3].device.inject(answer)
    node.pump()
    assert node.traffic(2) == (2, len(small) + len(large), 0, 0, None)
    assert node.traffic(2, 6) == (0, 0, 0, 0, None)
    assert node.traffic(3) == (0, 0, 1, len(answer), EPOCH)
    assert node.traffic(3, 6) == (1, len(other), 0, 0, EPOCH)  # the VTEP was heard, behind another subnet
    node.clock += 7.25
    assert node.traffic(3)[-1] == EPOCH - 7.25
    node.peers[3].device.inject(udp(3, 1, version=6))
    node.pump()
    assert node.traffic(3)[-1] == node.traffic(3, 6)[-1] == EPOCH
    node.assert_adds_up()


def test_what_is_not_accepted_is_nobodys_traffic_and_not_heard():
    node = Counted()
    for packet in (udp(3, 1), udp(2, 4)):  # not its own source; not for us
        node.network.send(
            Datagram(underlay_host(2), underlay_host(1), 8472, vxlan.header(1, mac(1), mac(2), 0x0800) + packet)
        )
    node.device.inject(udp(1, 9))
    node.pump()
    assert node.engine.inbound.received == 2
    assert all(one[1:] == (0, 0, 0, 0, None) for one in node.engine.traffic(EPOCH))
    node.assert_adds_up()


def test_a_train_that_is_refused_was_not_sent():
    node = Counted()
    node.underlay.refuse[underlay_host(2)] = Verdict.QUEUE_FULL
    for number in (2, 3, 2):
        node.device.inject(udp(1, number))
    node.pump()
    assert node.traffic(2) == (0, 0, 0, 0, None)
    assert node.traffic(3)[0] == 1
    node.assert_adds_up()


def test_what_the_device_refuses_was_not_received():
    node = Counted()
    node.device.room = 1
    for number in (2, 3):
        node.peers[number].device.inject(udp(number, 1))
    node.pump()
    assert [node.traffic(number)[2] for number in (2, 3)] == [1, 0]
    node.assert_adds_up()


def superpacket() -> tuple[bytes, bytes]:
    packet = tcp(payload=b"z" * 3000)
    header = bytearray(VNET_LENGTH)
    store(header, 0, 1, GSO_TCPV4, 40, 1000, 20, 16)
    return packet, bytes(header)


def test_superpackets_are_one_packet_and_merged_packets_are_several():
    node = Counted()
    packet, header = superpacket()
    node.device.inject(packet, header)
    node.pump()
    assert node.traffic(2)[:2] == (1, len(packet))
    segments = node.peers[2].device.delivered
    assert len(segments) == 3
    back = tcp(2, 1, payload=b"z" * 3000)
    node.peers[2].device.inject(back, header)
    node.pump()
    assert node.device.writes == 1
    assert node.traffic(2) == (1, len(packet), 3, len(back), EPOCH)
    node.assert_adds_up()


def test_with_sources_unchecked_what_no_route_explains_is_counted_apart():
    node = Counted(check_sources=False)
    for source in (3, 9):
        payload = vxlan.header(1, mac(1), mac(2), 0x0800) + udp(source, 1)
        node.network.send(Datagram("192.0.2.77", underlay_host(1), 8472, payload))
    node.pump()
    assert node.traffic(3)[2] == 1
    assert node.engine.traffic(EPOCH)[-1][:4] == (None, 0, 0, 1)
    node.assert_adds_up()


def test_without_being_asked_nothing_is_counted():
    node = FakeNode(FakeNetwork(), 1, [2])
    node.device.inject(udp())
    node.pump()
    node.engine.table = table_of(1, [3])
    assert node.engine.traffic(EPOCH) == []


def test_a_new_table_keeps_the_numbers_of_the_peers_that_stay():
    node = Counted()
    for number in (2, 3):
        node.device.inject(udp(1, number))
        node.peers[number].device.inject(udp(number, 1))
    node.pump()
    two, three = node.traffic(2), node.traffic(3)
    assert two[:1] == three[:1] == (1,)
    node.engine.table = table_of(1, [4, 3])  # other rows, and 2 is gone
    assert node.traffic(3) == three
    assert node.traffic(4) == (0, 0, 0, 0, None)
    assert node.engine.traffic(EPOCH)[-1] == RouteTraffic(None, *two[:4], None)
    node.assert_adds_up()
    node.engine.table = table_of(1, [2, 3, 4])
    assert node.traffic(2) == (0, 0, 0, 0, None)
    assert node.traffic(3) == three
    node.device.inject(udp(1, 3))
    node.pump()
    assert node.traffic(3)[0] == 2
    node.assert_adds_up()


def test_a_subnet_that_another_peer_has_begins_anew():
    node = Counted()
    node.device.inject(udp(1, 2))
    node.pump()
    moved = [
        Route(route.subnet, ip_address(underlay_host(9)), mac(9), (ip_address(underlay_host(9)),))
        for route in node.engine.table.routes[:2]
    ]
    node.engine.table = node.engine.table.changed([], moved)
    assert node.traffic(2) == (0, 0, 0, 0, None)
    node.assert_adds_up()


PEERS = st.lists(st.integers(2, 12), unique=True, max_size=11)


@given(st.lists(st.tuples(PEERS, st.booleans()), min_size=1, max_size=6))
def test_numbers_follow_their_peers_through_any_tables(steps):
    """By the row's own numbers, which no packet would make: each row counts something that tells it from others."""
    traffic = Traffic(table_of(1, []))
    expected: dict[object, int] = {}
    gone = 0
    unique = 1
    for peers, in_place in steps:
        table = following(traffic.table, peers) if in_place else table_of(1, peers)
        traffic = Traffic(table, traffic)
        subnets = {route.subnet for route in table.routes}
        gone += sum(count for subnet, count in expected.items() if subnet not in subnets)
        expected = {route.subnet: expected.get(route.subnet, 0) for route in table.routes}
        assert {one.route.subnet: one.sent_packets for one in traffic.report(0.0, 0.0)} == expected
        assert traffic.others.sent_packets == gone
        for row, route in enumerate(table.routes):
            traffic.sent[row * PEER_NUMBERS] += unique
            traffic.received[row * PEER_NUMBERS] += unique
            expected[route.subnet] += unique
            unique += 7
        assert [one.received_packets for one in traffic.report(0.0, 0.0)] == list(expected.values())


def following(table: Table, peers: list[int]) -> Table:
    wanted = table_of(1, peers)
    there = {route.subnet for route in wanted.routes}
    return table.changed(
        [route.subnet for route in table.routes if route.subnet not in there],
        [route for route in wanted.routes if table.row_of(route.subnet) < 0],
    )


PLANS = st.lists(
    st.tuples(
        st.sampled_from(["send", "receive", "spoof", "refuse", "allow", "table", "full"]),
        st.integers(2, 4),
        st.sampled_from([4, 6]),
    ),
    max_size=25,
)


@given(PLANS)
def test_the_sum_over_peers_is_what_was_forwarded(plan):
    node = Counted()
    before: dict[object, RouteTraffic] = {}
    for what, number, version in plan:
        if what == "send":
            node.device.inject(udp(1, number, version=version))
        elif what == "receive":
            node.peers[number].device.inject(udp(number, 1, version=version))
        elif what == "spoof":
            node.peers[number].device.inject(udp(9, 1, version=version))
        elif what == "refuse":
            node.underlay.refuse[underlay_host(number)] = Verdict.SEND_ERROR
        elif what == "allow":
            node.underlay.refuse.clear()
        elif what == "table":
            node.engine.table = table_of(1, [[2, 3], [3, 4], [4, 3, 2]][number - 2])
        else:
            node.device.room = len(node.device.delivered) + number - 2
        node.pump()
        node.clock += 1
        node.assert_adds_up()
        now = {one.route.subnet: one for one in node.engine.traffic(EPOCH) if one.route}
        assert all(now[subnet][1:5] >= one[1:5] for subnet, one in before.items() if subnet in now)
        before = now


# The sizes of batches


@pytest.mark.parametrize(
    ("size", "bound"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 32), (32, 32), (33, 32), (500, 32)]
)
def test_a_batch_is_counted_at_the_bound_that_holds_it(size, bound):
    direction = Direction()
    direction.count_batch(size)
    assert list(direction.batches) == [int(one == bound) for one in BATCH_BOUNDS]
    assert direction.batched == size


def test_batch_sizes_are_reported_as_a_histogram():
    direction = Direction()
    for size in (1, 1, 2, 3, 20):
        direction.count_batch(size)
    assert direction.report_batches() == {
        "buckets": [[1, 2], [2, 3], [4, 4], [8, 4], [16, 4], [32, 5]],
        "count": 5,
        "sum": 27,
    }


def test_batches_are_what_one_receive_brought():
    node = Counted()
    node.engine.pump_outbound()  # nothing there is no batch
    assert sum(node.engine.outbound.batches) == 0
    for _ in range(1 + 6):
        node.device.inject(udp())
    for _ in range(3):
        node.peers[2].device.inject(udp(2, 1))  # one run of three, in one slot
    node.pump()
    assert list(node.engine.outbound.batches) == [1, 0, 0, 1, 0, 0]  # a quiet link begins with a single one
    assert node.engine.outbound.batched == node.engine.outbound.received == 7
    assert (list(node.engine.inbound.batches), node.engine.inbound.batched) == ([1, 0, 0, 0, 0, 0], 1)
    assert node.engine.inbound.received == 3


def test_a_tally_beyond_the_rows_raises():
    batch = Batch(1)
    batch.put(udp(), peer=3)
    batch.verdict[0] = Verdict.FORWARDED
    with pytest.raises(IndexError):
        batch.tally(Direction().verdicts, memoryview(array("q", bytes(8 * PEER_NUMBERS * 3))), 0)
