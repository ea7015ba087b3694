"""Packets for tests, built by scapy, and a fake pair of nodes."""

from ipaddress import ip_address, ip_network

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet, Raw

from dataplane.device.memory import MemoryDevice
from dataplane.engine import Engine
from dataplane.underlay.fake import FakeNetwork, FakeUnderlay
from routing.lease import derive_vtep_mac
from routing.route import Route
from routing.table import Identity, Table, build

PORT = 8472


def octets(packet: Packet) -> bytes:
    """The packet's bytes, with all lengths and checksums filled in."""
    return bytes(packet)


def pod(node: int, version: int = 4) -> str:
    """The address of the pod on node `node`."""
    return f"10.1.{node}.5" if version == 4 else f"fd00:0:0:{node}::5"


def udp(source: int = 1, destination: int = 2, version: int = 4, payload: bytes = b"payload", **fields) -> bytes:
    layer = IP if version == 4 else IPv6
    header = layer(src=pod(source, version), dst=pod(destination, version), **fields)
    return octets(header / UDP(sport=1000, dport=2000) / Raw(payload))


def tcp(source: int = 1, destination: int = 2, version: int = 4, payload: bytes = b"payload", **fields) -> bytes:
    layer = IP if version == 4 else IPv6
    header = layer(src=pod(source, version), dst=pod(destination, version), **fields)
    return octets(header / TCP(sport=1000, dport=2000, flags="A", seq=7, ack=9) / Raw(payload))


def echo(source: int = 1, destination: int = 2, **fields) -> bytes:
    return octets(IP(src=pod(source), dst=pod(destination), **fields) / ICMP(type=8, id=1, seq=1) / Raw(b"x" * 20))


def underlay_host(node: int, version: int = 4) -> str:
    return f"192.0.2.{node}" if version == 4 else f"2001:db8::{node}"


def mac(node: int) -> bytes:
    return derive_vtep_mac(ip_address(underlay_host(node)))


def table_of(node: int, peers: list[int], framing: str = "vxlan", underlay: int = 4, **identity) -> Table:
    """The table of node `node` with IPv4 and IPv6 subnets and the given peers, over one underlay family."""
    routes = [
        Route(
            ip_network(net),
            ip_address(underlay_host(peer, underlay)),
            mac(peer),
            (ip_address(underlay_host(peer, underlay)),),
        )
        for peer in peers
        for net in (f"10.1.{peer}.0/24", f"fd00:0:0:{peer}::/64")
    ]
    own = {
        "framing": framing,
        "subnet": ip_network(f"10.1.{node}.0/24"),
        "ipv6_subnet": ip_network(f"fd00:0:0:{node}::/64"),
        "port": PORT,
        "vtep_mac": mac(node),
        "network": ip_network("10.1.0.0/16"),
    }
    return build(Identity(**(own | identity)), routes)


class FakeNode:
    """An engine over a memory device, on a fake network; pumped by hand, so no event loop is needed."""

    def __init__(self, network: FakeNetwork, node: int, peers: list[int], **options) -> None:
        self.number = node
        self.device = MemoryDevice(mtu=options.pop("mtu", 1450))
        now = options.pop("now", lambda: 0.0)
        hosts = options.pop("hosts", [underlay_host(node, options.get("underlay", 4))])
        self.underlay: FakeUnderlay = network.attach(PORT, *hosts)
        self.engine = Engine(self.device, self.underlay, table_of(node, peers, **options), now=now)

    def pump(self) -> None:
        self.engine.pump_outbound()
        self.engine.pump_inbound()


def exchange(*nodes: FakeNode) -> None:
    """Pump every node until nothing moves."""
    while True:
        before = [(n.engine.outbound.received, n.engine.inbound.received) for n in nodes]
        for node in nodes:
            node.pump()
        if before == [(n.engine.outbound.received, n.engine.inbound.received) for n in nodes]:
            return
