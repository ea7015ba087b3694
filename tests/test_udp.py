"""What only kernel sockets can show, and how errors of the kernel become verdicts."""

import errno
import socket
import sys
from ipaddress import ip_address

import pytest

from dataplane.batch import Batch
from dataplane.kernel import Kernel
from dataplane.lab import Lab, Namespace, inside
from dataplane.offload import Offload, Offloads
from dataplane.underlay.udp import UdpUnderlay, UnderlayError, _Family, open_udp
from dataplane.verdict import Verdict


class RefusingKernel(Kernel):
    """Refuses with the given errors, one a call, then sends."""

    def __init__(self, *errors: int) -> None:
        super().__init__()
        self.refusals, self.sent = list(errors), []

    def send(self, sender, data, at, length, stride, to):
        if self.refusals:
            return -self.refusals.pop(0)
        self.sent.append((bytes(data[at : at + length]), sender))
        return length

    def send_group(self, sender, data, offsets, lengths, order, count, stride, to):
        if self.refusals:
            return -self.refusals.pop(0)
        self.sent += [(bytes(data[offsets[i] : offsets[i] + lengths[i]]), sender) for i in order[:count]]
        return sum(lengths[i] for i in order[:count])


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (errno.EAGAIN, Verdict.QUEUE_FULL),
        (errno.ENOBUFS, Verdict.QUEUE_FULL),
        (errno.ENOMEM, Verdict.QUEUE_FULL),
        (errno.EMSGSIZE, Verdict.TOO_BIG),
        (errno.EPERM, Verdict.SEND_ERROR),
        (errno.ENETUNREACH, Verdict.SEND_ERROR),
        (errno.EHOSTUNREACH, Verdict.SEND_ERROR),
        (errno.ECONNREFUSED, Verdict.SEND_ERROR),
        (errno.EINVAL, Verdict.SEND_ERROR),
    ],
)
def test_each_error_concerns_one_datagram_and_is_tried_once(number, verdict):
    kernel = RefusingKernel(number)
    underlay = UdpUnderlay({4: _Family(ip_address("192.0.2.1"), None, [None], None)}, kernel=kernel)
    batch = Batch(3)
    for i, payload in enumerate((b"a", b"b", b"c")):
        batch.put(payload, stride=1)
        batch.verdict[i] = Verdict.FORWARDED
    assert underlay.transmit(batch, [("192.0.2.2", 8472)]) == 2
    assert list(batch.verdict) == [verdict, Verdict.FORWARDED, Verdict.FORWARDED]
    assert [data for data, _ in kernel.sent] == [b"b", b"c"]
    expected = {} if verdict == Verdict.TOO_BIG else {errno.errorcode[number]: 1}
    assert underlay.last_errors == expected


def test_flows_spread_over_the_pool_and_one_flow_keeps_its_port():
    kernel, senders = RefusingKernel(), ["a", "b", "c", "d"]
    underlay = UdpUnderlay({4: _Family(ip_address("192.0.2.1"), None, senders, None)}, kernel=kernel)
    batch = Batch(64)
    for i in range(64):
        batch.put(bytes([i]), stride=1)
        batch.verdict[i], batch.flow[i] = Verdict.FORWARDED, i % 8
    underlay.transmit(batch, [("192.0.2.2", 8472)])
    for index, sender in enumerate(senders):
        assert [data[0] % 4 for data, by in kernel.sent if by == sender] == [index] * 16


def test_a_taken_port_is_told_apart():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with pytest.raises(UnderlayError, match=f"UDP port {port} of 127.0.0.1") as caught:
            open_udp([ip_address("127.0.0.1")], port)
    assert caught.value.port_taken


def test_an_address_that_is_not_ours_is_an_error_and_nothing_stays_open():
    with pytest.raises(UnderlayError, match=r"192\.0\.2\.77") as caught:
        open_udp([ip_address("192.0.2.77")], 8472)
    assert not caught.value.port_taken


@pytest.mark.netns
def test_one_family_failing_does_not_stop_the_other(caplog):
    with Lab("udp") as lab:
        namespace = Namespace(lab, lab.new_namespace("a"))
        namespace.ip("link set lo up")
        with inside(namespace.name):
            underlay = open_udp([ip_address("127.0.0.1"), ip_address("2001:db8::7")], 8472)
        assert underlay.families == {4}
        assert "left out of the underlay" in caplog.text
        assert "2001:db8::7" in caplog.text
        underlay.close()


def test_sockets_that_only_send_are_deaf():
    underlay = open_udp([ip_address("127.0.0.1")], 0, 3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        family = underlay._families[4]
        for deaf in (*family.senders, family.fragmenting):
            stranger.sendto(b"x" * 1000, deaf.getsockname())
            with pytest.raises(BlockingIOError):
                deaf.recv(2000)
        stranger.sendto(b"heard", family.receiver.getsockname())
        family.receiver.settimeout(5)
        assert family.receiver.recv(100) == b"heard"
    assert underlay.drops() == 0
    underlay.close()


class FloodedKernel(Kernel):
    """The IPv4 socket always has one more datagram; the IPv6 socket has three."""

    def __init__(self) -> None:
        super().__init__()
        self.ipv6 = 3

    def receive_many(self, receiver, data, at, apart, room, count, told):
        if receiver == "ipv6":
            count = min(count, self.ipv6)
            self.ipv6 -= count
        for k in range(count):
            data[at + k * apart] = 4 if receiver == "ipv4" else 6
            told[k * 24 : k * 24 + 8] = bytes(4) + (1).to_bytes(4, sys.byteorder)
        return count or -errno.EAGAIN


@pytest.mark.parametrize("limit", [1, 2, 0])
def test_a_flood_of_one_family_does_not_starve_the_other(limit):
    kernel = FloodedKernel()
    families = {
        4: _Family(ip_address("192.0.2.1"), "ipv4", [None], None),
        6: _Family(ip_address("::1"), "ipv6", [None], None),
    }
    underlay = UdpUnderlay(families, kernel=kernel)
    batch, origins, found = Batch(8), {}, []
    for _ in range(8):
        batch.clear(limit)
        underlay.receive(batch, origins)
        assert batch.is_full
        found += [batch.packet(i)[0] for i in range(batch.count)]
    assert found.count(6) == 3


def test_a_path_that_refuses_everything_does_not_cost_the_others_their_trains():
    kernel, offloads = RefusingKernel(*[errno.EINVAL] * 3), Offloads()
    underlay = UdpUnderlay({4: _Family(ip_address("192.0.2.1"), None, [None], None)}, offloads, kernel)
    batch = Batch(1)
    batch.put(b"aabb", stride=2)
    batch.verdict[0] = Verdict.FORWARDED
    assert underlay.transmit(batch, [("192.0.2.2", 8472)]) == 0
    assert (batch.verdict[0], underlay.max_segments) == (Verdict.SEND_ERROR, 64)
    assert offloads.is_on(Offload.UDP_SEGMENT)
