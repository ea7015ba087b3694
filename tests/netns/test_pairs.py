"""Two nodes in namespaces, in each framing: everything that pods do to each other."""

import json
import os
from ipaddress import ip_address

import pytest
from cluster import (
    IPV6_NETWORK,
    NETWORK,
    Tap,
    add_up,
    cluster,
    ping,
    pings,
    traceroute,
    transfer,
    tshark,
    udp_sockets,
    write_pcap,
)

from dataplane.lab import inside

SHARES_A_LAB = True
pytestmark = pytest.mark.netns

OVERHEAD = {"vxlan": 22, "ip": 0}


@pytest.fixture(scope="module", params=["vxlan", "ip"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with cluster(folder, "--network", NETWORK, "--ipv6-network", IPV6_NETWORK, "--framing", request.param) as made:
        made.framing = request.param
        made.a, made.b = made.lab.hosts
        made.pod_a, made.pod_b = made.a.pods[0], made.b.pods[0]
        yield made
        for host in made.lab.hosts:
            assert add_up(made.status(host))


@pytest.fixture
def complete_outer_checksums(pair):
    """Without this the veth leaves the outer UDP checksum to hardware that is not there, for our frames as for any."""
    for state in ("off", "on"):
        for host in (pair.a, pair.b):
            assert host.run(["ethtool", "-K", "eth0", "tx", state]).returncode == 0
        if state == "off":
            yield


def target(pod, version):
    return pod.ipv4 if version == 4 else pod.ipv6


@pytest.mark.parametrize("version", [4, 6])
def test_ping_both_ways(pair, version):
    assert pings(pair.pod_a, target(pair.pod_b, version))
    assert pings(pair.pod_b, target(pair.pod_a, version))


def test_hosts_reach_pods_and_each_others_overlay_address(pair):
    overlay_b = pair.subnets(pair.b)[0].network_address
    assert pings(pair.a, pair.pod_b.ipv4)
    assert pings(pair.a, overlay_b)
    assert pings(pair.pod_a, overlay_b)


@pytest.mark.parametrize("version", [4, 6])
def test_a_hundred_megabytes_over_tcp_arrive_whole(pair, version):
    assert transfer(pair.pod_a, pair.pod_b, version, 100)


@pytest.mark.parametrize("version", [4, 6])
def test_udp_of_every_size_class(pair, version):
    mtu = pair.status(pair.a)["device"]["mtu"]
    whole = mtu - (28 if version == 4 else 48)
    largest = 65507 if version == 4 else 65487
    sizes = [0, 1, 2, 3, 17, 18, 19, 63, 64, 65, 511, 1200, whole - 1, whole, whole + 1, 2 * whole, 8000, 30000, largest]
    with udp_sockets(pair.pod_a, pair.pod_b, version) as (sender, receiver):
        for size in sizes:
            payload = os.urandom(size)
            sender.send(payload)
            assert receiver.recv(65535) == payload, size


@pytest.mark.parametrize("version", [4, 6])
def test_a_ping_of_sixty_thousand_bytes(pair, version):
    assert pings(pair.pod_a, target(pair.pod_b, version), "-s", "60000")


def test_the_biggest_unfragmentable_ping_is_one_datagram_that_fills_the_underlay(pair):
    mtu = pair.status(pair.a)["device"]["mtu"]
    with Tap(pair.a.name, "eth0") as tap:
        assert pings(pair.pod_a, pair.pod_b.ipv4, "-M", "do", "-s", str(mtu - 28))
        outgoing = [frame for frame in tap.caught() if frame[12:14] == b"\x08\x00" and frame[30:34] == pair.b.ipv4.packed]
    spare = 1500 - (mtu + OVERHEAD[pair.framing] + 28)
    assert {len(frame) for frame in outgoing} == {1514 - spare}
    assert len(outgoing) == 3


def test_traceroute_names_every_hop(pair):
    net_a, net_b = pair.subnets(pair.a)[0], pair.subnets(pair.b)[0]
    gateway = str(net_a.network_address + 1)
    both_ends = {
        "vxlan": [str(net_b.network_address)],
        "ip": [str(net_a.network_address), *[str(net_b.network_address)] * 2],
    }
    assert traceroute(pair.pod_a, pair.pod_b.ipv4) == [gateway, *both_ends[pair.framing], str(pair.pod_b.ipv4)]


@pytest.mark.parametrize("address", ["10.244.250.9", "fd00:10:244:fa::9"])
def test_a_ping_to_a_subnet_without_a_lease_is_answered_at_once(pair, address):
    for source in (pair.pod_a, pair.a):
        done = ping(source, address, count=1)
        assert "From " in done.stdout
        assert "nreachable" in done.stdout
    assert pair.status(pair.a)["outbound"]["verdicts"]["no_route"] >= 2


def test_multicast_is_not_answered(pair):
    before = pair.status(pair.a)
    with inside(pair.a.name):
        import socket

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            device = before["device"]["name"].encode()
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device)
            sender.sendto(b"x", ("239.1.2.3", 5000))
    after = pair.status(pair.a)
    assert after["outbound"]["verdicts"]["multicast"] > before["outbound"]["verdicts"]["multicast"]
    assert after["icmp_errors"] == before["icmp_errors"]


def test_tshark_reads_what_we_emit_without_complaint(pair, tmp_path, complete_outer_checksums):
    with Tap(pair.a.name, "eth0") as tap:
        assert pings(pair.pod_a, pair.pod_b.ipv4)
        assert pings(pair.pod_a, pair.pod_b.ipv6)
        frames = [frame for frame in tap.caught() if frame[12:14] in {b"\x08\x00", b"\x86\xdd"}]
    write_pcap(tmp_path / "a.pcap", frames)
    rows = tshark(
        tmp_path / "a.pcap", "udp.dstport", "udp.checksum.status", "vxlan.vni", "vxlan.flags", "_ws.expert.severity",
        "ip.src", "ipv6.src", display_filter="udp.dstport==8472 || udp.dstport==8285",
    )  # fmt: skip
    assert len(rows) >= 12
    for row in rows:
        assert row["udp.checksum.status"].split(",")[0] == "1", row  # good
        assert row["_ws.expert.severity"] in {"", "2097152"}, row  # nothing, or a chat about a ping's answer
    if pair.framing == "vxlan":
        assert {(row["vxlan.vni"], row["vxlan.flags"]) for row in rows} == {("1", "0x0800")}
        outer_families = {bool(row["ip.src"].split(",")[0]) for row in rows}
        assert outer_families == {True, False}  # IPv4 pings over the IPv4 underlay, IPv6 pings over IPv6


def test_the_outer_checksum_is_present_over_ipv6(pair):
    with Tap(pair.a.name, "eth0") as tap:
        assert pings(pair.pod_a, pair.pod_b.ipv6)
        port = pair.status(pair.a)["port"].to_bytes(2, "big")
        udp_over_ipv6 = [f for f in tap.caught() if f[12:14] == b"\x86\xdd" and f[20] == 17 and f[56:58] == port]
    assert len(udp_over_ipv6) >= 3
    assert all(frame[60:62] != b"\0\0" for frame in udp_over_ipv6)


def test_flows_leave_by_different_source_ports(pair):
    ports = set()
    with Tap(pair.a.name, "eth0") as tap, udp_sockets(pair.pod_a, pair.pod_b, 4) as (_, receiver), inside(pair.pod_a.name):
        import socket

        for _ in range(40):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                one.sendto(b"x", receiver.getsockname())
            receiver.recv(10)
        for frame in tap.caught():
            if frame[12:14] == b"\x08\x00" and frame[26:30] == pair.a.ipv4.packed and frame[23] == 17:
                ports.add(int.from_bytes(frame[34:36], "big"))
    assert len(ports) >= 6 if pair.framing == "vxlan" else ports == {8285}


def test_a_flood_is_counted_to_the_last_packet(pair):
    def counted(status: dict) -> int:
        return status["outbound"]["received"] + status["device"]["queue_drops"]

    from cluster import until

    assert pings(pair.pod_a, pair.pod_b.ipv4)
    before = counted(pair.status(pair.a))
    with udp_sockets(pair.pod_a, pair.pod_b, 4) as (sender, _):
        for _ in range(20000):
            sender.send(b"x" * 64)
    until("all packets to be counted", lambda: counted(pair.status(pair.a)) >= before + 20000)
    status = pair.status(pair.a)
    assert counted(status) - before <= 20010  # the kernel's own, like router solicitations
    assert add_up(status)
    assert status["state"] == "running"


def test_status_speaks_to_people_and_to_programs(pair):
    from cluster import NODE

    run_dir = ["--run-dir", str(pair.run_dir(pair.a))]
    text = pair.a.run([*NODE, "status", *run_dir]).stdout
    net_a, net_b = pair.subnets(pair.a)[0], pair.subnets(pair.b)[0]
    assert f"lease     {net_a}" in text
    assert f"{net_b} at 192.0.2.2" in text
    assert "forwarded: carried on" in text
    answer = json.loads(pair.a.run([*NODE, "status", "--json", *run_dir]).stdout)
    assert ip_address(answer["external"]["ipv4"]) == pair.a.ipv4
    assert answer["device"]["mtu"] == {"vxlan": 1430, "ip": 1452}[pair.framing]
    assert answer["compiled"] != bool(os.environ.get("PYFLANNEL_DP_PURE"))
