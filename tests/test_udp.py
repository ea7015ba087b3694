"""What only kernel sockets can show, and how errors of the kernel become verdicts."""

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from dataplane.batch import Batch
from dataplane.kernel import Kernel
from dataplane.lab import Host, Lab, Namespace, inside
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


# What becomes of sockets when their address does


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, UdpUnderlay, UdpUnderlay]]:
    with Lab("udp") as lab:
        hosts = lab.add_host(), lab.add_host()
        underlays = []
        for host in hosts:
            with inside(host.name):
                underlays.append(open_udp([host.ipv4, host.ipv6], 8472, 2, Offloads()))
        yield *hosts, *underlays
        for underlay in underlays:
            underlay.close()


def end(host: Host, family: int) -> tuple:
    return (str(host.ipv4), 8472) if family == 4 else (str(host.ipv6), 8472, 0, 0)


def sends(underlay: UdpUnderlay, to: tuple) -> int:
    """The verdict of a run of two datagrams."""
    batch = Batch(1)
    batch.put(b"aabb", stride=2)
    batch.verdict[0] = Verdict.FORWARDED
    underlay.transmit(batch, [to])
    return batch.verdict[0]


def arrive(source: UdpUnderlay, target: UdpUnderlay, to: tuple, seconds: float = 5.0) -> bool:
    """Whether datagrams come through, sent again and again: neighbours may have to be found first."""
    batch, end_of_it = Batch(8), time.monotonic() + seconds
    while time.monotonic() < end_of_it:
        sends(source, to)
        time.sleep(0.01)
        batch.clear()
        target.receive(batch, {})
        if batch.count:
            return True
    return False


def lines(host: Host, family: int) -> str:
    return f"{host.ipv4}/24" if family == 4 else f"{host.ipv6}/64"


@pytest.mark.netns
@pytest.mark.parametrize("family", [4, 6])
def test_an_address_that_goes_away_and_comes_back_needs_no_new_sockets(family):
    with two_hosts() as (here, there, ours, theirs):
        for one, other, to in ((ours, theirs, there), (theirs, ours, here)):
            assert arrive(one, other, end(to, family))
        address = lines(here, family)
        here.ip(f"addr del {address} dev eth0")
        assert sends(ours, end(there, family)) == Verdict.SEND_ERROR
        assert not arrive(theirs, ours, end(here, family), seconds=0.1)
        here.ip(f"addr add {address} dev eth0{' nodad' if family == 6 else ''}")
        for one, other, to in ((ours, theirs, there), (theirs, ours, here)):
            assert arrive(one, other, end(to, family))
        assert ours.max_segments == 64


@pytest.mark.netns
def test_a_link_that_goes_down_and_up_needs_no_new_sockets():
    with two_hosts() as (here, there, ours, theirs):
        assert arrive(ours, theirs, end(there, 4))
        here.ip("link set eth0 down")
        assert sends(ours, end(there, 4)) == Verdict.SEND_ERROR
        here.ip("link set eth0 up")
        for one, other, to in ((ours, theirs, there), (theirs, ours, here)):
            assert arrive(one, other, end(to, 4))
        here.ip(f"addr add {lines(here, 6)} dev eth0 nodad")  # Linux takes IPv6 addresses away with the link
        for one, other, to in ((ours, theirs, there), (theirs, ours, here)):
            assert arrive(one, other, end(to, 6))
        assert ours.max_segments == 64


@pytest.mark.netns
@pytest.mark.parametrize(
    ("family", "new", "absent"), [(4, "192.0.2.77", "192.0.2.78"), (6, "2001:db8::77", "2001:db8::78")]
)
def test_an_address_that_changes_needs_new_sockets(family, new, absent):
    length = "24" if family == 4 else "64 nodad"
    with two_hosts() as (here, there, ours, theirs):
        here.ip(f"addr add {new}/{length} dev eth0", f"addr del {lines(here, family)} dev eth0")
        if family == 4:  # and there is no primary address any more whose going would take the others along
            here.ip(f"addr replace {new}/24 dev eth0")
        # The route is still there, by the other address. IPv6 does not ask whether the source is one of ours.
        assert sends(ours, end(there, family)) == (Verdict.SEND_ERROR if family == 4 else Verdict.FORWARDED)
        assert not arrive(theirs, ours, end(here, family), seconds=0.1)
        with pytest.raises(UnderlayError, match=absent), inside(here.name):
            ours.rebind([ip_address(absent)])
        with inside(here.name):
            ours.rebind([ip_address(new)])
        assert (ours.families, ours.port, ours.lanes, ours.max_segments) == ({family}, 8472, 2, 64)
        assert arrive(ours, theirs, end(there, family))
        assert arrive(theirs, ours, (new, 8472) if family == 4 else (new, 8472, 0, 0))
        receiver = ours._families[family].receiver
        assert receiver.getsockopt(socket.IPPROTO_UDP, 104) == 1  # UDP_GRO
