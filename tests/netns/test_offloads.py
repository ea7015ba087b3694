"""All 32 combinations of the five offloads carry everything; and what happens when the kernel refuses one at run time."""

import contextlib
import itertools
import os
import socket
import sys

import pytest
from cluster import NETWORK, add_up, cluster, pings, transfer, udp_sockets

from dataplane.offload import Offload

SHARES_A_LAB = True
pytestmark = pytest.mark.netns

POD_MTU = 1400  # fits the device in both framings
COMBINATIONS = list(itertools.product([True, False], repeat=len(Offload)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Two hosts with pods, without nodes: each test starts its own, on the same static subnets."""
    with cluster(tmp_path_factory.mktemp("offloads"), nodes=2, start=False) as made:
        yield made


@contextlib.contextmanager
def running(made, off: list[str], framing: str):
    a, b = made.lab.hosts
    for host, own, peer in ((a, 1, b), (b, 2, a)):
        options = [f"--no-{name}" for name in off]
        made.start(
            host, "--store", "static", "--network", NETWORK, "--subnet", f"10.244.{own}.0/24", "--framing", framing,
            "--ipv6-network", "fd00:10:244::/48", "--ipv6-subnet", f"fd00:10:244:{own}::/64",
            "--peer", f"10.244.{3 - own}.0/24={peer.ipv4}", "--peer", f"fd00:10:244:{3 - own}::/64={peer.ipv4}", *options,
        )  # fmt: skip
        if not host.pods:
            host.add_pod(*made.subnets(host), mtu=POD_MTU)
    try:
        yield a, b
        for host in (a, b):
            assert add_up(made.status(host))
    finally:
        codes = [made.stop(host) for host in (a, b)]
    assert codes == [0, 0]


@pytest.mark.parametrize("states", COMBINATIONS, ids=lambda states: "".join("+" if state else "-" for state in states))
def test_every_combination_carries_everything(lab, states):
    off = [str(offload) for offload, state in zip(Offload, states, strict=True) if not state]
    framing = "ip" if sum(states) % 2 else "vxlan"  # each framing with half of the combinations
    with running(lab, off, framing) as (a, b):
        reported = lab.status(a)["offloads"]
        assert reported == {offload: "off: by option" if offload in off else "on" for offload in map(str, Offload)}
        pod_a, pod_b = a.pods[0], b.pods[0]
        for version in (4, 6):
            assert transfer(pod_a, pod_b, version, 3)
            with udp_sockets(pod_b, pod_a, version) as (sender, receiver):
                for size in (1, 64, 1300, 5000):
                    payload = os.urandom(size)
                    sender.send(payload)
                    assert receiver.recv(65535) == payload
                payload = os.urandom(1000 * 20 - 3)
                sender.sendmsg([payload], [(socket.IPPROTO_UDP, 103, (1000).to_bytes(2, sys.byteorder))])
                assert b"".join(receiver.recv(65535) for _ in range(20)) == payload
        assert pings(pod_a, pod_b.ipv4, "-s", "20000")
