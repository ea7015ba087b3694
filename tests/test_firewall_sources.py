"""Who sees which source address: every kind of source and destination, over both families, on a host with our rules.

`near` and `far` are hosts of one overlay, with kernel VXLAN devices in the place of ours, which have the same addresses and
routes; both have the rules. `outside` and `friend` are other hosts of the underlay, with routes to the overlay by `near`;
`friend` is on the exclude list.
"""

import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path

import pytest

from dataplane.host.firewall import NftFirewall, Rules
from dataplane.lab import Host, Lab, Namespace, Pod, inside

SHARES_A_LAB = True
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is missing (Debian package nftables)"),
]

NETWORKS = (IPv4Network("10.244.0.0/16"), IPv6Network("fd00:10:244::/48"))
SUBNETS = {
    "near": (IPv4Network("10.244.1.0/24"), IPv6Network("fd00:10:244:1::/64")),
    "far": (IPv4Network("10.244.2.0/24"), IPv6Network("fd00:10:244:2::/64")),
}
GROUP = {4: "239.1.2.3", 6: "ff05::1:3"}
MARKED, MARKED_OTHERWISE = 7777, 7778
CONNTRACK = Path("/proc/thread-self/net/nf_conntrack")  # that of the namespace which the thread is in


@dataclass
class Scene:
    near: Host
    far: Host
    outside: Host
    friend: Host
    firewall: NftFirewall
    rules: Rules

    def address(self, who: str, version: int) -> str:
        """Of a pod or host, or one of the addresses that `near` has besides that of its eth0."""
        subnet = SUBNETS["near"][version == 6]
        special = {"near's device": subnet[0], "near's bridge": subnet[1]}
        if who in special:
            return str(special[who])
        place = self.place(who)
        assert isinstance(place, Pod | Host)
        return str(place.ipv4 if version == 4 else place.ipv6)

    def place(self, who: str) -> Namespace:
        pods = {"own pod": self.near.pods[0], "other own pod": self.near.pods[1], "remote pod": self.far.pods[0]}
        hosts = {"near": self.near, "outside": self.outside, "friend": self.friend}
        return {**pods, **hosts}[who]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Lab("fws") as lab:
        near, far, outside, friend = (lab.add_host() for _ in range(4))
        macs = {host.name: host.add_kernel_vxlan(*SUBNETS[name]) for name, host in (("near", near), ("far", far))}
        for host, peer, name in ((near, far, "far"), (far, near, "near")):
            for subnet in SUBNETS[name]:
                host.add_kernel_peer(subnet, peer.ipv4, macs[peer.name])
        for host, name, count in ((near, "near", 2), (far, "far", 1)):
            for _ in range(count):
                host.add_pod(*SUBNETS[name])
        for host in (outside, friend):
            host.ip(f"route add {NETWORKS[0]} via {near.ipv4}", f"route add {NETWORKS[1]} via {near.ipv6}")
        mark = "add table inet marks; add chain inet marks pre { type filter hook prerouting priority mangle; }; "
        mark += f"add rule inet marks pre udp dport {MARKED} meta mark set 0x14001; "
        mark += f"add rule inet marks pre udp dport {MARKED_OTHERWISE} meta mark set 0x8000"
        assert near.run(["nft", mark]).returncode == 0
        firewall = NftFirewall("pyflannel-dp-flannel.1")
        exclude = (ip_network(friend.ipv4), ip_network(friend.ipv6))
        rules = Rules(NETWORKS, SUBNETS["near"], masquerade=True, forward=True, exclude=exclude)
        with inside(near.name):
            firewall.apply(rules)
        with inside(far.name):
            NftFirewall("pyflannel-dp-flannel.1").apply(Rules(NETWORKS, SUBNETS["far"], masquerade=True, forward=True))
        yield Scene(near, far, outside, friend, firewall, rules)


class Flow:
    """A UDP socket in each of two places, the first connected to the second."""

    def __init__(self, source: Namespace, target: Namespace, address: str, bound: str | None = None, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with inside(target.name):
            self.server = socket.socket(family, socket.SOCK_DGRAM)
        with inside(source.name):
            self.client = socket.socket(family, socket.SOCK_DGRAM)
        for one in (self.server, self.client):
            one.settimeout(5)
        self.server.bind((address, port))
        self.client.bind((bound or ("::" if ":" in address else "0.0.0.0"), 0))
        self.client.connect(self.server.getsockname())

    def __enter__(self) -> "Flow":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.client.close()

    def ask(self) -> tuple[str, int]:
        """Source address and port that the server sees; its answer must come back."""
        self.client.send(b"who am I?")
        data, seen = self.server.recvfrom(100)
        assert data == b"who am I?"
        self.server.sendto(repr(seen[:2]).encode(), seen)
        assert self.client.recv(100) == repr(seen[:2]).encode()
        return seen[0], seen[1]

    def translations(self, host: Host) -> int | None:
        """How many entries of this flow in the host's conntrack table are NAT; None where the table cannot be read."""
        with inside(host.name):
            if not CONNTRACK.exists():
                return None
            lines = CONNTRACK.read_text().splitlines()
        port = self.server.getsockname()[1]
        count = 0
        for line in lines:
            fields = [word.split("=") for word in line.split() if "=" in word]
            ways = {name: [value for key, value in fields if key == name] for name in ("src", "dst", "dport")}
            if ways["dport"] and ways["dport"][0] == str(port):
                count += ip_address(ways["src"][0]) != ip_address(ways["dst"][1])
        return count


# From whom, to whom, the source's own address where the kernel does not choose it, whom the target sees, is that NAT.
CASES = [
    ("own pod", "other own pod", None, "own pod", False),
    ("own pod", "remote pod", None, "own pod", False),
    ("own pod", "outside", None, "near", True),
    ("own pod", "friend", None, "own pod", False),
    ("own pod", "near", None, "own pod", False),
    ("remote pod", "own pod", None, "remote pod", False),
    ("outside", "own pod", None, "outside", False),
    ("outside", "remote pod", None, "near's device", True),
    ("friend", "remote pod", None, "near's device", True),
    ("near", "remote pod", None, "near's device", False),
    ("near", "own pod", None, "near's bridge", False),
    ("near", "remote pod", "near", "near's device", True),
    ("near", "own pod", "near", "near", False),
    ("near", "outside", None, "near", False),
    ("near", "outside", "near's bridge", "near", True),
]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(("source", "target", "bound", "seen", "is_translated"), CASES)
def test_who_sees_which_source(scene, version, source, target, bound, seen, is_translated):
    own = scene.address(bound, version) if bound else None
    with Flow(scene.place(source), scene.place(target), scene.address(target, version), own) as flow:
        address, port = flow.ask()
        assert address == scene.address(seen, version)
        assert ((address, port) != flow.client.getsockname()[:2]) is is_translated
        assert flow.translations(scene.near) in (int(is_translated), None)
        assert flow.translations(scene.far) in (0, None)


@pytest.mark.parametrize("version", [4, 6])
def test_what_kube_proxy_marks_is_left_to_it(scene, version):
    place, outside = scene.place("own pod"), scene.outside
    for port, seen in ((MARKED, "own pod"), (MARKED_OTHERWISE, "near")):
        with Flow(place, outside, scene.address("outside", version), port=port) as flow:
            assert flow.ask()[0] == scene.address(seen, version)


@pytest.mark.parametrize("version", [4, 6])
def test_multicast_keeps_its_source(scene, version):
    source = scene.address("near's bridge", version)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with inside(scene.outside.name):
        receiver = socket.socket(family, socket.SOCK_DGRAM)
        index = socket.if_nametoindex("eth0").to_bytes(4, "little")
    with inside(scene.near.name):
        sender = socket.socket(family, socket.SOCK_DGRAM)
        near_index = socket.if_nametoindex("eth0")
    with receiver, sender:
        receiver.settimeout(5)
        receiver.bind(("", 0))
        group = socket.inet_pton(family, GROUP[version])
        if version == 4:
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + bytes(4) + index)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, bytes(8) + near_index.to_bytes(4, "little"))
        else:
            receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + index)
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, near_index)
        sender.bind((source, 0))
        sender.sendto(b"all", (GROUP[version], receiver.getsockname()[1]))
        data, seen = receiver.recvfrom(100)
        assert (data, seen[0]) == (b"all", source)


@pytest.mark.parametrize("version", [4, 6])
def test_source_ports_are_random_unless_that_is_off(scene, version):
    def kept() -> list[bool]:
        found = []
        for _ in range(4):
            with Flow(scene.place("own pod"), scene.outside, scene.address("outside", version)) as flow:
                found.append(flow.ask()[1] == flow.client.getsockname()[1])
        return found

    assert not all(kept())
    plain = Rules(NETWORKS, SUBNETS["near"], masquerade=True, forward=True, fully_random=False)
    with inside(scene.near.name):
        scene.firewall.apply(plain)
        try:
            assert all(kept())
        finally:
            scene.firewall.apply(scene.rules)


@pytest.mark.parametrize("is_tracked", [True, False])
@pytest.mark.parametrize("version", [4, 6])
def test_while_the_rules_are_flushed_nothing_is_translated(scene, version, is_tracked):
    """A connection that begins meanwhile stays so if somebody else on the host has the kernel track connections."""
    ends = (scene.place("own pod"), scene.outside, scene.address("outside", version))
    near, own_pod = scene.address("near", version), scene.address("own pod", version)
    tracking = "add table inet tracks; add chain inet tracks pre { type filter hook prerouting priority 0; }; "
    tracking += "add rule inet tracks pre ct state invalid counter" if is_tracked else ""
    assert scene.near.run(["nft", tracking]).returncode == 0
    with Flow(*ends) as early, Flow(*ends) as meanwhile, Flow(*ends) as late, inside(scene.near.name):
        translated = early.ask()
        assert translated[0] == near
        scene.near.run(["nft", "flush", "table", "inet", scene.firewall.table])
        assert not scene.firewall.is_intact(scene.rules)
        assert meanwhile.ask()[0] == own_pod
        scene.firewall.apply(scene.rules)
        assert scene.firewall.is_intact(scene.rules)
        assert early.ask() == translated
        assert late.ask()[0] == near
        assert meanwhile.ask()[0] == (own_pod if is_tracked else near)
    assert scene.near.run("nft delete table inet tracks").returncode == 0


@pytest.mark.parametrize("version", [4, 6])
def test_nothing_slips_through_while_the_table_is_replaced_again_and_again(scene, version):
    """New connections are masqueraded all the time, and an old one keeps its port."""
    stop = threading.Event()
    applied: list[int] = []

    def replace() -> None:
        with inside(scene.near.name):
            while not stop.is_set():
                scene.firewall.apply(scene.rules)
                applied.append(1)

    ends = (scene.place("own pod"), scene.outside, scene.address("outside", version))
    replacer = threading.Thread(target=replace)
    with Flow(*ends) as old:
        first = old.ask()
        replacer.start()
        try:
            while len(applied) < 20 and replacer.is_alive():
                with Flow(*ends) as new:
                    assert new.ask()[0] == scene.address("near", version)
                assert old.ask() == first
        finally:
            stop.set()
            replacer.join()
    assert len(applied) >= 20
