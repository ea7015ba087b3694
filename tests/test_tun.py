"""What only a real TUN can show."""

import errno
import os
import socket
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
