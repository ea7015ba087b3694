"""What is read of the kernel, against what ``ip`` says of it."""

import errno
import json
import socket
import struct
from ipaddress import ip_address, ip_interface, ip_network
from typing import ClassVar

import pytest

from dataplane.host import HostError, reading
from dataplane.lab import Lab, Namespace, inside


@pytest.fixture
def namespace():
    with Lab("read") as lab:
        made = Namespace(lab, lab.new_namespace("a"))
        made.sysctl({"net/ipv6/conf/default/accept_dad": "0"})
        with inside(made.name):
            yield made


def ip_json(namespace: Namespace, *what: str) -> list[dict]:
    return json.loads(namespace.run(["ip", "-j", "-d", *what]).stdout or "[]")


@pytest.mark.netns
def test_a_fresh_namespace_has_a_loopback_and_no_routes(namespace):
    (lo,) = reading.interfaces()
    assert (lo.name, lo.index, lo.mtu, lo.addresses, lo.is_up, lo.has_carrier) == ("lo", 1, 65536, (), False, False)
    assert [reading.routes(version) for version in (4, 6)] == [[], []]
    assert reading.addresses(1) == reading.addresses(99) == []
    assert reading.interface_by_index(99) is None


@pytest.mark.netns
def test_interfaces_are_those_that_ip_shows(namespace):
    namespace.ip(
        "link set lo up",
        "link add eth0 type veth peer name eth1",
        "link set eth0 up",
        "link add vx type vxlan id 1 dstport 8472 local 127.0.0.1",
        "link add br0 mtu 1300 type bridge",
        "tuntap add tun7 mode tun",
        "link set tun7 alias pyflannel-dp:/run/ü",
        "addr add 192.0.2.1/24 dev eth0",
        "addr add 10.1.0.1 peer 10.2.0.1/32 dev tun7",
        "addr add fd00::1 peer fd00::2/128 dev tun7",
        "addr add 2001:db8::1/64 dev eth0",
    )
    shown = {one["ifname"]: one for one in ip_json(namespace, "addr")}
    found = {one.name: one for one in reading.interfaces()}
    assert found.keys() == shown.keys() == {"lo", "eth0", "eth1", "vx", "br0", "tun7"}
    for name, one in found.items():
        ip = shown[name]
        assert (one.index, one.mtu, one.alias) == (ip["ifindex"], ip["mtu"], ip.get("ifalias", ""))
        assert one.kind == ip.get("linkinfo", {}).get("info_kind", "")
        assert (one.is_up, one.has_carrier) == ("UP" in ip["flags"], "LOWER_UP" in ip["flags"])
        addresses = [ip_interface(f"{own['local']}/{own['prefixlen']}") for own in ip["addr_info"]]
        assert sorted(one.addresses, key=str) == sorted(addresses, key=str)
        assert reading.interfaces([name]) == [one]
    assert {name: one.udp_port for name, one in found.items() if one.udp_port} == {"vx": 8472}
    own = {one.interface: one.peer for one in reading.addresses(found["tun7"].index)}
    assert own == {
        ip_interface("10.1.0.1/32"): ip_address("10.2.0.1"),
        ip_interface("fd00::1/128"): ip_address("fd00::2"),
    }


@pytest.mark.netns
def test_names_that_are_not_there_are_left_out(namespace):
    assert [one.name for one in reading.interfaces(["eth7", "lo", "x" * 15])] == ["lo"]


@pytest.mark.netns
def test_routes_of_the_main_table_are_read_whole_and_filtered(namespace):
    """More than one buffer of them, and another table with as many before the main one."""
    namespace.ip(
        "link add eth0 type veth peer name eth1",
        "link set eth0 up",
        "link set eth1 up",
        "addr add 192.0.2.1/24 dev eth0",
        "addr add 2001:db8::1/64 dev eth0",
        *(f"route add 10.{i // 256}.{i % 256}.0/24 dev eth0 table 7" for i in range(1500)),
        *(f"route add 10.{i // 256}.{i % 256}.0/24 via 192.0.2.9 metric 3" for i in range(1500)),
        *(f"route add fd00:{i:x}::/32 via 2001:db8::9 table {table}" for i in range(600) for table in (7, 254)),
        "route add 10.99.0.0/16 proto 241 nexthop via 192.0.2.8 dev eth0 nexthop via 192.0.2.9 dev eth0",
        "route add blackhole 10.98.0.0/16 proto 241",
        "route add 10.97.0.0/16 via 192.0.2.9 proto 241",
        "route add default via 192.0.2.9 metric 20",
        "route add default via 2001:db8::9 metric 30",
    )
    (eth0,) = reading.interfaces(["eth0"])
    found = reading.routes(4)
    assert len(found) == 1500 + 3 + 1
    assert {(route.network, route.index, route.metric) for route in found} >= {
        (ip_network(f"10.{i // 256}.{i % 256}.0/24"), eth0.index, 3) for i in range(1500)
    }
    assert reading.routes(4, 241) == [
        reading.UnicastRoute(ip_network("10.97.0.0/16"), eth0.index, 0, False),
        reading.UnicastRoute(ip_network("10.99.0.0/16"), eth0.index, 0, True),
    ]
    for version, default, metric in ((4, "0.0.0.0/0", 20), (6, "::/0", 30)):
        expected = reading.UnicastRoute(ip_network(default), eth0.index, metric, False)
        assert reading.routes(version, prefix_length=0) == [expected]
    found = {route.network for route in reading.routes(6)}
    assert found >= {ip_network(f"fd00:{i:x}::/32") for i in range(600)}
    assert len(found) <= 600 + 4


class Scripted(socket.socket):
    """Answers each request with the next of `script`, as the kernel might."""

    script: ClassVar[list[bytes]] = []
    requests = 0

    def sendto(self, *_: object) -> int:
        Scripted.requests += 1
        return 0

    def recv(self, *_: object) -> bytes:
        return Scripted.script.pop(0)


DONE = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)


def link_message(index: int, flags: int = 2) -> bytes:
    """A RTM_NEWLINK of a link called lo with an MTU, of a dump (NLM_F_MULTI)."""
    attributes = struct.pack("=HH3sx", 7, 3, b"lo\0") + struct.pack("=HHI", 8, 4, 1500)
    body = struct.pack("=BxHiII", 0, 0, index, 0, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), 16, flags, 1, 0) + body


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr("dataplane.host.reading.socket.socket", Scripted)
    Scripted.requests = 0
    return Scripted


ADDRESSES = [DONE]


def test_an_interrupted_dump_is_made_again(scripted):
    interrupted = [link_message(1), link_message(3, flags=2 | 0x10), DONE]
    scripted.script = [*interrupted, *interrupted, link_message(1) + link_message(2), link_message(3) + DONE, *ADDRESSES]
    assert [one.index for one in reading.interfaces()] == [1, 2, 3]
    assert (scripted.requests, scripted.script) == (4, [])


def test_a_dump_that_is_always_interrupted_is_better_than_none(scripted):
    scripted.script = [link_message(1, flags=2 | 0x10), DONE] * 5 + ADDRESSES
    assert [one.index for one in reading.interfaces()] == [1]
    assert (scripted.requests, scripted.script) == (6, [])


@pytest.mark.parametrize("kind", [2, 3])
def test_what_the_kernel_refuses_is_said(scripted, kind):
    scripted.script = [struct.pack("=IHHIIi", 20, kind, 0, 1, 0, -errno.EPERM)]
    with pytest.raises(HostError, match="cannot read the interfaces and routes: Operation not permitted"):
        reading.interfaces()
