"""A line for each packet: what it says, and what happens when nobody can hear it."""

import asyncio
import time

import pytest
from packets import echo, mac, table_of, tcp, udp, underlay_host
from test_capture import HEADER_LENGTHS, PORTS, big_tcp
from test_describe import nested
from test_node import Machine, World

from dataplane.device.memory import MemoryDevice
from dataplane.engine import Engine
from dataplane.trace import Tracer, TracingDevice, TracingUnderlay
from dataplane.underlay.fake import Datagram, FakeNetwork
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
        self.device = TracingDevice(self.memory, tracer)
        self.underlay = TracingUnderlay(
            self.fake, tracer, hosts={family: underlay_host(node, family)}, port=PORTS[framing],
            header_length=HEADER_LENGTHS[framing],
        )  # fmt: skip
        table = table_of(node, [3 - node], framing, family, port=PORTS[framing])
        self.engine = Engine(self.device, self.underlay, table, now=lambda: 0.0)


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


def test_a_strangers_tunnels_in_tunnels_are_one_line():
    a, _ = pair()
    payload = nested(260, echo())
    a.fake._network.send(Datagram("203.0.113.9", underlay_host(1), PORTS["vxlan"], payload))
    a.engine.pump_inbound()
    assert a.engine.inbound.verdicts[Verdict.UNKNOWN_VTEP] == 1
    (line,) = a.lines
    assert line.count("VXLAN") == 2
    assert line.endswith("payload 12920 bytes [from a host that is in no lease]")


def test_what_cannot_be_shown_is_told_once_and_carried_on(caplog):
    network = FakeNetwork(mtu=1400)
    a, b = Traced(network, 1, "vxlan"), Traced(network, 2, "vxlan")

    def fail(line: str) -> None:
        raise RecursionError("too deep")

    taps = [one for node in (a, b) for one in (node.device, node.underlay)]
    for tap in taps:
        tap._tracer._write = fail
    plain, oversized = udp(payload=b"x"), udp(payload=bytes(1390))
    for _ in range(3):
        a.memory.inject(plain)
        a.memory.inject(oversized)
        a.engine.pump_outbound()
        b.engine.pump_inbound()
    assert b.memory.delivered == [plain, oversized] * 3
    # The oversized ones were refused before they went in fragments.
    assert [tap.unseen for tap in taps] == [6, 9, 6, 6]
    assert len(caplog.messages) == 4
    assert "TracingUnderlay cannot show a packet, which is carried on: RecursionError('too deep')" in caplog.messages[1]


async def test_a_node_traces_on_stderr(tmp_path, capsys):
    async with Machine(World(tmp_path), 1, trace=True).running() as a:
        a.device.inject(echo())
        said = ""
        async with asyncio.timeout(10):
            while INNER.format(64) not in said:
                said += capsys.readouterr().err
                await asyncio.sleep(0)
