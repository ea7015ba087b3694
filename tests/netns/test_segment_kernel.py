"""encap/segment.py against the kernel: the same superpacket, cut by us and by the kernel's own software GSO on a veth."""

import socket
import time

import pytest
import reference_offload as twin
from reference_offload import ACK, CWR, ECE, FIN, PSH, SHAPES, TCP, body

from dataplane.batch import Batch
from dataplane.device.tun import open_tun
from dataplane.lab import Lab, Namespace, inside
from dataplane.offload import Offload, Offloads
from dataplane.verdict import Verdict
from encap import segment, vnet

SHARES_A_LAB = True
pytestmark = pytest.mark.netns
MTU = 1500
TTL = 64
OFF = "tx off rx off sg off tso off gso off gro off"
PACKET_OUTGOING = 4
SO_RCVBUFFORCE = 33


class Scene:
    """A namespace that forwards from a TUN to a veth without offloads, and a packet socket on the other end of that."""

    def __init__(self, lab: Lab) -> None:
        self.router = Namespace(lab, lab.new_namespace("r"))
        self.sink = Namespace(lab, lab.new_namespace("s"))
        for namespace in (self.router, self.sink):
            namespace.sysctl({"net/ipv6/conf/default/accept_dad": "0", "net/ipv6/conf/default/router_solicitations": "0"})
        self.router.sysctl({"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1"})
        self.router.ip(f"link add out0 mtu {MTU} type veth peer name in0 mtu {MTU} netns {self.sink.name}")
        for namespace, device in ((self.router, "out0"), (self.sink, "in0")):
            done = namespace.run(["ethtool", "-K", device, *OFF.split()])
            assert done.returncode == 0, done.stderr
        self.offloads = Offloads()
        with inside(self.router.name):
            self.tun = open_tun("tun7", 65535, self.offloads)
        self.sink.ip("link set in0 up")
        mac = self.sink.run(["cat", "/sys/class/net/in0/address"]).stdout.strip()
        self.router.ip(
            "link set lo up",
            "link set out0 up",
            "link set tun7 mtu 65535 up",
            "addr add 10.1.2.1/24 dev out0",
            "addr add fd00:0:0:2::1/64 dev out0 nodad",
            "route add 10.1.1.0/24 dev tun7",
            "route add fd00:0:0:1::/64 dev tun7",
            f"neigh replace 10.1.2.5 lladdr {mac} dev out0 nud permanent",
            f"neigh replace fd00:0:0:2::5 lladdr {mac} dev out0 nud permanent",
        )
        with inside(self.sink.name):
            self.tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
            self.tap.bind(("in0", 3))
        self.tap.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
        self.tap.setblocking(False)

    def close(self) -> None:
        self.tap.close()
        self.tun.close()

    def kernel(self, superpacket: bytes, header: vnet.VnetHeader, count: int) -> list[bytes]:
        """What leaves the veth when `superpacket` is written to the TUN; waits for `count` packets, and a little longer."""
        batch = Batch(1)
        batch.put(superpacket)
        vnet.store(batch.vnet, 0, *header)
        batch.verdict[0] = Verdict.FORWARDED
        self.caught(superpacket)
        self.tun.transmit(batch)
        assert batch.verdict[0] == Verdict.FORWARDED
        assert self.offloads.is_on(Offload.TUN_GRO)  # it was the kernel that took it apart
        out: list[bytes] = []
        deadline = time.monotonic() + 5
        while len(out) < count and time.monotonic() < deadline:
            out += self.caught(superpacket)
        time.sleep(0.002)
        return out + self.caught(superpacket)

    def caught(self, like: bytes) -> list[bytes]:
        """Frames from the source of `like`, without the Ethernet header."""
        place = slice(12, 20) if like[0] >> 4 == 4 else slice(8, 40)
        out = []
        while True:
            try:
                octets, (*_, kind, _, _) = self.tap.recvfrom(1 << 16)
            except BlockingIOError:
                return out
            if kind != PACKET_OUTGOING and octets[0] >> 4 == like[0] >> 4 and octets[place] == like[place]:
                out.append(octets)


@pytest.fixture(scope="module")
def scene():
    with Lab("gso") as lab:
        made = Scene(lab)
        yield made
        made.close()


def as_sent(forwarded: bytes) -> bytes:
    """What a router has made of a packet, undone: TTL or hop limit, and the IPv4 header checksum."""
    if forwarded[0] >> 4 == 6:
        assert forwarded[7] == TTL - 1
        return forwarded[:7] + bytes([TTL]) + forwarded[8:]
    assert forwarded[8] == TTL - 1
    before = twin.with_ipv4_checksum(forwarded[:8] + bytes([TTL]) + forwarded[9:])
    assert twin.one_hop_less(before) == forwarded  # the kernel's header checksum was right
    return before


def ours(superpacket: bytes, header: vnet.VnetHeader) -> list[bytes]:
    scratch = memoryview(bytearray(65535))
    return [bytes(piece) for piece in segment.segments(memoryview(superpacket), header, scratch)]


def compare(scene: Scene, name: str, length: int, size: int, **fields) -> list[bytes]:
    shape = SHAPES[name]
    superpacket = shape.make(body(length), ttl=TTL, **fields)
    offset = 16 if shape.protocol == TCP else 6
    header = vnet.VnetHeader(1, shape.gso_type, shape.header_length, size, shape.start, offset)
    mine = ours(superpacket, header)
    kernels = [as_sent(one) for one in scene.kernel(superpacket, header, len(mine))]
    assert kernels == mine
    assert mine == twin.segments(superpacket, shape.gso_type, size, shape.start)
    return mine


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [100, 1201, 1280])
def test_payloads_around_multiples_of_the_size(scene, name, size):
    for count in (2, 3, 7, 46):
        for more in (-1, 0, 1):
            if count * size + more + 120 <= 65535:
                assert len(compare(scene, name, count * size + more, size, flags=ACK | PSH)) == count + (more > 0)


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].protocol == TCP])
def test_tcp_flags(scene, name):
    for flags in (ACK, ACK | PSH, ACK | FIN, ACK | FIN | PSH, ACK | ECE, ACK | CWR, ACK | CWR | ECE | PSH | FIN):
        compare(scene, name, 3500, 1000, flags=flags)


@pytest.mark.parametrize("name", ["tcp4", "tcp6"])
@pytest.mark.parametrize("seq", [2**32 - 1, 2**32 - 1000, 2**32 - 1001, 2**32 - 2500, 2**31 - 1])
def test_the_sequence_number_wraps_around(scene, name, seq):
    compare(scene, name, 5000, 1000, seq=seq)


@pytest.mark.parametrize("name", ["tcp4", "udp4"])
@pytest.mark.parametrize("fragment", [0, 0x4000])
@pytest.mark.parametrize("identification", [0, 65535, 65533])
def test_the_identification_wraps_around(scene, name, fragment, identification):
    compare(scene, name, 5000, 1000, identification=identification, fragment=fragment)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1213, 1380])
def test_a_total_length_of_65535(scene, name, size):
    compare(scene, name, 65535 - SHAPES[name].header_length, size)


@pytest.mark.parametrize("name", ["udp4", "udp6"])
def test_a_udp_checksum_that_computes_to_zero(scene, name):
    shape = SHAPES[name]
    payload = bytearray(body(3000))
    field = shape.start + 6
    for index in range(3):
        where = 1000 * index + 998
        payload[where : where + 2] = b"\0\0"
        whole = twin.segments(shape.make(bytes(payload)), shape.gso_type, 1000, shape.start)[index]
        payload[where : where + 2] = whole[field : field + 2]
    superpacket = shape.make(bytes(payload), ttl=TTL)
    header = vnet.VnetHeader(1, shape.gso_type, shape.header_length, 1000, shape.start, 6)
    mine = ours(superpacket, header)
    assert [packet[field : field + 2] for packet in mine] == [b"\xff\xff"] * 3
    assert [as_sent(one) for one in scene.kernel(superpacket, header, 3)] == mine


@pytest.mark.parametrize("name", ["tcp4", "udp6"])
@pytest.mark.parametrize("traffic", [1, 2, 0xB8])
def test_the_traffic_class_is_copied(scene, name, traffic):
    compare(scene, name, 2500, 1000, tos=traffic)
