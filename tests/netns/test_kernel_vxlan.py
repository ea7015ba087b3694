"""A node beside a kernel VXLAN device that knows nothing of us, with the veth offloads on (the default) and off."""

import os
import socket
import struct
import sys

import pytest
from cluster import IPV6_NETWORK, NETWORK, Tap, add_up, cluster, pings, traceroute, transfer, udp_sockets

from dataplane.lab import inside

SHARES_A_LAB = True
pytestmark = [pytest.mark.netns, pytest.mark.pure]


@pytest.fixture(scope="module", params=["offloads on", "tx off", "no tunnel segmentation", "NAPI GRO"])
def mixed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    with cluster(folder, "--network", NETWORK, "--ipv6-network", IPV6_NETWORK, nodes=1) as made:
        made.node = made.lab.hosts[0]
        made.kernel, made.kernel_pod = made.add_kernel_host()
        made.pod = made.node.pods[0]
        made.wait_for_peers(made.node, 2)
        switches = {"tx off": ["tx", "off"], "no tunnel segmentation": ["tx-udp_tnl-segmentation", "off"]}
        if request.param in switches:
            assert made.kernel.run(["ethtool", "-K", "eth0", *switches[request.param]]).returncode == 0
        if request.param == "NAPI GRO":  # real coalescing of outer datagrams, as behind a NIC: strides of whole frames
            assert made.kernel.run(["ethtool", "-K", "eth0", "tx", "off"]).returncode == 0
            assert made.node.run(["ethtool", "-K", "eth0", "gro", "on"]).returncode == 0
        yield made
        assert add_up(made.status(made.node))


@pytest.mark.parametrize("version", [4, 6])
def test_ping_both_ways(mixed, version):
    targets = (mixed.kernel_pod.ipv4, mixed.pod.ipv4) if version == 4 else (mixed.kernel_pod.ipv6, mixed.pod.ipv6)
    assert pings(mixed.pod, targets[0])
    assert pings(mixed.kernel_pod, targets[1])
    assert pings(mixed.kernel_pod, targets[1], "-s", "60000")


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("towards", ["kernel", "node"])
def test_a_hundred_megabytes_over_tcp_arrive_whole(mixed, version, towards):
    ends = (mixed.pod, mixed.kernel_pod) if towards == "kernel" else (mixed.kernel_pod, mixed.pod)
    uncompiled = bool(os.environ.get("PYFLANNEL_DP_PURE"))
    assert transfer(*ends, version, 10 if uncompiled else 100)


@pytest.mark.parametrize("version", [4, 6])
def test_udp_of_every_size_class_both_ways(mixed, version):
    whole = 1430 - (28 if version == 4 else 48)
    sizes = [0, 1, 18, 64, 1200, whole - 100, whole, whole + 1, 2 * whole, 30000, 65000]
    for ends in ((mixed.pod, mixed.kernel_pod), (mixed.kernel_pod, mixed.pod)):
        with udp_sockets(*ends, version) as (sender, receiver):
            for size in sizes:
                payload = os.urandom(size)
                sender.send(payload)
                assert receiver.recv(65535) == payload, size


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("towards", ["kernel", "node"])
def test_udp_superpackets_keep_their_datagrams(mixed, version, towards):
    """An inner sender that uses UDP_SEGMENT: every datagram arrives by itself, whole and in order."""
    ends = (mixed.pod, mixed.kernel_pod) if towards == "kernel" else (mixed.kernel_pod, mixed.pod)
    with udp_sockets(*ends, version) as (sender, receiver):
        for size, count in ((1200, 10), (1200, 40), (100, 60), (1300, 44)):
            payload = os.urandom(size * count - 7)
            sender.sendmsg([payload], [(socket.IPPROTO_UDP, 103, size.to_bytes(2, sys.byteorder))])
            pieces = [payload[at : at + size] for at in range(0, len(payload), size)]
            assert [receiver.recv(65535) for _ in pieces] == pieces


def test_traceroute_both_ways(mixed):
    net = mixed.subnets(mixed.node)[0]
    there = traceroute(mixed.pod, mixed.kernel_pod.ipv4)
    assert there == [str(net.network_address + 1), "10.244.200.0", str(mixed.kernel_pod.ipv4)]
    back = traceroute(mixed.kernel_pod, mixed.pod.ipv4)
    assert back == ["10.244.200.1", str(net.network_address), str(mixed.pod.ipv4)]


def vxlan_payloads(frames: list[bytes], source: bytes) -> list[bytes]:
    """UDP payloads to port 8472 from `source`, out of Ethernet frames."""
    return [
        f[42:] for f in frames if f[12:14] == b"\x08\x00" and f[26:30] == source and f[36:38] == struct.pack("!H", 8472)
    ]


def test_our_header_is_byte_for_byte_what_the_kernel_emits(mixed):
    with Tap(mixed.node.name, "eth0") as tap:
        assert pings(mixed.pod, mixed.kernel_pod.ipv4)
        frames = tap.caught()
    ours = vxlan_payloads(frames, mixed.node.ipv4.packed)
    kernels = vxlan_payloads(frames, mixed.kernel.ipv4.packed)
    requests = [payload for payload in ours if payload[31] == 1]
    replies = [payload for payload in kernels if payload[31] == 1]
    assert len(requests) == len(replies) == 3
    for request, reply in zip(requests, replies, strict=True):
        assert request[:8] == reply[:8] == bytes.fromhex("0800000000000100")
        assert (request[8:14], request[14:20]) == (reply[14:20], reply[8:14])
        assert request[20:22] == reply[20:22] == b"\x08\x00"


def test_a_reserved_bit_dies_at_the_kernel_which_is_why_we_send_none(mixed):
    """Documents drivers/net/vxlan/vxlan_core.c, vxlan_rcv: leftover reserved bits are dropped."""
    assert pings(mixed.pod, mixed.kernel_pod.ipv4)
    with Tap(mixed.node.name, "eth0") as tap:
        assert pings(mixed.pod, mixed.kernel_pod.ipv4)
        request = next(p for p in vxlan_payloads(tap.caught(), mixed.node.ipv4.packed) if p[31] == 1)
    with Tap(mixed.kernel_pod.name, "eth0") as tap, inside(mixed.node.name):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"\x08\x00\x00\x01" + request[4:], (str(mixed.kernel.ipv4), 8472))
            sender.sendto(request, (str(mixed.kernel.ipv4), 8472))
        assert pings(mixed.pod, mixed.kernel_pod.ipv4)
        identity = request[46:50]
        repeated = [frame for frame in tap.caught() if frame[38:42] == identity and frame[34] == 8]
    assert len(repeated) == 1
