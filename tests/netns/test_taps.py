"""Two nodes in namespaces that capture and trace: what the file shows is what went over the wire, and all still adds up."""

import re
import subprocess
from ipaddress import ip_address
from pathlib import Path

import pytest
from cluster import IPV6_NETWORK, NETWORK, Cluster, Tap, add_up, cluster, pings, transfer, tshark
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.utils import RawPcapNgReader

from dataplane.lab import Host

pytestmark = pytest.mark.netns


def read(path: Path) -> list[tuple[str, str, bytes]]:
    """Interface, direction and bytes of each packet."""
    found = []
    reader = RawPcapNgReader(str(path))
    try:
        while True:
            packet, about = reader._read_packet()
            found.append((about.ifname.decode(), {1: "in", 2: "out"}[about.direction], packet))
    except EOFError:
        reader.close()
        return found


def start_both(made: Cluster, framing: str) -> tuple[Host, Host]:
    a, b = made.lab.hosts
    for host in (a, b):
        made.start(
            host, "--network", NETWORK, "--ipv6-network", IPV6_NETWORK, "--framing", framing, "--trace",
            "--capture", str(made.folder / f"{host.number}.pcapng"),
        )  # fmt: skip
    for host in (a, b):
        made.add_pod(host)
        made.wait_for_peers(host, 2)
    return a, b


def udp_payloads(packets: list[bytes], source: object) -> list[bytes]:
    """The payloads of the datagrams from `source`."""
    found = [IP(packet) if packet[0] >> 4 == 4 else IPv6(packet) for packet in packets]
    return [bytes(one[UDP].payload) for one in found if ip_address(one.src) == source]


@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_what_is_captured_is_what_went_over_the_wire(tmp_path, framing):
    port = 8472 if framing == "vxlan" else 8285
    with cluster(tmp_path, start=False) as made:
        a, b = start_both(made, framing)
        pod_a, pod_b = a.pods[0], b.pods[0]
        with Tap(a.name, "eth0") as wire:
            assert pings(pod_a, pod_b.ipv4)
            assert pings(pod_b, pod_a.ipv6)
            frames = wire.caught()
        assert transfer(pod_a, pod_b, 4, 5)
        assert transfer(pod_b, pod_a, 6, 5)
        statuses = [made.status(host) for host in (a, b)]
        assert [made.stop(host) for host in (a, b)] == [0, 0]
        logs = [made.log(host) for host in (a, b)]

    for status in statuses:
        assert add_up(status)
        assert status["capture"]["stopped"] is None
        assert status["send_errors"] == {}
        assert len(status["source_ports"]["ipv4"]) == (8 if framing == "vxlan" else 1)

    for host, peer in ((a, b), (b, a)):
        path = tmp_path / f"{host.number}.pcapng"
        done = subprocess.run(["capinfos", "-M", path], capture_output=True, text=True, check=True)
        assert "Number of interfaces in file: 2" in done.stdout
        assert len(read(path)) >= statuses[host.number - 1]["capture"]["packets"] > 100
        if framing == "vxlan":
            judge_by_tshark(path, host, peer)

    on_wire = [frame[14:] for frame in frames if frame[12:14] in {b"\x08\x00", b"\x86\xdd"}]
    on_wire = [packet for packet in on_wire if _destination_port(packet) == port]
    captured = [packet for name, _, packet in read(tmp_path / f"{a.number}.pcapng") if name == "eth0"]
    for source, underlay in ((a, 4), (b, 4), (a, 6), (b, 6)):
        address = source.ipv4 if underlay == 4 else source.ipv6
        expected, found = udp_payloads(on_wire, address), udp_payloads(captured, address)
        assert len(expected) >= 3  # each family's ping has its underlay
        at = found.index(expected[0])
        assert found[at : at + len(expected)] == expected
    sent = {(p[0] >> 4, _source_port(p)) for p in on_wire if _is_from(p, a)}
    assert sent <= {(p[0] >> 4, _source_port(p)) for p in captured if _is_from(p, a)}

    for log in logs:
        assert re.search(r"^\d\d:\d\d:\d\d\.\d{6} out \S+: IPv4 .*ICMP echo", log, re.MULTILINE)
        assert re.search(rf"^\S+ out 192\.0\.2\.\d:\d+ → 192\.0\.2\.\d:{port}: ", log, re.MULTILINE)
        assert re.search(rf"^\S+ in  192\.0\.2\.\d → 192\.0\.2\.\d:{port}: ", log, re.MULTILINE)
        assert re.search(r"TCP .*, \d+ segments of \d+ bytes$", log, re.MULTILINE)
        assert "Traceback" not in log


def _transport(packet: bytes) -> int:
    return 20 if packet[0] >> 4 == 4 else 40


def _destination_port(packet: bytes) -> int:
    return int.from_bytes(packet[_transport(packet) + 2 :][:2], "big")


def _source_port(packet: bytes) -> int:
    return int.from_bytes(packet[_transport(packet) :][:2], "big")


def _is_from(packet: bytes, host: Host) -> bool:
    source = packet[12:16] if packet[0] >> 4 == 4 else packet[8:24]
    return source in {host.ipv4.packed, host.ipv6.packed}


def judge_by_tshark(path: Path, host: Host, peer: Host) -> None:
    """VXLAN is decoded to the bottom in both directions, and nothing is malformed."""
    rows = tshark(
        path, "frame.packet_flags_direction", "udp.checksum.status", "ip.checksum.status", "vxlan.vni", "ip.src",
        "_ws.malformed", display_filter='frame.interface_name == "eth0"',
    )  # fmt: skip
    assert len(rows) > 100
    assert {row["vxlan.vni"] for row in rows} == {"1"}
    assert {row["_ws.malformed"] for row in rows} == {""}
    assert {row["udp.checksum.status"].split(",")[0] for row in rows} == {"1"}
    directions = {
        (int(row["frame.packet_flags_direction"], 0), row["ip.src"].split(",")[0]) for row in rows if row["ip.src"]
    }
    assert {(2, str(host.ipv4)), (1, str(peer.ipv4))} <= directions
    delivered = [packet for name, way, packet in read(path) if (name, way) == ("flannel.1", "in")]
    carried = [IP(p) if p[0] >> 4 == 4 else IPv6(p) for name, way, p in read(path) if (name, way) == ("eth0", "in")]
    inner = {bytes(one[UDP].payload)[22:] for one in carried}
    alone = [packet for packet in delivered if len(packet) <= 200]
    assert alone
    assert all(packet in inner for packet in alone), "a short packet came out as it never went in"
