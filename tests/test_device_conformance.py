"""One suite for every device: the contract of dataplane/device/__init__.py.

A harness plays the host's part: it sends packets into the device and sees what the device delivered.
"""

import asyncio
import io
import random
import socket
from collections.abc import Iterator

import pytest
from packets import tcp, udp

from dataplane.batch import Batch
from dataplane.capture import CapturingDevice, Recorder
from dataplane.device import Device
from dataplane.device.memory import MemoryDevice
from dataplane.device.tun import open_tun
from dataplane.faults import FaultyDevice
from dataplane.lab import Lab, inside
from dataplane.trace import Tracer, TracingDevice
from dataplane.underlay.link import LinkSpec
from dataplane.verdict import Verdict

ETH_P_ALL = 3


class MemoryHarness:
    def __init__(self) -> None:
        self.memory = MemoryDevice()
        self.device: Device = self.memory

    def exists(self) -> bool:
        return self.memory.kept

    def send(self, packet: bytes) -> None:
        self.memory.inject(packet)

    def seen(self) -> list[bytes]:
        return list(self.memory.delivered)

    def close(self) -> None:
        self.device.close()


class TunHarness:
    """A TUN in a namespace of its own, and a packet socket on it as the host."""

    def __init__(self) -> None:
        self.lab = Lab("dev")
        self.lab.__enter__()
        self.name = name = self.lab.new_namespace("a")
        with inside(name):
            self.device: Device = open_tun("tun7", 1450)
            self.lab.underlay.__class__(self.lab, name).ip("link set tun7 mtu 1450 up")
            self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            self.socket.bind(("tun7", ETH_P_ALL))
            self.socket.setblocking(False)

    def exists(self) -> bool:
        return bool(self.lab.underlay.__class__(self.lab, self.name).run("ip link show tun7").stdout)

    def send(self, packet: bytes) -> None:
        self.socket.sendto(packet, ("tun7", 0x0800 if packet[0] >> 4 == 4 else 0x86DD))

    def seen(self) -> list[bytes]:
        found = []
        try:
            while True:
                data, source = self.socket.recvfrom(65535)
                if source[2] == socket.PACKET_HOST:
                    found.append(data)
        except BlockingIOError:
            return found

    def close(self) -> None:
        self.socket.close()
        self.device.close()
        self.lab.close()


def tapped(device: Device) -> Device:
    """With both taps around it."""
    return TracingDevice(CapturingDevice(device, Recorder(io.BytesIO())), Tracer(lambda line: None))


def perfect(device: Device) -> Device:
    """Behind a link that does nothing."""
    return FaultyDevice(device, LinkSpec(), random.Random(1))


def linked(device: Device) -> Device:
    """Behind a link that might do something, but nothing is that large."""
    return FaultyDevice(device, LinkSpec(mtu=70_000), random.Random(1))


WRAPPERS = {"tapped": tapped, "perfect": perfect, "linked": linked}


@pytest.fixture(
    params=[
        "memory",
        "tapped memory",
        "perfect memory",
        "linked memory",
        pytest.param("tun", marks=pytest.mark.netns),
        pytest.param("tapped tun", marks=pytest.mark.netns),
        pytest.param("linked tun", marks=pytest.mark.netns),
    ]
)
def harness(request) -> Iterator[MemoryHarness | TunHarness]:
    made = MemoryHarness() if request.param.endswith("memory") else TunHarness()
    if wrapper := WRAPPERS.get(request.param.split()[0]):
        made.device = wrapper(made.device)
    yield made
    made.close()


def received(device: Device, capacity: int = 64) -> list[bytes]:
    """What one receive brings, without what the kernel sends on its own account (IPv6 multicast)."""
    batch = Batch(capacity)
    device.receive(batch)
    packets = [bytes(batch.packet(i)) for i in range(batch.count)]
    return [packet for packet in packets if not (packet[0] >> 4 == 6 and packet[24] == 0xFF)]


def test_receives_nothing_when_there_is_nothing(harness):
    assert received(harness.device) == []


def test_receives_what_the_host_sends_in_order(harness):
    packets = [udp(payload=bytes([i]) * (i * 37 + 1)) for i in range(30)] + [udp(version=6), tcp(version=6)]
    for packet in packets:
        harness.send(packet)
    assert received(harness.device) == packets


def test_a_full_batch_leaves_the_rest_for_the_next(harness):
    received(harness.device)
    packets = [udp(payload=bytes([i])) for i in range(10)]
    for packet in packets:
        harness.send(packet)
    got = received(harness.device, 4)
    while more := received(harness.device, 4):
        assert len(more) <= 4
        got += more
    assert got == packets


def test_columns_describe_what_was_received_and_nothing_else_is_touched(harness):
    batch = Batch(3)
    batch.data[:] = b"\xa5" * len(batch.data)
    received(harness.device)
    packet = udp(payload=b"z" * 100)
    harness.send(packet)
    harness.device.receive(batch)
    assert batch.count == 1
    at, length = batch.offset[0], batch.length[0]
    assert bytes(batch.data[at : at + length]) == packet
    assert batch.verdict[0] == Verdict.PENDING
    assert set(batch.data[:at]) == {0xA5}
    assert bytes(batch.vnet_header(0)) == bytes(10)
    assert set(batch.data[at + length :]) == {0xA5}


def transmit(device: Device, packets: list[bytes], dropped: frozenset[int] = frozenset()) -> Batch:
    batch = Batch(len(packets))
    for packet in packets:
        batch.put(packet)
    for i in range(len(packets)):
        batch.verdict[i] = Verdict.NO_ROUTE if i in dropped else Verdict.FORWARDED
    device.transmit(batch)
    return batch


def test_delivers_what_is_forwarded_in_order_and_nothing_else(harness):
    packets = [udp(payload=bytes([i]) * (i + 1)) for i in range(20)] + [tcp(version=6)]
    batch = transmit(harness.device, packets, dropped=frozenset({3, 7}))
    assert harness.seen() == [packet for i, packet in enumerate(packets) if i not in {3, 7}]
    assert list(batch.verdict) == [Verdict.NO_ROUTE if i in {3, 7} else Verdict.FORWARDED for i in range(21)]


def test_a_packet_far_above_the_mtu_is_delivered(harness):
    packet = udp(payload=b"x" * 8000)
    transmit(harness.device, [packet])
    assert harness.seen() == [packet]


async def test_watch_calls_until_nothing_is_left_and_unwatch_ends_it(harness):
    device, got, quiet = harness.device, [], asyncio.Event()

    def ready() -> None:
        got.extend(received(device, 1))
        if len(got) == 5:
            quiet.set()

    packets = [udp(payload=bytes([i])) for i in range(6)]
    harness.send(packets[0])
    device.watch(ready)
    for packet in packets[1:5]:
        harness.send(packet)
    await asyncio.wait_for(quiet.wait(), 5)
    device.unwatch()
    harness.send(packets[5])
    for _ in range(5):
        await asyncio.sleep(0)
    assert got == packets[:5]


def test_closing_twice_does_no_harm(harness):
    harness.device.close()
    harness.device.close()


@pytest.mark.parametrize("kept", [True, False])
def test_only_a_kept_device_is_there_after_closing(harness, kept):
    for _ in range(2 if kept else 0):
        harness.device.keep()
    harness.device.close()
    assert harness.exists() == kept


def test_the_mtu_can_be_changed(harness):
    assert harness.device.mtu == 1450
    harness.device.mtu = 1400
    assert harness.device.mtu == 1400
