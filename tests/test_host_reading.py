"""What is read of the kernel, against what ``ip`` says of it."""

import json
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from dataplane.host import reading
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


@pytest.mark.netns
def test_the_tuning_of_links_is_what_ip_and_proc_say(namespace):
    namespace.ip(
        "link add eth0 type veth peer name eth1",
        "tuntap add tun7 mode tun",
        "link set eth0 txqueuelen 77 gso_max_size 9000",
        "link set tun7 mtu 68",
        "link set lo mtu 67",  # too little for IPv4, whose sysctls go (net/ipv4/devinet.c, inetdev_event)
    )
    namespace.sysctl({"net/ipv4/conf/eth1/accept_local": "1", "net/ipv4/conf/tun7/src_valid_mark": "1"})
    shown = {one["ifname"]: one for one in ip_json(namespace, "link")}
    found = reading.interfaces()
    assert {one.name for one in found} == {"lo", "eth0", "eth1", "tun7"}
    for one in found:
        ip = shown[one.name]
        assert (one.queue_length, one.superpacket_limit) == (ip.get("txqlen", 0), ip["gso_max_size"])
    assert {one.name: one.accepts_own_source for one in found if one.accepts_own_source} == {"eth1": True}
    eth0 = next(one for one in found if one.name == "eth0")
    assert (eth0.queue_length, eth0.superpacket_limit) == (77, 9000)


@pytest.mark.netns
def test_the_link_towards_an_address_is_that_of_its_route(namespace):
    namespace.ip(
        "link add eth0 type veth peer name eth1",
        "link set lo up",
        "link set eth0 up",
        "link set eth1 up",
        "addr add 192.0.2.1/24 dev eth0",
        "addr add 2001:db8::1/64 dev eth0",
        "route add 10.9.0.0/16 nexthop via 192.0.2.8 dev eth0 nexthop via 192.0.2.9 dev eth0",
        "route add unreachable 10.8.0.0/16",
        "route add prohibit 10.7.0.0/16",
        "route add blackhole 10.6.0.0/16",
        "route add blackhole fd06::/48",
    )
    (eth0,) = reading.interfaces(["eth0"])
    expected = {
        "192.0.2.1": 1, "192.0.2.9": eth0.index, "10.9.9.9": eth0.index, "2001:db8::5": eth0.index,
        "10.8.0.1": None, "10.7.0.1": None, "10.6.0.1": None, "198.51.100.1": None, "fd06::1": None, "fd99::1": None,
    }  # fmt: skip
    assert {one: reading.link_towards(ip_address(one)) for one in expected} == expected
