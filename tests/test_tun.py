"""What only a real TUN can show."""

import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from packets import octets
from scapy.layers.inet import IP, UDP
from scapy.packet import Raw

from dataplane.batch import Batch
from dataplane.device import DeviceLostError
from dataplane.device.memory import MemoryDevice
from dataplane.device.tun import TunDevice, TunError, _explain, open_tun
from dataplane.lab import Lab, Namespace, inside
from dataplane.offload import Offloads
from dataplane.verdict import Verdict
from encap import vnet

pytestmark = pytest.mark.netns


@pytest.fixture
def namespace():
    with Lab("tun") as lab:
        yield Namespace(lab, lab.new_namespace("a"))


@pytest.fixture
def device(namespace):
    namespace.sysctl({"net/ipv6/conf/default/disable_ipv6": "1"})  # its neighbour discovery would speak in between
    with inside(namespace.name):
        device = open_tun("tun7", 1450)
    namespace.ip("link set lo up", "addr add 10.1.2.5/32 dev tun7", "link set tun7 up", "route add 10.1.1.0/24 dev tun7")
    yield device
    device.close()


def write(device: TunDevice, packet: bytes, *header: int) -> int:
    batch = Batch(1)
    batch.put(packet)
    vnet.store(batch.vnet, 0, *header)
    batch.verdict[0] = Verdict.FORWARDED
    device.transmit(batch)
    return batch.verdict[0]


def packet_with_partial_checksum() -> bytes:
    packet = bytearray(octets(IP(src="10.1.1.5", dst="10.1.2.5") / UDP(sport=1, dport=4000) / Raw(b"hello")))
    pseudo = sum(int.from_bytes(packet[i : i + 2], "big") for i in range(12, 20, 2)) + 17 + 13
    packet[26:28] = ((pseudo & 0xFFFF) + (pseudo >> 16)).to_bytes(2, "big")
    return bytes(packet)


def test_a_partial_checksum_reaches_the_socket_only_with_its_header(namespace, device):
    with inside(namespace.name):
        listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with listener:
        listener.bind(("10.1.2.5", 4000))
        listener.setblocking(False)
        packet = packet_with_partial_checksum()
        assert write(device, packet, 0, 0, 0, 0, 0, 0) == Verdict.FORWARDED
        with pytest.raises(BlockingIOError):
            listener.recv(100)
        assert write(device, packet, vnet.FLAG_NEEDS_CSUM, 0, 0, 0, 20, 6) == Verdict.FORWARDED
        assert listener.recv(100) == b"hello"


def test_the_memory_device_finishes_the_checksum_as_the_kernel_does():
    device = MemoryDevice()
    write(device, packet_with_partial_checksum(), vnet.FLAG_NEEDS_CSUM, 0, 0, 0, 20, 6)
    assert device.delivered == [octets(IP(src="10.1.1.5", dst="10.1.2.5") / UDP(sport=1, dport=4000) / Raw(b"hello"))]


def test_what_the_kernel_does_not_take_is_a_device_error(device):
    assert write(device, packet_with_partial_checksum(), vnet.FLAG_NEEDS_CSUM, 99, 0, 0, 20, 6) == Verdict.DEVICE_ERROR


def test_a_link_that_is_down_drops_and_receives_nothing(namespace, device):
    namespace.ip("link set tun7 down")
    assert write(device, packet_with_partial_checksum(), 0, 0, 0, 0, 0, 0) == Verdict.DEVICE_ERROR
    batch = Batch(4)
    device.receive(batch)
    assert batch.count == 0


def test_a_deleted_device_is_lost(namespace, device):
    namespace.ip("link del tun7")
    with pytest.raises(DeviceLostError, match="tun7 is gone"):
        device.receive(Batch(4))
    with pytest.raises(DeviceLostError, match="tun7 is gone"):
        write(device, packet_with_partial_checksum(), 0, 0, 0, 0, 0, 0)


class Traffic:
    """A UDP socket of the host, on tun7's address."""

    def __init__(self, namespace: Namespace) -> None:
        with inside(namespace.name):
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("10.1.2.5", 4000))
        self._socket.setblocking(False)

    def __enter__(self) -> "Traffic":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, payload: bytes, *, segment: int = 0) -> None:
        ancillary = [(socket.IPPROTO_UDP, 103, struct.pack("=H", segment))] if segment else []  # UDP_SEGMENT of udp(7)
        self._socket.sendmsg([payload], ancillary, 0, ("10.1.1.5", 4000))

    def goes_both_ways(self, device: TunDevice) -> bool:
        """Whether a datagram gets out and another in, each with its checksum."""
        self.send(b"out")
        sent = [packet[28:] for packet, _ in received(device)]
        write(device, packet_with_partial_checksum(), vnet.FLAG_NEEDS_CSUM, 0, 0, 0, 20, 6)
        return (sent, self._socket.recv(100)) == ([b"out"], b"hello")


def received(device: TunDevice) -> list[tuple[bytes, int]]:
    """What waits: packets, and the GSO type of each."""
    batch = Batch(64)
    device.receive(batch)
    return [(bytes(batch.packet(i)), batch.vnet_header(i)[1]) for i in range(batch.count)]


def link(namespace: Namespace) -> dict:
    found = json.loads(namespace.run(["ip", "-j", "link", "show", "tun7"]).stdout)[0]
    return {"index": found["ifindex"], "carrier": "LOWER_UP" in found["flags"]}


def routes(namespace: Namespace) -> str:
    return namespace.run(["ip", "route", "show", "table", "all", "dev", "tun7"]).stdout.replace(" linkdown", "")


def reopened(namespace: Namespace, offloads: Offloads | None = None) -> TunDevice:
    with inside(namespace.name):
        return open_tun("tun7", 1450, offloads)


def test_a_kept_device_outlives_its_closing_and_is_taken_over(namespace, device):
    before, table = link(namespace), routes(namespace)
    assert (before["carrier"], "10.1.1.0/24" in table) == (True, True)
    device.keep()
    device.keep()
    with subprocess.Popen(
        ["ip", "-n", namespace.name, "-o", "monitor", "route", "address"], stdout=subprocess.PIPE, text=True
    ) as monitor:
        device.close()
        assert link(namespace) == before | {"carrier": False}
        assert routes(namespace) == table
        device = reopened(namespace)
        assert (link(namespace), routes(namespace)) == (before, table)
        namespace.ip("route add 10.7.7.0/24 dev tun7")  # a last event, after which none can follow
        told = []
        while not told or "10.7.7.0" not in told[-1]:
            told.append(monitor.stdout.readline())
        monitor.terminate()
    assert [line for line in told[:-1] if "10.1." in line] == []
    with Traffic(namespace) as traffic:
        assert traffic.goes_both_ways(device)
    device.close()
    assert link(namespace) == before | {"carrier": False}


def test_what_was_sent_while_nobody_was_attached_is_gone_and_does_no_harm(namespace, device):
    device.keep()
    with Traffic(namespace) as traffic:
        for i in range(5):
            traffic.send(b"queued %d" % i)
        device.close()
        for i in range(2000):  # more than the queue holds
            traffic.send(b"lost %d" % i)
        device = reopened(namespace)
        assert received(device) == []
        assert traffic.goes_both_ways(device)
    device.close()


def test_offloads_are_those_of_the_last_start(namespace, device):
    """A superpacket comes in one piece with USO, and in three packets without."""
    with Traffic(namespace) as traffic:
        for start, offloads in enumerate([Offloads(), None, Offloads(), Offloads.none()]):
            device.keep()
            device.close()
            device = reopened(namespace, offloads)
            traffic.send(b"x" * 250, segment=100)
            lengths = [(len(packet) - 28, kind) for packet, kind in received(device)]
            assert lengths == ([(100, 0), (100, 0), (50, 0)] if start % 2 else [(250, vnet.GSO_UDP_L4)])
            assert traffic.goes_both_ways(device)
    device.close()


def test_a_device_of_other_flags_is_taken_over(namespace):
    """As `ip tuntap` or another program leaves it: without the virtio-net header, or with a longer one."""
    namespace.sysctl({"net/ipv6/conf/default/disable_ipv6": "1"})
    namespace.ip("tuntap add tun7 mode tun pi", "link set lo up", "addr add 10.1.2.5/32 dev tun7", "link set tun7 up")
    namespace.ip("route add 10.1.1.0/24 dev tun7")
    index = link(namespace)["index"]
    device = reopened(namespace)
    with Traffic(namespace) as traffic:
        assert traffic.goes_both_ways(device)
        fcntl.ioctl(device._fd, 0x400454D8, struct.pack("=i", 12))  # TUNSETVNETHDRSZ
        device.close()
        device = reopened(namespace)
        assert traffic.goes_both_ways(device)
    assert link(namespace)["index"] == index
    device.close()


def test_a_killed_process_leaves_its_kept_device(namespace):
    script = (
        "import signal; from dataplane.device.tun import open_tun\n"
        "device = open_tun('tun7', 1450); device.keep(); print('kept', flush=True); signal.pause()"
    )
    process = namespace.popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == "kept\n"
    namespace.ip("link set tun7 up")
    before = link(namespace)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert link(namespace) == before | {"carrier": False}
    device = reopened(namespace)
    assert link(namespace) == before
    device.close()


def test_a_kept_device_can_be_deleted_while_it_is_open(namespace, device):
    device.keep()
    namespace.ip("link del tun7")
    with pytest.raises(DeviceLostError, match="tun7 is gone"):
        device.receive(Batch(4))
    with pytest.raises(DeviceLostError, match="tun7 is gone"):
        device.keep()


@pytest.mark.parametrize("kind", ["mode tap", "mode tun multi_queue"])
def test_a_kept_device_of_another_kind_is_refused_with_a_reason(namespace, kind):
    namespace.ip(f"tuntap add tun7 {kind}")
    with inside(namespace.name), pytest.raises(TunError, match=r"tun7 exists that is no TUN of this kind"):
        open_tun("tun7", 1450)
    with inside(namespace.name), pytest.raises(TunError, match=r"tun7 exists that is no TUN of this kind"):
        open_tun("tun7", 1450)  # the first try leaves nothing attached


def test_the_descriptor_is_not_inherited_and_does_not_block(device):
    fd = device._fd
    assert not os.get_inheritable(fd)
    assert not os.get_blocking(fd)


def test_a_second_attachment_is_refused_with_a_reason(namespace, device):
    with inside(namespace.name), pytest.raises(TunError, match="another process is attached to tun7"):
        open_tun("tun7", 1450)


def test_a_name_that_is_taken_by_another_kind_is_refused_with_a_reason(namespace):
    namespace.ip("link add flannel.1 type vxlan id 1 dstport 8472 local 127.0.0.1")
    with inside(namespace.name), pytest.raises(TunError, match=r"flannel\.1 exists that is no TUN"):
        open_tun("flannel.1", 1450)


@pytest.mark.parametrize(
    ("number", "part"),
    [(errno.EPERM, "CAP_NET_ADMIN"), (errno.EACCES, "no access to /dev/net/tun"), (errno.ENODEV, "no TUN driver")],
)
def test_refusals_say_what_to_do(number, part):
    assert part in _explain("flannel.1", OSError(number, os.strerror(number)))


def test_a_missing_device_node_is_named(monkeypatch):
    monkeypatch.setattr("dataplane.device.tun._TUN", Path("/nowhere/tun"))
    assert "modprobe tun" in _explain("flannel.1", OSError(errno.ENOENT, "x"))
