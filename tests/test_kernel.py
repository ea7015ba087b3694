"""The loops around the system calls, with inline C and with the Python that it stands for, on real descriptors."""

import errno
import os
import socket
import sys
from array import array
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import POISON as POISON_OCTET

from dataplane import syscalls
from dataplane.batch import HEADROOM, MAX_PACKET_LENGTH, Batch
from dataplane.kernel import IN_RUN, Kernel
from dataplane.syscalls import sockaddr
from dataplane.verdict import Verdict


class Nobody:
    """A socket that is closed."""

    family = socket.AF_INET

    def fileno(self) -> int:
        return -1

    def recvmsg_into(self, *_: object) -> None:
        raise OSError(errno.EBADF, "closed")


NOBODY = Nobody()
HOSTS = {4: "127.0.0.1", 6: "::1"}
POISON = bytes([POISON_OCTET])
LOOPBACK = {4: 0x7F000001, 6: 1}
UDP_SEGMENT, UDP_GRO = 103, 104


class PythonKernel(Kernel):
    """Goes through ``os`` and ``socket``, also where the loops are compiled."""

    def read_packet(self, *arguments):
        return syscalls.read_packet(*arguments)

    def write_packet(self, *arguments):
        return syscalls.write_packet(*arguments)

    def receive_many(self, *arguments):
        return syscalls.receive_many(*arguments)

    def send(self, *arguments):
        return syscalls.send(*arguments)

    def send_group(self, *arguments):
        return syscalls.send_group(*arguments)


@pytest.fixture(params=[Kernel, PythonKernel])
def kernel(request) -> Kernel:
    return request.param()


@pytest.fixture
def tun():
    """A pair of descriptors that keep packets apart, as a TUN does."""
    ours, host = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    host.setblocking(False)
    with ours, host:
        yield ours, host


@pytest.fixture(params=[4, 6])
def pair(request):
    """The family, a sender and a receiver on loopback."""
    family = socket.AF_INET if request.param == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sender, socket.socket(family, socket.SOCK_DGRAM) as receiver:
        for one in (sender, receiver):
            one.bind((HOSTS[request.param], 0))
            one.setblocking(False)
        yield request.param, sender, receiver


def poisoned_batch(capacity: int) -> Batch:
    batch = Batch(capacity)
    batch.data[:] = POISON * len(batch.data)
    batch.vnet[:] = POISON * len(batch.vnet)
    return batch


def test_reads_until_nothing_is_left(kernel, tun):
    ours, host = tun
    for i in range(3):
        host.send(bytes([i]) * 10 + b"packet" * (i + 1))
    batch = poisoned_batch(5)
    assert kernel.read_packets(ours.fileno(), batch) == kernel.error == errno.EAGAIN
    assert [bytes(batch.packet(i)) for i in range(batch.count)] == [b"packet", b"packet" * 2, b"packet" * 3]
    assert [bytes(batch.vnet_header(i)) for i in range(4)] == [bytes([i]) * 10 for i in range(3)] + [POISON * 10]
    end = batch.offset[2] + batch.length[2]
    assert bytes(batch.data[end : end + 100]) == POISON * 100
    assert bytes(batch.data[:HEADROOM]) == POISON * HEADROOM


@pytest.mark.parametrize("limit", [1, 2])
def test_reads_no_more_than_asked_for(kernel, tun, limit):
    ours, host = tun
    for i in range(3):
        host.send(bytes(10) + bytes([i]))
    batch = Batch(4)
    batch.clear(limit)
    assert kernel.read_packets(ours.fileno(), batch) == 0
    assert batch.is_full
    assert [bytes(batch.packet(i)) for i in range(batch.count)] == [bytes([i]) for i in range(limit)]
    batch.clear()
    kernel.read_packets(ours.fileno(), batch)
    assert [bytes(batch.packet(i)) for i in range(batch.count)] == [bytes([i]) for i in range(limit, 3)]


def test_the_longest_packet_is_read_whole(kernel, tun):
    ours, host = tun
    host.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    packet = os.urandom(MAX_PACKET_LENGTH)
    host.send(bytes(10) + packet)
    batch = Batch(2)
    kernel.read_packets(ours.fileno(), batch)
    assert bytes(batch.packet(0)) == packet


@pytest.mark.parametrize("call", ["read_packets", "write_packets"])
def test_a_bad_descriptor_is_an_error_and_no_exception(kernel, call):
    batch = Batch(1)
    if call == "write_packets":
        batch.put(b"x")
        batch.verdict[0] = Verdict.FORWARDED
        assert kernel.write_packets(-1, batch, 0, True) == 0
    else:
        assert kernel.read_packets(-1, batch) == errno.EBADF
        assert batch.count == 0
    assert kernel.error == errno.EBADF


def batch_to_write() -> Batch:
    """Forwarded, dropped, merged into the first, a superpacket, forwarded."""
    batch = Batch(5)
    for i in range(5):
        header = bytes([1, 1]) + bytes(8) if i == 3 else bytes(10)
        batch.put(bytes([i]) * (i + 1), vnet=header)
        batch.verdict[i] = Verdict.NO_ROUTE if i == 1 else Verdict.FORWARDED
    batch.head[2] = 0
    return batch


def written(host: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(host.recv(1000))
        except BlockingIOError:
            return found


def test_writes_what_is_forwarded_behind_its_header(kernel, tun):
    ours, host = tun
    batch = batch_to_write()
    assert kernel.write_packets(ours.fileno(), batch, 0, True) == batch.count
    assert kernel.error == 0
    superpacket = bytes([1, 1]) + bytes(8) + bytes([3]) * 4
    assert written(host) == [bytes(10) + b"\0", superpacket, bytes(10) + bytes([4]) * 5]


def test_stops_at_a_superpacket_that_must_be_cut_and_goes_on_behind_it(kernel, tun):
    ours, host = tun
    batch = batch_to_write()
    assert (kernel.write_packets(ours.fileno(), batch, 0, False), kernel.error) == (3, 0)
    assert kernel.write_packets(ours.fileno(), batch, 4, False) == batch.count
    assert written(host) == [bytes(10) + b"\0", bytes(10) + bytes([4]) * 5]


def test_a_full_queue_stops_the_writes(kernel, tun):
    ours, host = tun
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the kernel's least
    batch = Batch(32)
    for i in range(32):
        batch.put(bytes([i]) * 4000)
        batch.verdict[i] = Verdict.FORWARDED
    refused = kernel.write_packets(ours.fileno(), batch, 0, True)
    assert 0 < refused < 32
    assert kernel.error == errno.EAGAIN
    assert len(written(host)) == refused


def trains(*payloads: tuple[bytes, int]) -> Batch:
    batch = Batch(max(len(payloads), 1))
    for i, (payload, stride) in enumerate(payloads):
        batch.put(payload, peer=7, stride=stride)
        batch.verdict[i], batch.flow[i] = Verdict.FORWARDED, i
    return batch


def roads_to(family: int, sender: socket.socket, receiver: socket.socket) -> dict:
    endpoint = receiver.getsockname()
    return {7: ([sender], sockaddr(endpoint))}


def lanes_of(batch: Batch, *lanes: int) -> Batch:
    for i, lane in enumerate(lanes):
        batch.flow[i] = lane
    return batch


def test_sends_trains_as_datagrams_and_single_ones(kernel, pair):
    family, sender, receiver = pair
    batch = trains((b"aaabbbcc", 3), (b"single", 6), (b"dropped", 7), (b"", 0))
    batch.verdict[2] = Verdict.TOO_BIG
    assert kernel.send_trains(batch, roads_to(family, sender, receiver), 4, 64) == 0
    assert written(receiver) == [b"aaa", b"bbb", b"cc", b"single", b""]
    assert list(batch.verdict) == [Verdict.FORWARDED, Verdict.FORWARDED, Verdict.TOO_BIG, Verdict.FORWARDED]


def test_a_refused_train_is_told_and_what_follows_is_sent(kernel, pair):
    family, sender, receiver = pair
    batch = trains((b"x" * 65535, 65535), (b"next", 4))
    assert kernel.send_trains(batch, roads_to(family, sender, receiver), 2, 64) == 1
    assert list(batch.verdict) == [-errno.EMSGSIZE, Verdict.FORWARDED]
    assert written(receiver) == [b"next"]


class GroupingKernel(PythonKernel):
    """Notes what goes in one call."""

    def __init__(self, refusal: int = 0) -> None:
        super().__init__()
        self.calls, self.ways, self.refusal = [], [], refusal

    def send(self, sender, data, at, length, stride, to):
        self.calls.append(([bytes(data[at : at + length])], stride))
        self.ways.append((sender, to))
        return length

    def send_group(self, sender, data, offsets, lengths, order, count, stride, to):
        parts = [bytes(data[offsets[i] : offsets[i] + lengths[i]]) for i in order[:count]]
        self.calls.append((parts, stride))
        self.ways.append((sender, to))
        return -self.refusal or sum(map(len, parts))


ROADS = {row: (["sender"], b"") for row in range(3)}


@pytest.mark.parametrize(
    ("payloads", "lanes", "peers", "calls"),
    [
        ([b"aa", b"bb", b"cc"], (0, 0, 0), (0, 0, 0), [([b"aa", b"bb", b"cc"], 2)]),
        ([b"aa", b"bb", b"cc", b"dd"], (0, 1, 0, 1), (0,) * 4, [([b"aa", b"cc"], 2), ([b"bb", b"dd"], 2)]),
        ([b"aa", b"bb", b"cc"], (0, 0, 0), (0, 1, 1), [([b"aa"], 2), ([b"bb", b"cc"], 2)]),
        ([b"aa", b"b", b"cc"], (0, 0, 0), (0, 0, 0), [([b"aa", b"b"], 2), ([b"cc"], 2)]),  # the shorter one is the last
        ([b"a", b"bb"], (0, 0), (0, 0), [([b"a"], 1), ([b"bb"], 2)]),
        ([b"aa", b"", b"bb"], (0, 0, 0), (0, 0, 0), [([b"aa"], 2), ([b""], 0), ([b"bb"], 2)]),
    ],
)
def test_what_follows_in_a_lane_goes_in_one_call(payloads, lanes, peers, calls):
    kernel = GroupingKernel()
    batch = lanes_of(trains(*((payload, len(payload)) for payload in payloads)), *lanes)
    for i, peer in enumerate(peers):
        batch.peer[i] = peer
    assert kernel.send_trains(batch, ROADS, 2, 64) == 0
    assert kernel.calls == calls


def test_runs_join_runs_up_to_the_limits():
    kernel = GroupingKernel()
    batch = lanes_of(trains((b"aabb", 2), (b"cc", 2), (b"ddeef", 2), (b"gg", 2)), 0, 0, 0, 0)
    for i in range(4):
        batch.peer[i] = 0
    kernel.send_trains(batch, ROADS, 1, 64)
    assert kernel.calls == [([b"aabb", b"cc", b"ddeef"], 2), ([b"gg"], 2)]
    kernel.calls.clear()
    kernel.send_trains(batch, ROADS, 1, 3)
    assert kernel.calls == [([b"aabb", b"cc"], 2), ([b"ddeef"], 2), ([b"gg"], 2)]
    kernel.calls.clear()
    kernel.send_trains(batch, ROADS, 1, 1)  # without UDP_SEGMENT nobody joins
    assert [parts for parts, _ in kernel.calls] == [[b"aabb"], [b"cc"], [b"ddeef"], [b"gg"]]
    many = lanes_of(trains(*[(b"x", 1)] * 100), *[0] * 100)
    for i in range(100):
        many.peer[i] = 0
    kernel.calls.clear()
    kernel.send_trains(many, ROADS, 1, 64)
    assert [len(parts) for parts, _ in kernel.calls] == [64, 36]
    long = lanes_of(trains(*[(b"x" * 30_000, 30_000)] * 3), 0, 0, 0)
    for i in range(3):
        long.peer[i] = 0
    kernel.calls.clear()
    kernel.send_trains(long, ROADS, 1, 64)
    assert [len(parts) for parts, _ in kernel.calls] == [2, 1]


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), st.integers(0, 2), st.integers(0, 1)),
        max_size=40,
    ),
    st.sampled_from([1, 2, 5, 64]),
)
def test_whatever_is_joined_every_lane_sends_the_same_datagrams_in_order(wanted, max_segments):
    """Each is a stride, a number of datagrams, how much the last one lacks, a lane and a row."""
    kernel = GroupingKernel()
    batch = Batch(max(len(wanted), 1))
    expected = {}
    for i, (stride, count, lack, lane, peer) in enumerate(wanted):
        train = bytes([i]) * (stride * min(count, max_segments) - min(lack, stride - 1))
        batch.put(train, peer=peer, stride=stride)
        batch.verdict[i], batch.flow[i] = Verdict.FORWARDED, lane
        cut = [train[at : at + stride] for at in range(0, len(train), stride)]
        expected.setdefault((f"socket {lane}", bytes([peer])), []).extend(cut)
    roads = {row: ([f"socket {lane}" for lane in range(3)], bytes([row])) for row in range(2)}
    assert kernel.send_trains(batch, roads, 3, max_segments) == 0
    sent = {}
    for (parts, stride), way in zip(kernel.calls, kernel.ways, strict=True):
        run = b"".join(parts)
        cut = [run[at : at + stride] for at in range(0, len(run), stride)]
        assert len(cut) <= max_segments
        sent.setdefault(way, []).extend(cut)
    assert sent == expected


def test_a_refused_group_is_told_for_each_of_its_trains():
    kernel = GroupingKernel(errno.EIO)
    batch = lanes_of(trains((b"aa", 2), (b"x", 1), (b"bb", 2)), 0, 1, 0)
    for i in range(3):
        batch.peer[i] = 0
    assert kernel.send_trains(batch, ROADS, 2, 64) == 2
    assert list(batch.verdict) == [-errno.EIO - IN_RUN, Verdict.FORWARDED, -errno.EIO - IN_RUN]


def test_a_group_arrives_as_its_datagrams_in_order(kernel, pair):
    family, sender, receiver = pair
    batch = trains(*((bytes([i]) * 50, 50) for i in range(40)), (b"shorter", 7))
    for i in range(41):
        batch.flow[i] = 3
    assert kernel.send_trains(batch, roads_to(family, sender, receiver), 8, 64) == 0
    assert written(receiver) == [*(bytes([i]) * 50 for i in range(40)), b"shorter"]


@pytest.mark.parametrize(
    ("offsets", "lengths", "order", "count"),
    [([0], [10], [0], 0), ([0], [10], [0], 65), ([5], [6], [0], 1), ([-1], [3], [0], 1), ([0, 5], [5, 6], [0, 1], 2)],
)
def test_a_group_beyond_its_buffer_raises(kernel, pair, offsets, lengths, order, count):
    _, sender, receiver = pair
    columns = [memoryview(array("i", (column + [0] * 64)[:64])) for column in (offsets, lengths, order)]
    with pytest.raises(IndexError):
        kernel.send_group(sender, bytearray(10), *columns, count, 5, sockaddr(receiver.getsockname()))


class Origins(dict):
    def __missing__(self, source: int) -> int:
        return -1


def test_receives_with_the_number_of_the_source(kernel, pair):
    family, sender, receiver = pair
    for payload in (b"one", b"twice"):
        sender.sendto(payload, receiver.getsockname())
    batch = poisoned_batch(3)
    assert kernel.receive_datagrams(receiver, batch, {LOOPBACK[family]: 5}, family == 4) == errno.EAGAIN
    assert [(bytes(batch.packet(i)), batch.peer[i], batch.stride[i]) for i in range(batch.count)] == [
        (b"one", 5, 0),
        (b"twice", 5, 0),
    ]
    assert bytes(batch.data[batch.offset[1] + 5 :][:100]) == POISON * 100
    sender.sendto(b"", receiver.getsockname())
    batch.clear(1)
    assert kernel.receive_datagrams(receiver, batch, Origins(), family == 4) == 0
    assert (batch.count, batch.length[0], batch.peer[0]) == (1, 0, -1)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 70])
def test_receives_any_number_of_datagrams_and_leaves_the_rest(kernel, pair, count):
    family, sender, receiver = pair
    payloads = [bytes([i]) * (i * 13 + 1) for i in range(count)]
    for payload in payloads:
        sender.sendto(payload, receiver.getsockname())
    batch = Batch(40)
    found = []
    while kernel.receive_datagrams(receiver, batch, {LOOPBACK[family]: 1}, family == 4) == 0:
        found += [bytes(batch.packet(i)) for i in range(batch.count)]
        batch.clear()
    found += [bytes(batch.packet(i)) for i in range(batch.count)]
    assert found == payloads


def test_receives_a_run_with_its_stride(kernel, pair):
    family, sender, receiver = pair
    receiver.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    segments = ((socket.IPPROTO_UDP, UDP_SEGMENT, (3).to_bytes(2, sys.byteorder)),)
    sender.sendmsg((b"aaabbbcc",), segments, 0, receiver.getsockname())
    batch = Batch(4)
    kernel.receive_datagrams(receiver, batch, {LOOPBACK[family]: 2}, family == 4)
    assert [(bytes(batch.packet(i)), batch.peer[i], batch.stride[i]) for i in range(batch.count)] == [(b"aaabbbcc", 2, 3)]


@pytest.mark.parametrize("host", ["2001:db8:ffff:ffff:1234:5678:9abc:def0", "::ffff", "8000::", "fe80::1"])
def test_an_ipv6_source_is_the_number_of_its_address(host):
    class Kernel6(Kernel):
        def __init__(self) -> None:
            super().__init__()
            self.left = 1

        def receive_many(self, receiver, data, at, apart, room, count, told):
            if not self.left:
                return -errno.EAGAIN
            self.left -= 1
            told[:24] = bytes(8) + ip_address(host).packed
            return 1

    batch = Batch(2)
    Kernel6().receive_datagrams(None, batch, {int(ip_address(host)): 3}, False)
    assert list(batch.peer)[: batch.count] == [3]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("read_packet", (-1, bytearray(9), 0, bytearray(9), 0, 9)),
        ("read_packet", (-1, bytearray(10), 1, bytearray(9), 0, 9)),
        ("read_packet", (-1, bytearray(10), 0, bytearray(9), 1, 9)),
        ("read_packet", (-1, bytearray(10), 0, bytearray(9), -1, 9)),
        ("write_packet", (-1, bytearray(9), 0, bytearray(9), 0, 9)),
        ("write_packet", (-1, bytearray(10), 0, bytearray(9), 8, 2)),
        ("receive_many", (NOBODY, bytearray(9), 0, 0, 10, 1, bytearray(24))),
        ("receive_many", (NOBODY, bytearray(9), 0, 9, 9, 1, bytearray(23))),
        ("receive_many", (NOBODY, bytearray(18), 0, 10, 9, 2, bytearray(48))),
        ("receive_many", (NOBODY, bytearray(18), 0, 9, 9, 2, bytearray(47))),
        ("receive_many", (NOBODY, bytearray(18), -1, 9, 9, 1, bytearray(48))),
        ("receive_many", (NOBODY, bytearray(18), 0, 0, 9, 0, bytearray(48))),
        ("receive_many", (NOBODY, bytearray(18), 0, 0, 9, 33, bytearray(2000))),
        ("send", (NOBODY, bytearray(9), 5, 5, 5, b"")),
    ],
)
def test_an_access_beyond_a_buffer_raises_in_either_form(kernel, call, arguments):
    with pytest.raises(IndexError):
        getattr(kernel, call)(*arguments)


@pytest.mark.parametrize(("length", "stride"), [(65557, 65557), (65528, 65528), (70000, 65536), (5, -1), (5, 0)])
def test_what_is_too_long_for_a_datagram_is_too_long_for_the_path(kernel, pair, length, stride):
    _, sender, receiver = pair
    assert kernel.send(sender, bytes(length), 0, length, stride, sockaddr(receiver.getsockname())) == -errno.EMSGSIZE


def test_a_socket_that_is_closed_is_a_bad_descriptor(kernel, pair):
    _, sender, receiver = pair
    to = sockaddr(receiver.getsockname())
    sender.close()
    receiver.close()
    assert kernel.send(sender, b"x", 0, 1, 1, to) == -errno.EBADF
    assert kernel.receive_many(receiver, bytearray(9), 0, 9, 9, 1, bytearray(24)) == -errno.EBADF


@pytest.mark.parametrize("endpoint", [("192.0.2.1", 8472), ("2001:db8::1", 8472, 0, 0), ("fe80::1", 65535, 0x12345, 7)])
def test_a_sockaddr_holds_the_endpoint(endpoint):
    made = sockaddr(endpoint)
    assert syscalls._endpoint(made) == endpoint
    family = socket.AF_INET if len(endpoint) == 2 else socket.AF_INET6
    assert made[:2] == int(family).to_bytes(2, sys.byteorder)
    assert made[2:4] == endpoint[1].to_bytes(2, "big")
