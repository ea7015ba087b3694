"""A line for each packet: what it says, and what happens when nobody can hear it."""

import time

import pytest
from packets import echo, mac, table_of, tcp, underlay_host
from test_capture import HEADER_LENGTHS, PORTS, big_tcp
from test_node import Machine, World

from dataplane.device.memory import MemoryDevice
from dataplane.engine import Engine
from dataplane.trace import Tracer, TracingDevice, TracingUnderlay
from dataplane.underlay.fake import FakeNetwork
from dataplane.verdict import Verdict

NOW = 1_700_000_000_123_456_789
CLOCK = time.strftime("%H:%M:%S", time.localtime(1_700_000_000)) + ".123456"


class Traced:
    """A node on a fake network, pumped by hand, with the lines that it traces."""

    def __init__(self, network: FakeNetwork, node: int, framing: str, family: int = 4) -> None:
        self.lines: list[str] = []
        tracer = Tracer(self.lines.append, now_ns=lambda: NOW)
        self.memory = MemoryDevice("flannel.1")
        self.fake = network.attach(PORTS[framing], underlay_host(node, family))
        underlay = TracingUnderlay(
            self.fake, tracer, hosts={family: underlay_host(node, family)}, port=PORTS[framing],
            header_length=HEADER_LENGTHS[framing],
        )  # fmt: skip
        table = table_of(node, [3 - node], framing, family, port=PORTS[framing])
        self.engine = Engine(TracingDevice(self.memory, tracer), underlay, table, now=lambda: 0.0)


def pair(framing: str = "vxlan", family: int = 4) -> tuple[Traced, Traced]:
    network = FakeNetwork()
    return Traced(network, 1, framing, family), Traced(network, 2, framing, family)


INNER = "IPv4 10.1.1.5 → 10.1.2.5, TTL {}, 48 bytes; ICMP echo request, id 1, sequence 1"


def test_the_way_of_a_packet_in_vxlan():
    a, b = pair()
    a.memory.inject(echo())
    a.engine.pump_outbound()
    b.engine.pump_inbound()
    inner = INNER.format(64)
    macs = f"{mac(1).hex(':')} → {mac(2).hex(':')}"
    port = a.fake._network.crossed[0].source_port
    assert a.lines == [
        f"{CLOCK} out flannel.1: {inner}",
        f"{CLOCK} out 192.0.2.1:{port} → 192.0.2.2:8472: VXLAN flags 0x08, VNI 1; Ethernet {macs}, type 0x0800; {inner}",
    ]
    assert b.lines == [
        f"{CLOCK} in  192.0.2.1 → 192.0.2.2:8472: VXLAN flags 0x08, VNI 1; Ethernet {macs}, type 0x0800; {inner}",
        f"{CLOCK} in  flannel.1: {inner}",
    ]


def test_the_way_of_a_packet_in_the_ip_framing_over_ipv6():
    a, b = pair("ip", 6)
    a.memory.inject(echo())
    a.engine.pump_outbound()
    b.engine.pump_inbound()
    port = a.fake._network.crossed[0].source_port
    assert a.lines[1] == f"{CLOCK} out [2001:db8::1]:{port} → [2001:db8::2]:8285: {INNER.format(63)}"
    assert b.lines == [
        f"{CLOCK} in  2001:db8::1 → [2001:db8::2]:8285: {INNER.format(63)}",
        f"{CLOCK} in  flannel.1: {INNER.format(62)}",
    ]


def test_a_superpacket_says_so_and_each_of_its_datagrams_has_a_line():
    a, b = pair()
    a.memory.inject(*big_tcp(5))
    a.engine.pump_outbound()
    assert a.lines[0].endswith("TCP 1000 → 2000, flags ACK, sequence 7, 5000 bytes of payload, 5 segments of 1000 bytes")
    assert len(a.lines) == 6
    b.engine.pump_inbound()
    assert len(b.lines) == 6
    assert b.lines[5].endswith(", 5 segments of 1000 bytes")


def test_a_virtio_net_header_that_makes_no_sense_is_told():
    a, _ = pair()
    _, header = big_tcp(5)
    for packet in (tcp(version=6), tcp()[:30], tcp()[:1], b""):
        a.memory.inject(packet, header)
    a.engine.pump_outbound()
    told = ["a superpacket whose virtio-net header contradicts it" in line for line in a.lines]
    assert told == [True, True, True, False]
    assert a.lines[3].endswith("payload 0 bytes")


@pytest.mark.parametrize(("verdict", "said"), [(Verdict.TOO_BIG, "too_big"), (Verdict.QUEUE_FULL, "queue_full")])
def test_a_refusal_has_its_verdict(verdict, said):
    a, _ = pair()
    a.fake.refuse[underlay_host(2)] = verdict
    a.memory.inject(tcp())
    a.engine.pump_outbound()
    assert f" [not sent: {said} (" in a.lines[1]


def test_nobody_who_listens_ends_the_trace_and_not_the_node(caplog):
    a, b = pair()

    def refuse(line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    tracer = Tracer(refuse)
    device = TracingDevice(a.memory, tracer)
    engine = Engine(device, a.fake, a.engine.table, now=lambda: 0.0)
    for _ in range(3):
        a.memory.inject(echo())
        engine.pump_outbound()
        b.engine.pump_inbound()
    assert len(b.memory.delivered) == 3
    assert caplog.messages == ["nothing more is traced: [Errno 32] Broken pipe"]


async def test_a_node_traces_on_stderr(tmp_path, capsys):
    async with Machine(World(tmp_path), 1, trace=True).running() as a:
        a.device.inject(echo())
        while not (said := capsys.readouterr().err):
            await _turn()
        assert INNER.format(64) in said


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)
